"""Datasets by name: small frozen sets of images, and batches of them that are the same every time.

Images are stored as uint8 and given out as float32 in 0..1, then ``(image - mean) / std``. The
CIFAR-10 weights of the data folder want 0..1 as it is (mean 0, std 1, the default here); timm's
ViT-T for ImageNet wants mean = std = 0.5, the default of ``imagenet``.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import io
import json
import math
import os
import tempfile
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

Augment = Callable[[Tensor, torch.Generator], Tensor]
NAMES = ("digits", "mnist", "cifar10", "imagenet", "imagefolder:PATH")
DIGIT_NAMES = tuple("0123456789")
CIFAR10_NAMES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
# md5 of the files in the official cifar-10-binary.tar.gz: one label byte, then the pixels.
CIFAR10_MD5 = {
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
IMAGENET_PARTS = {
    "train1": "imagenet_train1.zip",
    "k0": "imagenet_val_k0.zip",
    "k1": "imagenet_val_k1.zip",
    "k2": "imagenet_val_k2.zip",
}
IMAGENET_SPLITS = {"train": "train1+k0+k1", "test": "k2"}
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
FOLDER_SPLITS = {"train": ("train",), "test": ("test", "val", "validation")}


@dataclass(frozen=True)
class EncodedImages:
    """Images kept as files or as encoded bytes, decoded to one square size when asked for.

    An image of another size is scaled until its shorter side is 8/7 of ``size`` (256 for 224,
    as torchvision does), then cropped in the centre.
    """

    items: tuple[Path | bytes, ...]
    size: int = 224
    channels: int = 3

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Tensor) -> Tensor:
        """The images at ``index`` ``(k,)``, uint8 ``(k, channels, size, size)``."""
        return torch.stack([self._decode(self.items[i]) for i in index.tolist()])

    def take(self, index: Tensor) -> EncodedImages:
        """The encoded images at ``index``, still encoded."""
        return replace(self, items=tuple(self.items[i] for i in index.tolist()))

    def _decode(self, item: Path | bytes) -> Tensor:
        from PIL import Image

        name = "an image of the zip" if isinstance(item, bytes) else str(item)
        try:
            image = Image.open(io.BytesIO(item) if isinstance(item, bytes) else item)
            pixels = np.array(
                _square(image.convert("RGB" if self.channels == 3 else "L"), self.size)
            )
        except (OSError, SyntaxError) as error:
            raise ValueError(
                f"{name} cannot be decoded ({error}). Replace or remove it."
            ) from error
        return torch.from_numpy(pixels).view(self.size, self.size, self.channels).permute(2, 0, 1)


@dataclass(frozen=True, eq=False)
class ImageSet(Dataset[tuple[Tensor, int]]):
    """Labelled images of one size; a map-style dataset that ``DataLoader`` reads too.

    Attributes:
        name: Which set and split this is.
        images: uint8 ``(n, channels, height, width)``, in memory or decoded when asked for.
        labels: int64 ``(n,)``.
        class_names: One name per class, all different.
        mean: Subtracted from pixels in 0..1; one number, or one per channel.
        std: Divides what is left; one number, or one per channel.

    Example:
        >>> digits = load("digits", "test")
        >>> images, labels = digits.batch(torch.arange(4))
        >>> images.shape, images.dtype, labels.shape
        (torch.Size([4, 1, 8, 8]), torch.float32, torch.Size([4]))
    """

    name: str
    images: Tensor | EncodedImages
    labels: Tensor
    class_names: tuple[str, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        _check_images(self)
        _check_labels(self)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is outside a set of {len(self)} images.")
        images, labels = self.batch(torch.tensor([index % len(self)]))
        return images[0], int(labels[0])

    @property
    def num_classes(self) -> int:
        """How many classes there are, whether or not all of them occur."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """``(channels, height, width)`` of every image."""
        if isinstance(self.images, EncodedImages):
            return (self.images.channels, self.images.size, self.images.size)
        _, channels, height, width = self.images.shape
        return (channels, height, width)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The images at ``index`` as normalised float32, and their labels."""
        images = self.images[index].float().div_(255)
        if self.mean != (0.0,) or self.std != (1.0,):
            images.sub_(_per_channel(self.mean)).div_(_per_channel(self.std))
        return images, self.labels[index]

    def take(self, index: Tensor) -> ImageSet:
        """The images at ``index`` ``(k,)`` as a set of their own."""
        stored = self.images
        images = stored.take(index) if isinstance(stored, EncodedImages) else stored[index]
        return replace(self, images=images, labels=self.labels[index])


