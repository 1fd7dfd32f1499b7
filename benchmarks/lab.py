"""Unpack our own data folder into the formats that wfilter reads, once, in the user's cache.

    WFILTER_DATA=... python benchmarks/lab.py

The folder keeps CIFAR-10 as lossless sheets of 100 x 100 tiles, ImageNet's images in four zips and
weights under the names of their origin. What is unpacked: CIFAR-10's binary version (its official
md5 sums hold), folders ``imagenet/PART/WNID`` (``train`` is ``train1+k0+k1``, ``test`` is ``k2``),
and ``weights/SOURCE-NAME.safetensors``. Nothing is written to the data folder itself.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from einops import rearrange
from PIL import Image

from wfilter.data.formats import CIFAR10_MD5, cache_folder, data_root

PARTS = {
    "train1": "imagenet_train1.zip",
    "k0": "imagenet_val_k0.zip",
    "k1": "imagenet_val_k1.zip",
    "k2": "imagenet_val_k2.zip",
}
SPLITS = {"train": ("train1", "k0", "k1"), "test": ("k2",)}
INDEX = "imagenet_class_index.json"
WEIGHTS = {
    "wfilter-resnet18-cifar": "resnet18_cifar10.safetensors",
    "wfilter-vgg16-cifar": "vgg16_bn_cifar10.safetensors",
    "timm-vit_tiny_patch16_224": "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",
    "torchvision-resnet18": "resnet18_imagenet_pq.safetensors",
}


def unpack(root: str | Path | None = None) -> list[Path]:
    """Unpack what the data folder has and the cache lacks; the folders that were made."""
    folder = data_root(root)
    if folder is None:
        raise SystemExit("no data folder: set WFILTER_DATA, or pass --data.")
    steps: dict[str, Callable[[Path], None]] = {}
    if (folder / "cifar10" / "labels.npz").exists():
        steps["cifar10/cifar-10-batches-bin"] = partial(write_cifar10, folder / "cifar10")
    if (folder / "imagenet" / INDEX).exists():
        steps["imagenet"] = partial(write_imagenet, folder / "imagenet")
    if (folder / "weights").is_dir():
        steps["weights"] = partial(write_weights, folder / "weights")
    return [made for place, write in steps.items() if (made := once(place, write)) is not None]


def once(place: str, write: Callable[[Path], None]) -> Path | None:
    """Fill a folder of the cache whole or not at all; ``None`` where it is there already."""
    target = cache_folder() / place
    if target.exists():
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
        write(Path(unfinished, "new"))
        try:
            Path(unfinished, "new").rename(target)
        except OSError:
            if not target.exists():  # else another process was first
                raise
    return target


def write_cifar10(source: Path, target: Path) -> None:
    """The six files of CIFAR-10's binary version, made from the sheets."""
    target.mkdir()
    labels = np.load(source / "labels.npz")
    parts = [*labels["train"].reshape(-1, 10000), *labels["test"].reshape(-1, 10000)]
    for name, part in zip(CIFAR10_MD5, parts, strict=True):
        (target / f"{name}.bin").write_bytes(cut(source / f"{name}.webp", part))


def cut(sheet: Path, labels: np.ndarray) -> bytes:
    """One file of the binary version: for each tile of a sheet its label, then its planes."""
    if not sheet.is_file():
        raise FileNotFoundError(f"{sheet} is missing. Copy the cifar10 folder again.")
    try:
        pixels = np.asarray(Image.open(sheet).convert("RGB"))
        planes = rearrange(pixels, "(row h) (column w) c -> (row column) (c h w)", h=32, w=32)
        content = np.concatenate([labels[:, None].astype(np.uint8), planes], 1).tobytes()
    except (OSError, ValueError) as error:
        raise ValueError(f"{sheet} is corrupt ({error}). Copy it again.") from error
    if hashlib.md5(content).hexdigest() != CIFAR10_MD5[sheet.stem]:
        raise ValueError(f"{sheet} is not the official {sheet.stem}: its md5 differs.")
    return content


def write_imagenet(source: Path, target: Path) -> None:
    """A folder for each zip, and the splits as links to their files."""
    target.mkdir()
    shutil.copy(source / INDEX, target / INDEX)
    for part, name in PARTS.items():
        try:
            with zipfile.ZipFile(source / name) as archive:
                archive.extractall(target / part)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{source / name} is missing. Copy it again.") from error
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{source / name} is corrupt ({error}). Copy it again.") from error
    for split, parts in SPLITS.items():
        for part in parts:
            for file in (target / part).rglob("*.*"):
                link = target / split / file.parent.name / f"{part}-{file.name}"
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, link)


def write_weights(source: Path, target: Path) -> None:
    """Links to the weights, under the names of their models."""
    target.mkdir()
    for name, file in WEIGHTS.items():
        if (source / file).exists():
            (target / f"{name}.safetensors").symlink_to((source / file).resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="data folder (default: WFILTER_DATA)")
    for made in unpack(parser.parse_args().data):
        print(f"made {made}", file=sys.stderr)


if __name__ == "__main__":
    main()
