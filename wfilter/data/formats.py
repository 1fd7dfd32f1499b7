"""Read the formats datasets are stored in, find them on disk, and say what is wrong with a file.

Nothing is ever written to the data folder: decoded and downloaded images go to the user's cache.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import io
import json
import os
import tempfile
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
class Stored:
    """What a reader found; ``divided`` is False when the format has no train and test split."""

    images: Tensor | EncodedImages
    labels: Tensor
    class_names: tuple[str, ...]
    divided: bool = True
    mean: float = 0.0
    std: float = 1.0


def read(name: str, split: str, root: str | Path | None = None, download: bool = False) -> Stored:
    """The images of one split as they are stored; all of them if the format has no splits.

    Example:
        >>> read("digits", "train").images.shape
        torch.Size([1797, 1, 8, 8])
    """
    kind, _, path = name.partition(":")
    if kind == "imagefolder" and path:
        _check_split(split, tuple(FOLDER_SPLITS))
        return _imagefolder(Path(path).expanduser(), split)
    if name not in _READERS:
        raise ValueError(_unknown("data", name, NAMES))
    if name != "imagenet":
        _check_split(split, ("train", "test"))
    return _READERS[name](split, root, download)


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


def _digits(split: str, root: str | Path | None, download: bool) -> Stored:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images * (255 / 16)).round().to(torch.uint8)[:, None]
    labels = torch.from_numpy(digits.target.astype(np.int64))
    return Stored(images, labels, DIGIT_NAMES, divided=False)


def _mnist(split: str, root: str | Path | None, download: bool) -> Stored:
    folder = _find("mnist", ("mnist/MNIST/raw", "MNIST/raw"), root, download)
    prefix = "train" if split == "train" else "t10k"
    images = torch.from_numpy(_read_idx(folder / f"{prefix}-images-idx3-ubyte", 3))[:, None]
    labels = torch.from_numpy(_read_idx(folder / f"{prefix}-labels-idx1-ubyte", 1)).long()
    return Stored(images, labels, DIGIT_NAMES)


def _cifar10(split: str, root: str | Path | None, download: bool) -> Stored:
    places = ("cifar10/labels.npz", "cifar10/cifar-10-batches-py", "cifar-10-batches-py")
    place = _find("cifar10", places, root, download)
    read = _cifar_sheets if place.name == "labels.npz" else _cifar_pickles
    pixels, labels = read(place.parent, split)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return Stored(images, torch.from_numpy(labels).long(), CIFAR10_NAMES)


def _imagenet(split: str, root: str | Path | None, download: bool) -> Stored:
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
    images = EncodedImages(tuple(items))
    return Stored(images, labels, _imagenet_names(index), mean=0.5, std=0.5)


def _imagefolder(path: Path, split: str) -> Stored:
    if not path.is_dir():
        raise FileNotFoundError(f"imagefolder:{path} is not a folder. Give the folder of classes.")
    options = {
        s: [path / n for n in names if (path / n).is_dir()] for s, names in FOLDER_SPLITS.items()
    }
    divided = any(options.values())
    if divided and not options[split]:
        raise FileNotFoundError(f"{path} has no folder for split={split!r}: add {path / split}.")
    folders = [found[0] for found in options.values() if found] if divided else [path]
    names = sorted({c.name for f in folders for c in f.iterdir() if c.is_dir()})
    stored = _image_files(options[split][0] if divided else path, names)
    return replace(stored, divided=divided)


_READERS: dict[str, Callable[[str, str | Path | None, bool], Stored]] = {
    "digits": _digits,
    "mnist": _mnist,
    "cifar10": _cifar10,
    "imagenet": _imagenet,
}


def _image_files(folder: Path, names: Sequence[str]) -> Stored:
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
    return Stored(EncodedImages(tuple(f for f, _ in files)), labels, tuple(names))


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
    fetch = (
        ", or allow its download: download=True (--download)"
        if name in ("mnist", "cifar10")
        else ""
    )
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


def _check_split(split: str, known: Sequence[str]) -> None:
    if split not in known:
        raise ValueError(_unknown("split", split, known))


def _unknown(argument: str, value: str, known: Sequence[str]) -> str:
    closest = difflib.get_close_matches(value, known, 1)
    hint = f" Did you mean {closest[0]!r}?" if closest else ""
    return f"{argument}={value!r} is not known. Choose from: {', '.join(known)}.{hint}"