@dataclass
class Batches:
    """Batches of an `ImageSet`, one pass for each ``for`` loop; made by `batches`.

    ``epoch`` counts the passes begun and, with the seed, fixes order and augmentation: a resumed
    run sets it and sees the very batches it would have seen.
    """

    dataset: ImageSet
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    augment: Augment | None = None
    epoch: int = field(default=0)

    def __len__(self) -> int:
        count = len(self.dataset) / self.batch_size
        return math.floor(count) if self.drop_last else math.ceil(count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self.epoch += 1
        count = len(self.dataset)
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        for index in torch.split(order, self.batch_size)[: len(self)]:
            images, labels = self.dataset.batch(index)
            yield (images if self.augment is None else self.augment(images, generator)), labels


def batches(
    dataset: ImageSet,
    batch_size: int = 128,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    augment: Augment | None = None,
) -> Batches:
    """Batches of ``(images, labels)`` to loop over as often as you like.

    Without ``shuffle`` every pass is the same. With it each pass has its own order, and a second
    loader with the same seed gives the same passes.

    Args:
        dataset: What to read.
        batch_size: Images in a batch; the last batch may be smaller.
        shuffle: Draw a new order for each pass.
        seed: Fixes the orders and the augmentation.
        drop_last: Leave a smaller last batch out.
        augment: Called with each batch of images and the pass's generator, as `shift_and_flip` is.

    Example:
        >>> loader = batches(load("digits", "test"), 100, shuffle=True)
        >>> len(loader), sum(len(labels) for _, labels in loader)
        (4, 359)
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is not a number of images: pass 1 or more.")
    return Batches(dataset, batch_size, shuffle, seed, drop_last, augment)


def shift_and_flip(
    images: Tensor, generator: torch.Generator, *, pad: int = 2, flip: bool = False
) -> Tensor:
    """Each image moved by up to ``pad`` pixels either way and, if asked, mirrored half the time.

    Edge pixels are repeated into the gap, so normalised images need no fill value. Do not mirror
    digits.

    Example:
        >>> moved = shift_and_flip(torch.rand(4, 1, 8, 8), torch.Generator().manual_seed(0))
        >>> moved.shape
        torch.Size([4, 1, 8, 8])
    """
    count, _, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad), mode="replicate")
    top, left = torch.randint(0, 2 * pad + 1, (2, count, 1), generator=generator)
    rows, columns = top + torch.arange(height), left + torch.arange(width)  # (count, height), ...
    if flip:
        mirrored = torch.rand(count, 1, generator=generator) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    sample = torch.arange(count)[:, None, None]
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def hold_out(dataset: ImageSet, fraction: float = 0.1, seed: int = 0) -> tuple[ImageSet, ImageSet]:
    """The set without a validation part, and that part: ``fraction`` of each class, at random.

    A class with two or more images has at least one in each part.

    Example:
        >>> train, val = hold_out(load("digits"), 0.2)
        >>> len(train), len(val)
        (1151, 287)
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction={fraction} is outside 0..1: pass the share to hold out.")
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    held = torch.zeros(len(dataset), dtype=torch.bool)
    for label in range(dataset.num_classes):
        members = order[dataset.labels[order] == label]
        held[members[: min(max(1, round(fraction * len(members))), len(members) - 1)]] = True
    return dataset.take((~held).nonzero()[:, 0]), dataset.take(held.nonzero()[:, 0])


def load(
    name: str,
    split: str = "train",
    root: str | Path | None = None,
    *,
    size: int | None = None,
    channels: int | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    download: bool = False,
) -> ImageSet:
    """A dataset by name.

    Args:
        name: ``digits`` (scikit-learn's, needs no folder), ``mnist``, ``cifar10``, ``imagenet``
            (the zips of the data folder) or ``imagefolder:PATH`` (a folder for each class, or
            ``train`` and ``test`` or ``val`` folders of those).
        split: ``train`` or ``test``. Digits and a folder without splits are divided 80 : 20, class
            by class, always the same way. For ``imagenet`` also parts, such as ``train1+k0``:
            ``train`` is ``train1+k0+k1`` and ``test`` is ``k2``.
        root: The data folder; by default the environment variable ``WFILTER_DATA``.
        size: Height and width to scale to; by default as stored (224 for image files).
        channels: 3 repeats a grey image for a colour model; by default as stored.
        mean: Subtracted from pixels in 0..1: one number, or one per channel.
        std: Divides the rest. Both default to what the set's usual models want.
        download: Fetch ``mnist`` or ``cifar10`` by torchvision into the user's cache if missing.

    Returns:
        The split, with class names.

    Raises:
        ValueError: The name or split is unknown, or a file is corrupt.
        FileNotFoundError: The data folder or the set in it is missing.

    Example:
        >>> load("digits", "test", size=28, channels=3).image_shape
        (3, 28, 28)
    """
    kind, _, path = name.partition(":")
    if kind == "imagefolder" and path:
        dataset = _imagefolder(Path(path).expanduser(), split)
    elif name in _READERS:
        dataset = _READERS[name](split, root, download)
    else:
        raise ValueError(_unknown("data", name, NAMES))
    dataset = replace(dataset, images=_with_channels(_with_size(dataset.images, size), channels))
    return replace(
        dataset,
        mean=dataset.mean if mean is None else _numbers(mean),
        std=dataset.std if std is None else _numbers(std),
    )


def data_root(root: str | Path | None = None) -> Path | None:
    """The data folder: ``root``, else the environment variable ``WFILTER_DATA``, else None.

    Example:
        >>> data_root("/") == Path("/")
        True
    """
    chosen = root or os.environ.get("WFILTER_DATA")
    if not chosen:
        return None
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        source = "root" if root else "WFILTER_DATA"
        raise FileNotFoundError(f"{source}={chosen} is not a folder. Name the data folder.")
    return folder


def cache_folder() -> Path:
    """Where decoded and downloaded data is kept: ``wfilter`` in the user's cache folder.

    Example:
        >>> cache_folder().name
        'wfilter'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wfilter"


def _digits(split: str, root: str | Path | None, download: bool) -> ImageSet:
    from sklearn.datasets import load_digits

    _check_split(split, ("train", "test"))
    digits = load_digits()
    images = torch.from_numpy(digits.images * (255 / 16)).round().to(torch.uint8)[:, None]
    labels = torch.from_numpy(digits.target.astype(np.int64))
    train, test = hold_out(ImageSet("digits", images, labels, DIGIT_NAMES), 0.2)
    return replace(train if split == "train" else test, name=f"digits {split}")


def _mnist(split: str, root: str | Path | None, download: bool) -> ImageSet:
    _check_split(split, ("train", "test"))
    folder = _find("mnist", ("mnist/MNIST/raw", "MNIST/raw"), root, download)
    prefix = "train" if split == "train" else "t10k"
    images = torch.from_numpy(_read_idx(folder / f"{prefix}-images-idx3-ubyte", 3))[:, None]
    labels = torch.from_numpy(_read_idx(folder / f"{prefix}-labels-idx1-ubyte", 1)).long()
    return ImageSet(f"mnist {split}", images, labels, DIGIT_NAMES)


def _cifar10(split: str, root: str | Path | None, download: bool) -> ImageSet:
    _check_split(split, ("train", "test"))
    places = ("cifar10/labels.npz", "cifar10/cifar-10-batches-py", "cifar-10-batches-py")
    place = _find("cifar10", places, root, download)
    read = _cifar_sheets if place.name == "labels.npz" else _cifar_pickles
    pixels, labels = read(place.parent, split)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return ImageSet(f"cifar10 {split}", images, torch.from_numpy(labels).long(), CIFAR10_NAMES)


def _imagenet(split: str, root: str | Path | None, download: bool) -> ImageSet:
    parts = IMAGENET_SPLITS.get(split, split).split("+")
    for part in parts:
        _check_split(part, (*IMAGENET_SPLITS, *IMAGENET_PARTS))
    index_file = _find("imagenet", ("imagenet/imagenet_class_index.json",), root, False)
    index = json.loads(index_file.read_text())
    label = {wnid: int(row) for row, (wnid, _) in index.items()}
    items, wnids = [], []
    for part in parts:
        for name, content in _read_zip(index_file.parent / IMAGENET_PARTS[part]):
            items.append(content)
            wnids.append(name.split("/")[0])
    if strange := sorted({*wnids} - {*label}):
        raise ValueError(f"{strange[0]!r} in the zips is no ImageNet class. Copy them again.")
    labels = torch.tensor([label[wnid] for wnid in wnids])
    images, half = EncodedImages(tuple(items)), (0.5,)
    return ImageSet(f"imagenet {split}", images, labels, _imagenet_names(index), half, half)


def _imagefolder(path: Path, split: str) -> ImageSet:
    _check_split(split, tuple(FOLDER_SPLITS))
    if not path.is_dir():
        raise FileNotFoundError(f"imagefolder:{path} is not a folder. Give the folder of classes.")
    options = {s: [path / n for n in names if (path / n).is_dir()] for s, names in _SPLIT_ITEMS}
    divided = any(options.values())
    if divided and not options[split]:
        raise FileNotFoundError(f"{path} has no folder for split={split!r}: add {path / split}.")
    folders = [found[0] for found in options.values() if found] if divided else [path]
    names = sorted({c.name for f in folders for c in f.iterdir() if c.is_dir()})
    dataset = _image_files(options[split][0] if divided else path, names)
    if not divided:
        dataset = hold_out(dataset, 0.2)[split == "test"]
    return replace(dataset, name=f"imagefolder:{path} {split}")


_SPLIT_ITEMS = tuple(FOLDER_SPLITS.items())
_READERS: dict[str, Callable[[str, str | Path | None, bool], ImageSet]] = {
    "digits": _digits,
    "mnist": _mnist,
    "cifar10": _cifar10,
    "imagenet": _imagenet,
}


def _image_files(folder: Path, names: Sequence[str]) -> ImageSet:
    files = [
        (file, row)
        for row, name in enumerate(names)
        for file in sorted((folder / name).rglob("*"))
        if file.suffix.lower() in IMAGE_ENDINGS
    ]
    if not files:
        raise ValueError(
            f"{folder} holds no images. Expected {folder}/CLASS/IMAGE, ending in one of "
            f"{', '.join(IMAGE_ENDINGS)}."
        )
    labels = torch.tensor([row for _, row in files])
    return ImageSet(str(folder), EncodedImages(tuple(f for f, _ in files)), labels, tuple(names))


def _find(name: str, places: Sequence[str], root: str | Path | None, download: bool) -> Path:
    """The first of ``places`` that exists under the data folder or the cache."""
    given = data_root(root)
    for folder in (given, cache_folder()):
        for place in places:
            if folder is not None and (folder / place).exists():
                return folder / place
    if download:
        _download(name)
        return _find(name, places, cache_folder(), False)
    where = f"not in {given}" if given else "no data folder was given"
    fetch = ", or allow its download (download=True)" if name in ("mnist", "cifar10") else ""
    raise FileNotFoundError(
        f"{name} was not found: {where}. Pass root= (--data) or set WFILTER_DATA to a folder with "
        f"{' or '.join(places)}{fetch}. The set 'digits' needs no folder."
    )


def _download(name: str) -> None:
    from torchvision import datasets

    reader = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[name]
    try:
        reader(str(cache_folder() / name), download=True)
    except (OSError, RuntimeError) as error:
        raise FileNotFoundError(
            f"{name} could not be downloaded ({error}). Check the network, or set WFILTER_DATA to "
            "a folder that has it."
        ) from error


def _read_idx(path: Path, ndim: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One MNIST file, gzipped or not: the shape in a big-endian header, then bytes."""
    packed = path.with_name(path.name + ".gz")
    try:
        content = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
        magic, *shape = np.frombuffer(content, ">i4", 1 + ndim).tolist()
        if magic != 0x800 + ndim:
            raise ValueError(f"its first number is {magic}, not {0x800 + ndim}")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * ndim).reshape(shape).copy()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{packed} is missing. Copy or download MNIST again.") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        found = packed if packed.exists() else path
        raise ValueError(f"{found} is corrupt ({error}). Copy or download MNIST again.") from error


