"""What `untrain` reads, checked: tensors in memory, or batches of any kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from wfilter.data.checks import check_labels
from wfilter.data.images import Augment

# Anything that gives batches each time it is looped over: pairs (images, labels), dicts or images
# alone; `read_batches` and `labelled_batches` read them.
Batches = Iterable[Any]


@dataclass(frozen=True)
class InMemory:
    """Images and labels held as tensors: untrain draws its own batches and caches the base logits.

    Attributes:
        images: ``(samples, ...)``.
        labels: int64 ``(samples,)``, bool ``(samples, num_classes)``, or ``None``.
        batch_size: Samples per step over all processes.
        augment: Applied to a batch of images at every step. With it the base logits are not
            cached, nor are they when the recipe blends images.
    """

    images: Tensor
    labels: Tensor | None = None
    batch_size: int = 64
    augment: Augment | None = None

    def __post_init__(self) -> None:
        for name, value in (("images", self.images), ("labels", self.labels)):
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(
                    f"InMemory holds tensors, but {name} are of type {type(value).__name__}. Give "
                    f"torch.as_tensor({name})."
                )
        if self.labels is not None and len(self.labels) != len(self.images):
            raise ValueError(
                f"InMemory has {len(self.images)} images\nand {len(self.labels)} labels. Pass one "
                "label (or one row of a bool matrix) for each image."
            )

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.batch_size)

    def order(self, seed: int, epoch: int) -> Iterator[Tensor]:
        """Indices of each batch of an epoch."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.images), generator=generator)
        yield from torch.split(order, self.batch_size)


def refuse_no_batches(data: object, name: str) -> None:
    """Stop where something is no data at all, or single samples instead of batches."""
    if isinstance(data, Tensor):
        raise TypeError(
            f"{name} is a tensor of shape {tuple(data.shape)}, not batches. Give "
            "wfilter.InMemory(images, labels)."
        )
    pair = isinstance(data, tuple) and len(data) == 2 and all(isinstance(d, Tensor) for d in data)
    if pair and data[1].ndim < 2:  # type: ignore[index]
        raise TypeError(
            f"{name} is a pair of tensors, which would be read as two batches. Give "
            "wfilter.InMemory(images, labels), or a list of such pairs."
        )
    if isinstance(data, Dataset) and hasattr(data, "__getitem__"):
        raise TypeError(
            f"{name} is a Dataset ({type(data).__name__}), which gives one sample at a time. Give "
            f"torch.utils.data.DataLoader({name}, batch_size=64, shuffle=True)."
        )
    if not isinstance(data, InMemory | Iterable) and not hasattr(data, "__getitem__"):
        raise TypeError(
            f"{name} is of type {type(data).__name__}, not batches. Give a DataLoader or another "
            "iterable of (images, labels)."
        )


def read_batches(data: Batches) -> Iterator[Any]:
    """The batches; if a worker process dies before its batch was fetched, the error says so.

    The tensors of a batch are handed over by the worker itself: if the worker is gone, torch only
    reports that a connection broke.
    """
    try:
        yield from data
    except (ConnectionError, EOFError) as error:
        if not getattr(data, "num_workers", 0):
            raise
        raise RuntimeError(
            f"a DataLoader worker was killed before its batch was fetched ({error}). It may have "
            "run out of memory; start again, with resume=True if there is a checkpoint."
        ) from error


def split_batch(batch: Any) -> tuple[Tensor, Tensor | None]:
    """Images and labels of a batch: a tensor, a pair, or a dict with the usual keys.

    Example:
        >>> split_batch({"pixel_values": torch.zeros(2, 3), "labels": torch.tensor([0, 1])})[1]
        tensor([0, 1])
    """
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, dict):
        images = _first(batch, "image", "images", "pixel_values", "x", "input")
        labels = _first(batch, "label", "labels", "target", "targets", "y")
        if images is not None:
            return images, labels
    elif isinstance(batch, Sequence) and batch and isinstance(batch[0], Tensor):
        return batch[0], batch[1] if len(batch) > 1 else None
    raise TypeError(
        f"a batch of type {type(batch).__name__} is not understood. Give (images, labels), images "
        "alone, or a dict with 'image' and 'label'; all of them tensors (torch.as_tensor(array))."
    )


def labelled(batch: Any, name: str) -> tuple[Tensor, Tensor]:
    """Images and labels of one batch; one without labels is refused.

    Example:
        >>> labelled((torch.zeros(2, 3), torch.tensor([0, 1])), "data")[1]
        tensor([0, 1])
    """
    images, labels = split_batch(batch)
    if not isinstance(labels, Tensor):
        raise TypeError(
            f"{name} has no labels: a batch is {type(batch).__name__}; expected a pair of tensors "
            "(images, labels)."
        )
    return images, check_labels(labels, len(images))


def labelled_batches(batches: Iterable[Any], name: str = "data") -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels of every batch that has images; data without any is refused.

    Example:
        >>> batch = {"image": torch.zeros(2, 3), "label": torch.tensor([0, 1])}
        >>> [labels.tolist() for _, labels in labelled_batches([batch])]
        [[0, 1]]
    """
    empty = True
    for batch in batches:
        images, labels = labelled(batch, name)
        if len(labels):
            empty = False
            yield images, labels
    if empty:
        raise ValueError(
            f"{name} has no batches with images in them. A generator used up by an earlier pass?"
        )


def gathered(data: Batches) -> InMemory:
    """All batches as one set."""
    batches = [split_batch(batch) for batch in read_batches(data)]
    known = [labels for _, labels in batches if labels is not None]
    if known and len(known) < len(batches):
        raise ValueError("some batches have labels and some have none. Give all or none.")
    images = torch.cat([images for images, _ in batches]) if batches else torch.empty(0)
    return InMemory(images, torch.cat(known) if known else None)


def _first(batch: dict[str, Any], *names: str) -> Any:
    return next((batch[name] for name in names if name in batch), None)
