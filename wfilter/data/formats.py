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
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from wfilter.data.pixels import eight_bits, square

NAMES = ("digits", "mnist", "cifar10", "imagenet", "imagefolder:PATH", "package.module:function")
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
            pixels = np.array(square(eight_bits(image, self.channels), self.size))
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(
                f"{name} cannot be decoded ({error}). Replace or remove it."
            ) from error
        # A grey image comes without an axis of channels.
        whole = torch.from_numpy(pixels).view(self.size, self.size, self.channels)
        return rearrange(whole, "h w channels -> channels h w")


@dataclass(frozen=True, eq=False)
class Stored:
    """What a reader found; ``divided`` is False when the format has no train and test split."""

    images: Tensor | EncodedImages
    labels: Tensor
    class_names: tuple[str, ...]
    divided: bool = True
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0


class ImageFiles(NamedTuple):
    """Images still in their files, and their labels."""

    images: EncodedImages
    labels: Tensor


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
    places = [
        f"{under}cifar-10-batches-{kind}" for kind in ("bin", "py") for under in ("cifar10/", "")
    ]
    place = _find("cifar10", places, root, download)
    read = _cifar_binary if place.name.endswith("bin") else _cifar_pickles
    pixels, labels = read(place.parent, split)
    images = rearrange(torch.from_numpy(pixels), "n h w channels -> n channels h w")
    return Stored(images, torch.from_numpy(labels).long(), CIFAR10_NAMES)


def _imagenet(split: str, root: str | Path | None, download: bool) -> Stored:
    """Folders ``imagenet/SPLIT/WNID`` beside the class index; ``a+b`` joins the splits a and b."""
    folders = [
        _find("imagenet", [f"imagenet/{n}" for n in FOLDER_SPLITS.get(name, (name,))], root, False)
        for name in split.split("+")
    ]
    index_file = folders[0].with_name("imagenet_class_index.json")
    if not index_file.is_file():
        raise FileNotFoundError(f"{index_file} is missing: it gives the classes' names and order.")
    index = json.loads(index_file.read_text())
    wnids = [index[str(row)][0] for row in range(len(index))]
    parts = [_image_files(folder, wnids) for folder in folders]
    items = tuple(item for part in parts for item in part.images.items)
    labels = torch.cat([part.labels for part in parts])
    return Stored(EncodedImages(items), labels, _imagenet_names(index), mean=0.5, std=0.5)


def _imagefolder(path: Path, split: str) -> Stored:
    if not path.is_dir():
        raise FileNotFoundError(f"imagefolder:{path} is not a folder. Give the folder of classes.")
    options = {
        s: [path / n for n in names if (path / n).is_dir()] for s, names in FOLDER_SPLITS.items()
    }
    divided = any(options.values())
    if divided and not options[split]:
        raise FileNotFoundError(f"{path} has no folder for split={split!r}: add {path / split}.")
    folders = [places[0] for places in options.values() if places] if divided else [path]
    names = sorted({c.name for f in folders for c in f.iterdir() if c.is_dir()})
    files = _image_files(options[split][0] if divided else path, names)
    return Stored(files.images, files.labels, tuple(names), divided)


_READERS: dict[str, Callable[[str, str | Path | None, bool], Stored]] = {
    "digits": _digits,
    "mnist": _mnist,
    "cifar10": _cifar10,
    "imagenet": _imagenet,
}


def _image_files(folder: Path, names: Sequence[str]) -> ImageFiles:
    """The images below the folders ``names``, whose order gives the labels."""
    strange = sorted({f.name for f in folder.iterdir() if f.is_dir()} - {*names})
    if strange:
        raise ValueError(f"{folder / strange[0]} is no class of this set. Move it elsewhere.")
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
    return ImageFiles(EncodedImages(tuple(f for f, _ in files)), labels)


def _find(name: str, places: Sequence[str], root: str | Path | None, download: bool) -> Path:
    """The first of ``places`` that exists under the data folder or the cache."""
    named = data_root(root)
    for folder in (named, cache_folder()):
        for place in places:
            if folder is not None and (folder / place).exists():
                return folder / place
    if download:
        _download(name)
        return _find(name, places, cache_folder(), False)
    where = f"not in {named}" if named else "no data folder was given"
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
        damaged = packed if packed.exists() else path
        raise ValueError(
            f"{damaged} is corrupt ({error}). Copy or download MNIST again."
        ) from error


def _cifar_binary(folder: Path, split: str) -> tuple[Any, Any]:
    """CIFAR-10's binary version: for each image a byte of label, then its three planes."""
    names = [name for name in CIFAR10_MD5 if name.startswith("test") == (split == "test")]
    parts = []
    for file in (folder / "cifar-10-batches-bin" / f"{name}.bin" for name in names):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing. Copy or download CIFAR-10 again.")
        content = file.read_bytes()
        if hashlib.md5(content).hexdigest() != CIFAR10_MD5[file.stem]:
            raise ValueError(f"{file} is corrupt: its md5 is not the official one. Copy it again.")
        parts.append(np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32))
    images = np.concatenate(parts)
    pixels = rearrange(images[:, 1:], "n (channels h w) -> n h w channels", channels=3, h=32)
    return pixels, images[:, 0].astype(np.int64)


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


def _imagenet_names(index: dict[str, list[str]]) -> tuple[str, ...]:
    """Class names in order; the few that occur twice (crane, maillot) get their wnid appended."""
    count = Counter(name for _, name in index.values())
    rows = [index[str(row)] for row in range(len(index))]
    return tuple(name if count[name] == 1 else f"{name}_{wnid}" for wnid, name in rows)


def _check_split(split: str, known: Sequence[str]) -> None:
    if split not in known:
        raise ValueError(_unknown("split", split, known))


def _unknown(argument: str, value: str, known: Sequence[str]) -> str:
    closest = difflib.get_close_matches(value, known, 1)
    hint = f" Did you mean {closest[0]!r}?" if closest else ""
    return f"{argument}={value!r} is not known. Choose from: {', '.join(known)}.{hint}"