def _cifar_sheets(folder: Path, split: str) -> tuple[Any, Any]:
    """CIFAR-10 from lossless sheets of 100 x 100 tiles; decoded once, then read from the cache."""
    labels = np.load(folder / "labels.npz")[split]
    names = [name for name in CIFAR10_MD5 if name.startswith("test") == (split == "test")]
    files = [folder / f"{name}.webp" for name in names]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing. Copy the cifar10 folder again.")
    stamp = repr([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files])
    cached = cache_folder() / f"cifar10-{split}-{hashlib.md5(stamp.encode()).hexdigest()[:12]}.npy"
    with suppress(OSError, ValueError, EOFError):
        pixels = np.load(cached)
        if pixels.shape == (len(labels), 32, 32, 3) and pixels.dtype == np.uint8:
            return pixels, labels
    parts = labels.reshape(len(files), -1)
    pixels = np.concatenate([_cifar_sheet(f, y) for f, y in zip(files, parts, strict=True)])
    _save_atomically(cached, pixels)
    return pixels, labels


def _cifar_sheet(file: Path, labels: Any) -> Any:
    from PIL import Image

    try:
        sheet = np.asarray(Image.open(file).convert("RGB"))
        tiles = sheet.reshape(100, 32, 100, 32, 3).swapaxes(1, 2).reshape(10000, 32, 32, 3)
        planes = tiles.transpose(0, 3, 1, 2).reshape(10000, -1)
        content = np.concatenate([labels[:, None].astype(np.uint8), planes], 1).tobytes()
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is corrupt ({error}). Copy it again.") from error
    if hashlib.md5(content).hexdigest() != CIFAR10_MD5[file.stem]:
        raise ValueError(f"{file} is not the official {file.stem}: its md5 differs. Copy it again.")
    return tiles


