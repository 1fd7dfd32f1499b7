"""Where the samples lie in a function's output, and how gates are shaped to meet them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the samples lie in a function's output.

    ``axis`` has one entry per sample (``"plain"``), or all entries of sample 0, then of sample 1
    (``"major"``: Swin's windows), or sample 0, 1, 2, ... over and over (``"minor"``).
    """

    axis: int
    order: str
    times: int = 1  # entries of one sample

    def __str__(self) -> str:
        fold = {"plain": "", "major": ", folded batch-major", "minor": ", folded batch-minor"}
        return f"batch on axis {self.axis}{fold[self.order]}"


def possible_layouts(shape: torch.Size, axis: int, batch: int) -> list[Layout]:
    """Every way in which an output of this shape could hold the samples before its unit axis.

    An empty axis, as of an expert to which no sample is routed, holds none.
    """
    sizes = [(a, shape[a]) for a in range(len(shape) + axis) if shape[a] and not shape[a] % batch]
    plain = [Layout(a, "plain") for a, size in sizes if size == batch]
    folded = [(a, size // batch) for a, size in sizes if size != batch]
    return plain + [Layout(a, order, n) for a, n in folded for order in ("major", "minor")]


def find_layout(output: Tensor, axis: int, batch: int) -> Layout | None:
    """Where sample 1 of ``batch`` lies in an output in which just that sample is NaN.

    ``None`` when no sample axis before the unit axis explains the NaNs: the output does not depend
    on the input, or mixes samples.
    """
    marked = torch.isnan(output)
    for candidate in range(output.ndim + axis):
        size = output.shape[candidate]
        if size % batch:
            continue
        others = [a for a in range(output.ndim) if a != candidate]
        touched = marked.sum(dim=others) > 0 if others else marked
        place = torch.arange(size, device=output.device)
        if size == batch and torch.equal(touched, place == 1):
            return Layout(candidate, "plain")
        times = size // batch
        if times and torch.equal(touched, place // times == 1):
            return Layout(candidate, "major", times)
        if times and torch.equal(touched, place % batch == 1):
            return Layout(candidate, "minor", times)
    return None


def unfold(output: Tensor, layout: Layout, batch: int) -> Tensor:
    """Give the samples an axis of their own."""
    if output.shape[layout.axis] != batch * layout.times:
        raise RuntimeError(
            f"a filtered layer gave {output.shape[layout.axis]} entries for {batch} samples, "
            f"where the inspection saw {layout.times} for each. Call wf.inspect(images) with "
            "images of this size; a model that splits its batch needs smaller batches."
        )
    if layout.order == "plain":
        return output
    shape = (batch, -1) if layout.order == "major" else (-1, batch)
    return torch.unflatten(output, layout.axis, shape)


def place(values: Tensor, output: Tensor, axis: int, position: int | None) -> Tensor:
    """Values ``(units,)`` or ``(batch, units)`` shaped to meet ``output`` at its unit axis."""
    units = output.shape[axis]
    if values.shape[-1] != units:  # a grouped transposed convolution shares units between groups
        values = values.repeat(*[1] * (values.ndim - 1), units // values.shape[-1])
    shape = [1] * output.ndim
    shape[axis] = units
    if values.ndim == 2 and position is not None:
        shape[position] = values.shape[0]
    return values.reshape(shape)
