"""Labelled data in any form: read in batches, checked, or some images of every class in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from wfilter.data.batches import InMemory, labelled, labelled_batches
from wfilter.data.images import ImageSet, batches


def as_batches(
    source: Any, name: str = "data", batch_size: int = 128, *, shuffle: int | None = None
) -> Any:
    """Something that gives batches whenever it is looped over.

    Args:
        source: An `ImageSet`, images and labels as a pair of tensors, an `InMemory`, a dataset with
            length and items, or batches themselves (a DataLoader, a list).
        name: What to call it in errors.
        batch_size: Of batches made here.
        shuffle: Seed of a new order for each pass, of batches made here; ``None``: no shuffling.

    Example:
        >>> pair = (torch.zeros(5, 1, 2, 2), torch.zeros(5, dtype=torch.long))
        >>> [len(labels) for _, labels in as_batches(pair, batch_size=4)]
        [4, 1]
    """
    if isinstance(source, ImageSet):
        return batches(source, batch_size, shuffle=shuffle is not None, seed=shuffle or 0)
    if isinstance(source, InMemory):
        source = (source.images, source.labels)
    if isinstance(source, tuple | list) and len(source) == 2 and isinstance(source[0], Tensor):
        images, labels = labelled(source, name)
        if shuffle is not None:
            return Shuffled(InMemory(images, labels, batch_size), shuffle)
        return list(zip(torch.split(images, batch_size), torch.split(labels, batch_size)))
    if isinstance(source, DataLoader | list | tuple):
        return source
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        generator = torch.Generator().manual_seed(shuffle or 0)
        return DataLoader(source, batch_size, shuffle is not None, generator=generator)
    if not hasattr(source, "__iter__") or iter(source) is source:
        raise TypeError(
            f"{name} is a {type(source).__name__}, which cannot be read twice. Pass a DataLoader, "
            "a list of batches, a dataset or a pair of tensors (images, labels)."
        )
    return source


@dataclass
class Shuffled:
    """Batches of images in memory, in another order for each pass.

    Example:
        >>> data = InMemory(torch.arange(9.0), torch.arange(9), batch_size=6)
        >>> [len(labels) for _, labels in Shuffled(data, seed=0)]
        [6, 3]
    """

    data: InMemory
    seed: int
    passes: int = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.data.labels is not None
        self.passes += 1
        for index in self.data.order(self.seed, self.passes):
            yield self.data.images[index], self.data.labels[index]


@dataclass(frozen=True)
class LabelledBatches:
    """Batches of any form, read as checked pairs (images, labels) whenever they are looped over.

    Example:
        >>> source = [{"image": torch.zeros(2, 3), "label": torch.tensor([0, 1])}]
        >>> [labels.tolist() for _, labels in LabelledBatches(source, num_classes=2, name="train")]
        [[0, 1]]
    """

    batches: Any
    num_classes: int
    name: str

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return read(self.batches, self.num_classes, self.name)


def read(batches: Any, num_classes: int, name: str = "data") -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels of every batch, checked.

    Example:
        >>> batch = {"image": torch.zeros(2, 3), "label": torch.tensor([0, 1])}
        >>> [labels.tolist() for _, labels in read([batch], num_classes=2)]
        [[0, 1]]
    """
    for images, labels in labelled_batches(batches, name):
        if int(labels.max()) >= num_classes:
            raise ValueError(
                f"{name} has the label {int(labels.max())}, but the model knows the classes "
                f"0..{num_classes - 1}. Give the data the model was made for."
            )
        yield images, labels.cpu()


def take(batches: Any, num_classes: int, size: int, name: str) -> tuple[Tensor, Tensor]:
    """About ``size`` images and their labels: the first few of every class, in memory.

    Example:
        >>> batch = (torch.arange(6.0)[:, None], torch.tensor([0, 0, 0, 1, 1, 0]))
        >>> take([batch], 2, size=4, name="data")[1]
        tensor([0, 0, 1, 1])
    """
    each = max(1, math.ceil(size / num_classes))
    counts = torch.zeros(num_classes, dtype=torch.long)
    parts = []
    for images, labels in read(batches, num_classes, name):
        seen = F.one_hot(labels, num_classes).cumsum(0).gather(1, labels[:, None])[:, 0]
        kept = seen + counts[labels] <= each
        parts.append((images[kept.to(images.device)], labels[kept]))
        counts += torch.bincount(labels, minlength=num_classes)
        if bool((counts >= each).all()):
            break
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def first_of_each(labels: Tensor, count: int) -> Tensor:
    """Positions of the first ``count`` samples of each class, in the order of the data.

    Example:
        >>> first_of_each(torch.tensor([1, 1, 0, 1]), 2)
        tensor([0, 1, 2])
    """
    chosen = [(labels == row).nonzero()[:count, 0] for row in sorted(set(labels.tolist()))]
    return torch.cat(chosen).sort().values