def _cifar_pickles(folder: Path, split: str) -> tuple[Any, Any]:
    """CIFAR-10 as torchvision stores it; torchvision compares the md5 sums."""
    from torchvision.datasets import CIFAR10

    try:
        with warnings.catch_warnings():  # numpy's complaint about its own old pickles
            warnings.simplefilter("ignore")
            stored = CIFAR10(str(folder), train=split == "train", download=False)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"{folder / 'cifar-10-batches-py'} is incomplete or corrupt. Download CIFAR-10 again."
        ) from error
    return stored.data, np.asarray(stored.targets)


def _save_atomically(path: Path, array: Any) -> None:
    """Write a cache file whole or not at all; a cache that cannot be written is no error."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                np.save(file, array)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)


def _read_zip(path: Path) -> list[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(path) as archive:
            return [(n, archive.read(n)) for n in archive.namelist() if not n.endswith("/")]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing. Copy the imagenet folder again.") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is corrupt ({error}). Copy it again.") from error


def _imagenet_names(index: dict[str, list[str]]) -> tuple[str, ...]:
    """Class names in order; the few that occur twice (crane, maillot) get their wnid appended."""
    count = Counter(name for _, name in index.values())
    rows = [index[str(row)] for row in range(len(index))]
    return tuple(name if count[name] == 1 else f"{name}_{wnid}" for wnid, name in rows)


def _square(image: Any, size: int) -> Any:
    from PIL import Image

    if image.size == (size, size):
        return image
    scale = size * 8 / 7 / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    scaled = image.resize((width, height), Image.Resampling.BICUBIC)
    return scaled.crop((left, top, left + size, top + size))


def _with_size(images: Tensor | EncodedImages, size: int | None) -> Tensor | EncodedImages:
    if size is None:
        return images
    if size < 1:
        raise ValueError(f"size={size} is not a number of pixels: pass 1 or more.")
    if isinstance(images, EncodedImages):
        return replace(images, size=size)
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, (size, size), mode="bilinear", antialias=True)


def _with_channels(images: Tensor | EncodedImages, channels: int | None) -> Tensor | EncodedImages:
    if channels not in (None, 1, 3):
        raise ValueError(f"channels={channels} is not 1 (grey) or 3 (colour).")
    if isinstance(images, EncodedImages):
        return replace(images, channels=channels or images.channels)
    if channels in (None, images.shape[1]):
        return images
    if channels == 1:
        raise ValueError("channels=1 for colour images: use a model with 3 input channels.")
    return images.expand(-1, 3, -1, -1)


def _check_images(dataset: ImageSet) -> None:
    images = dataset.images
    if isinstance(images, Tensor) and (images.dtype != torch.uint8 or images.ndim != 4):
        raise ValueError(
            f"images are {images.dtype} {tuple(images.shape)}. "
            "Expected uint8 (n, channels, height, width)."
        )
    channels = dataset.image_shape[0]
    for name, values in (("mean", dataset.mean), ("std", dataset.std)):
        if len(values) not in (1, channels) or (name == "std" and min(values) <= 0):
            raise ValueError(
                f"{name}={values} does not fit {channels}-channel images: pass one number, "
                "or one per channel; std above 0."
            )


def _check_labels(dataset: ImageSet) -> None:
    labels, count = dataset.labels, len(dataset.images)
    if labels.dtype != torch.int64 or labels.shape != (count,):
        raise ValueError(
            f"labels are {labels.dtype} {tuple(labels.shape)}. Expected int64 ({count},)."
        )
    if count and not 0 <= int(labels.min()) <= int(labels.max()) < dataset.num_classes:
        raise ValueError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, outside "
            f"0..{dataset.num_classes - 1}: there are {dataset.num_classes} class names."
        )


def _check_split(split: str, known: Sequence[str]) -> None:
    if split not in known:
        raise ValueError(_unknown("split", split, known))


def _unknown(argument: str, value: str, known: Sequence[str]) -> str:
    closest = difflib.get_close_matches(value, known, 1)
    hint = f" Did you mean {closest[0]!r}?" if closest else ""
    return f"{argument}={value!r} is not known. Choose from: {', '.join(known)}.{hint}"


def _per_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values).view(-1, 1, 1)


def _numbers(values: float | Sequence[float]) -> tuple[float, ...]:
    one = isinstance(values, int | float)
    return (float(values),) if one else tuple(float(v) for v in values)  # type: ignore
