"""The row of each image, from a checked label or the base model's answer; images by index."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wfilter.data import images as image_data
from wfilter.data.batches import Batches, InMemory, gathered

Read = Callable[[Tensor], Tensor]  # from indices of images to the images


def rows_of(
    labels: Tensor | None, base: Tensor, num_classes: int, generator: torch.Generator
) -> Tensor:
    """The class whose row a sample uses to forget itself, int64 ``(batch,)`` on the CPU.

    Args:
        labels: Classes ``(batch,)``, several for a sample ``(batch, num_classes)``, of which one is
            drawn, or ``None``: the base model's answer decides.
        base: The base model's logits, only looked at where there are no labels.
        num_classes: How many rows there are.
        generator: Draws one of several labels.

    Example:
        >>> rows_of(None, torch.eye(3), 3, torch.Generator())
        tensor([0, 1, 2])
    """
    if labels is None:
        return base.argmax(1).cpu()
    if labels.is_floating_point() and bool((labels != labels.round()).any()):
        raise ValueError(
            f"label {float(labels[labels != labels.round()][0])} is no whole number. Give int64 "
            "classes (batch,), or bool (batch, num_classes) where samples have several; of shares "
            "of classes, as mixed images have them, labels.argmax(1)."
        )
    if labels.ndim == 2:
        _refuse_wrong_width(labels, num_classes)
        chosen = torch.rand(labels.shape, generator=generator) * (labels.cpu() > 0)
        if bool((chosen.amax(1) == 0).any()):
            raise ValueError("a multi-label sample has no label at all; leave such samples out.")
        return chosen.argmax(1)
    labels = labels.cpu().long()
    outside = (labels < 0) | (labels >= num_classes)
    if bool(outside.any()):
        raise ValueError(
            f"label {int(labels[outside][0])} is outside 0..{num_classes - 1}: these filters were "
            f"made for {num_classes} classes."
        )
    return labels


def _refuse_wrong_width(labels: Tensor, num_classes: int) -> None:
    if labels.shape[1] == num_classes:
        return
    hint = "labels[:, 0]" if labels.shape[1] == 1 else "(batch,) or (batch, num_classes)"
    raise ValueError(
        f"labels have shape {tuple(labels.shape)}\nfor {num_classes} classes. Give {hint}: one "
        "class for each sample, or a column for each class."
    )


def refuse_several_labels(labels: Tensor | None, what: str) -> None:
    """Stop where ``what`` is for one answer per image and the images have several labels."""
    if labels is not None and labels.ndim == 2:
        raise ValueError(
            f"{what} is for one answer per image, but these images have several labels each. Use a "
            "distill recipe."
        )


def all_images(
    train: Batches | InMemory, seed: int
) -> tuple[Read, int, Tensor | None, image_data.Augment | None]:
    """How to get at images by their index, how many there are, their labels and augmentation."""
    if isinstance(train, image_data.ImageBatches):  # the images themselves, in their own order
        whole = train.dataset
        return lambda index: whole.batch(index)[0], len(whole), whole.labels, train.augment
    if not isinstance(train, InMemory):
        torch.manual_seed(seed * 1_000_003)  # loaders shuffle by the global RNG
        train = gathered(train)
    if not len(train.images):
        raise ValueError("train has no batches. Check the data and drop_last.")
    return train.images.__getitem__, len(train.images), train.labels, train.augment
