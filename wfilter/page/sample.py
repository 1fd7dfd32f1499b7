"""The images a page is about: some of every class, for the model and for the eye."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wfilter.core.forget import refuse_other_classes
from wfilter.core.model import FilteredModel
from wfilter.data.images import ImageSet
from wfilter.data.reading import first_of_each, take


@dataclass(frozen=True)
class PageSample:
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
        """Positions of a class's images in the sample, the first ``most`` of them."""
        return (self.labels == row).nonzero()[:most, 0]


def take_page_sample(
    wf: FilteredModel, data: ImageSet | Iterable[Any], per_class: int
) -> PageSample:
    """The first ``per_class`` images of every class.

    Example:
        >>> import torch, wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 2), targets="*")
        >>> batch = (torch.rand(6, 1, 2, 2), torch.tensor([0, 1, 1, 1, 0, 0]))
        >>> take_page_sample(wf, [batch], 2).labels
        tensor([0, 1, 1, 0])
    """
    refuse_other_classes(wf.class_names, data)
    if isinstance(data, ImageSet):
        index = first_of_each(data.labels, per_class)
        images, labels = data.batch(index)
        pixels = data.images[index].float() / 255
        names = wf.class_names or data.class_names
    else:
        images, labels = take(data, wf.num_classes, per_class * wf.num_classes, "data")
        pixels = _stretched(images)
        names = wf.class_names or tuple(f"class {row}" for row in range(wf.num_classes))
    if len(names) != wf.num_classes:
        raise ValueError(
            f"the data has {len(names)} classes\nand the filters {wf.num_classes}. Give the data "
            "the model was made for."
        )
    return PageSample(images, pixels, labels, tuple(names))


def _stretched(images: Tensor) -> Tensor:
    """Each image stretched to 0..1, since its normalisation is not known."""
    flat = images.float().flatten(1)
    low, high = flat.amin(1), flat.amax(1)
    shape = (-1, *[1] * (images.ndim - 1))
    return (images.float() - low.view(shape)) / (high - low).clamp_min(1e-6).view(shape)
