"""Datasets by name: frozen sets of images, their mean and std, crops and flips, batches.

Images are stored as uint8 and given out as float32 in 0..1, then ``(image - mean) / std``. The
CIFAR-10 weights of the data folder want 0..1 as it is (mean 0, std 1, the default here); timm's
ViT-T for ImageNet wants mean = std = 0.5, the default of ``imagenet``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from wfilter.data.formats import EncodedImages, Stored, read
from wfilter.data.functions import find_function

Augment = Callable[[Tensor, torch.Generator], Tensor]


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
class ImageBatches:
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
    epoch: int = 0

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
) -> ImageBatches:
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
    return ImageBatches(dataset, batch_size, shuffle, seed, drop_last, augment)


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
    # Indices on both sides of a slice: torch puts what they choose first and the slice last.
    moved = padded[sample, :, rows[:, :, None], columns[:, None, :]]
    return rearrange(moved, "n h w channels -> n channels h w")


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
            (folders ``imagenet/SPLIT/WNID``), ``imagefolder:PATH`` (a folder for each class, or
            ``train`` and ``test`` or ``val`` folders of those), or ``package.module:function``, a
            function of the split that returns an `ImageSet`.
        split: ``train`` or ``test``. Digits and a folder without splits are divided 80 : 20, class
            by class, always the same way. For ``imagenet`` any folder, or several: ``val+extra``.
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
    if ":" in name and not name.startswith("imagefolder:"):
        stored = _call_function(name, split)
    else:
        stored = read(name, split, root, download)
    dataset = ImageSet(
        f"{name} {split}",
        _with_channels(_with_size(stored.images, size), channels),
        stored.labels,
        stored.class_names,
        _numbers(stored.mean if mean is None else mean),
        _numbers(stored.std if std is None else std),
    )
    return dataset if stored.divided else hold_out(dataset, 0.2)[split == "test"]


def _call_function(name: str, split: str) -> Stored:
    """The set that ``package.module:function`` gives for a split."""
    module, _, function = name.partition(":")
    images = find_function(module, function, "imagefolder")(split)
    if not isinstance(images, ImageSet):
        raise ValueError(
            f"{name} returned {type(images).__name__}. Expected a wfilter.data.ImageSet: uint8 "
            "images, int64 labels and class names."
        )
    return Stored(images.images, images.labels, images.class_names, True, images.mean, images.std)


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
    names = dataset.class_names
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{dataset.name} has the class {twice!r} more than once.")
    if labels.dtype != torch.int64 or labels.shape != (count,):
        raise ValueError(
            f"labels are {labels.dtype} {tuple(labels.shape)}. Expected int64 ({count},)."
        )
    if count and not 0 <= int(labels.min()) <= int(labels.max()) < dataset.num_classes:
        raise ValueError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, outside "
            f"0..{dataset.num_classes - 1}: there are {dataset.num_classes} class names."
        )


def _per_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values).view(-1, 1, 1)


def _numbers(values: float | Sequence[float]) -> tuple[float, ...]:
    return (float(values),) if isinstance(values, int | float) else tuple(map(float, values))
