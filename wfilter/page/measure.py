"""The numbers of a report: a sample of the data, and what the model says of it under its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wfilter import explain, metrics
from wfilter.core.model import FilteredModel
from wfilter.data.checks import unpack
from wfilter.data.images import ImageSet
from wfilter.data.running import evaluating
from wfilter.explain import ClassCurves

ALL_ROWS = 20  # with more classes than this, a retain image is tried under a few other rows only
FEW_ROWS = 4


@dataclass(frozen=True)
class Sample:
    """Some images of every class.

    Attributes:
        images: As the model wants them, ``(count, channels, height, width)``.
        pixels: The same for the eye, in 0..1.
        labels: int64 ``(count,)``.
        names: A name for each class.
    """

    images: Tensor
    pixels: Tensor
    labels: Tensor
    names: tuple[str, ...]

    def of_class(self, row: int, most: int | None = None) -> Tensor:
        """Positions of a class's images."""
        return (self.labels == row).nonzero()[:most, 0]


@dataclass(frozen=True)
class Measured:
    """What the report shows, by class.

    Attributes:
        sample: The images measured on.
        base: The base model's logits ``(count, num_classes)``.
        routing: Class -> where its images go once it is forgotten, ``(num_classes,)``.
        original: Class -> the base model's accuracy on it.
        forget: Acc_f by row.
        retain: Acc_r by row.
        curves: Class -> insertion and deletion.
    """

    sample: Sample
    base: Tensor
    routing: dict[int, Tensor]
    original: dict[int, float]
    forget: metrics.RowScores
    retain: metrics.RowScores
    curves: dict[int, ClassCurves]


def take_sample(wf: FilteredModel, data: ImageSet | Iterable[Any], per_class: int) -> Sample:
    """The first ``per_class`` images of every class.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 2), targets="*")
        >>> batch = (torch.rand(6, 1, 2, 2), torch.tensor([0, 1, 1, 1, 0, 0]))
        >>> take_sample(wf, [batch], 2).labels
        tensor([0, 1, 1, 0])
    """
    wf.refuse_other_classes(data)
    if isinstance(data, ImageSet):
        index = _first_of_each(data.labels, per_class)
        images, labels = data.batch(index)
        pixels = data.images[index].float() / 255
        names = wf.class_names or data.class_names
    else:
        batches = [unpack(batch) for batch in data]
        if not batches:
            raise ValueError("the data has no batches. A generator used up by an earlier pass?")
        labels = torch.cat([labels for _, labels in batches])
        index = _first_of_each(labels, per_class)
        images, labels = torch.cat([images for images, _ in batches])[index], labels[index]
        pixels = _stretched(images)
        names = wf.class_names or tuple(f"class {row}" for row in range(wf.num_classes))
    if len(names) != wf.num_classes:
        raise ValueError(
            f"the data has {len(names)} classes\nand the filters {wf.num_classes}. Give the data "
            "the model was made for."
        )
    return Sample(images, pixels, labels, tuple(names))


def measure(
    wf: FilteredModel, sample: Sample, classes: Sequence[int], *, curve_images: int, steps: int
) -> Measured:
    """Accuracies and routing of all rows with images, curves of ``classes``."""
    base, rows, outputs, labels = _all_pairs(wf, sample)
    present = sorted(set(sample.labels.tolist()))
    own = rows == labels
    routing = {
        row: metrics.routing(outputs[own], labels[own], row, wf.num_classes) for row in present
    }
    right = base.argmax(1) == sample.labels
    original = {row: float(right[sample.labels == row].float().mean()) for row in present}
    retained = sorted(set(rows[~own].tolist()))
    return Measured(
        sample,
        base,
        routing,
        original,
        metrics.forget_accuracy(outputs, labels, rows, expected=present),
        metrics.retain_accuracy(outputs, labels, rows, expected=retained),
        {
            row: explain.class_curves(
                wf, sample.images[sample.of_class(row, curve_images)], row, steps=steps
            )
            for row in classes
        },
    )


@torch.no_grad()
def _all_pairs(wf: FilteredModel, sample: Sample) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The base model's logits, and rows, predictions and labels of all pairs."""
    forget = _rows(sample.labels, wf.num_classes)  # (count, rows): the own row first
    base, outputs = [], []
    device = wf.alphas.device
    with evaluating(wf):
        for images, rows in zip(torch.split(sample.images, 32), torch.split(forget, 32)):
            images = images.to(device)
            base.append(wf(images).cpu())
            logits = wf.replicated(images, rows.flatten().to(device))
            outputs.append(logits.argmax(1).cpu())
    labels = sample.labels.repeat_interleave(forget.shape[1])
    return torch.cat(base), forget.flatten(), torch.cat(outputs), labels


def _rows(labels: Tensor, num_classes: int) -> Tensor:
    """Every image's own row and all others, or a few others spread evenly."""
    if num_classes <= ALL_ROWS:
        steps = torch.arange(num_classes)
    else:
        steps = torch.arange(FEW_ROWS + 1) * (num_classes // (FEW_ROWS + 1))
        spread = torch.arange(len(labels))[:, None] % (num_classes // (FEW_ROWS + 1))
        return (labels[:, None] + steps + spread * (steps > 0)) % num_classes
    return (labels[:, None] + steps) % num_classes


def _first_of_each(labels: Tensor, count: int) -> Tensor:
    """Positions of the first ``count`` samples of each class, in the order of the data."""
    chosen = [(labels == row).nonzero()[:count, 0] for row in sorted(set(labels.tolist()))]
    return torch.cat(chosen).sort().values


def _stretched(images: Tensor) -> Tensor:
    """Each image scaled to 0..1: what its normalisation was is not known."""
    flat = images.float().flatten(1)
    low, high = flat.amin(1), flat.amax(1)
    shape = (-1, *[1] * (images.ndim - 1))
    return (images.float() - low.view(shape)) / (high - low).clamp_min(1e-6).view(shape)
