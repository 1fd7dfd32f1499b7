"""Refuse targets whose gates cancel out, as where a model rescales a weight before use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wfilter.core.gates import slices
from wfilter.core.inspection import Inspection, parameter_of
from wfilter.core.nearness import Near
from wfilter.core.outputs import Inputs, take_apart
from wfilter.core.paths import run_path
from wfilter.core.refusing import Unproved, run_from
from wfilter.core.state import Snapshot
from wfilter.core.targets import Target

if TYPE_CHECKING:
    from wfilter.core.model import FilteredModel


def refuse_aliases(wf: FilteredModel) -> None:
    """Stop at a tensor of the model that is a target's memory under another name: ungated there.

    To be asked after a forward, as hooks put such names in place of weights that they make anew.
    """
    targets = {t.name: _memory(parameter_of(wf.base, t)) for t in wf.targets}
    for path, module in wf.base.named_modules():
        for name, value in (*vars(module).items(), *module._buffers.items()):
            if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
                continue
            place, start, stop = _memory(value)
            for target, (other, first, last) in targets.items():
                if place and place == other and start < last and first < stop:
                    raise ValueError(
                        f"{path + '.' if path else ''}{name} is the memory of {target} under "
                        "another name: what the model makes of it would not be gated. Let the "
                        f"model read {target} itself, or add exclude={target!r}."
                    )


def _memory(tensor: Tensor) -> tuple[int, int, int]:
    """Where a tensor lies: its storage (0: in none), and the part of it in bytes."""
    if tensor.layout != torch.strided or not tensor.numel():
        return 0, 0, 0
    length = 1 + sum((size - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride()))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return tensor.untyped_storage().data_ptr(), start, start + length * tensor.itemsize


def refuse_without_effect(
    wf: FilteredModel, inspection: Inspection, single: Inputs, state: Snapshot
) -> None:
    """Stop at a weight whose gates cancel out, though closing all of them does not."""
    by_weight = [t for t, f in zip(wf.targets, inspection.findings) if f.by == "weight"]
    if not by_weight:
        return
    plain, near = run_from(state, wf.base, single), Near()
    spans, gates = slices(wf.targets), torch.ones_like(wf.alphas[0])
    for target in _without_gradient(wf, single, by_weight):
        halved, closed = gates.clone(), gates.clone()
        halved[spans[target.name]], closed[spans[target.name]] = 0.3, 0.0
        moved = take_apart(run_path(wf, single, halved))[0]
        zeroed = take_apart(run_path(wf, single, closed))[0]
        # Near is not enough: a target that hardly matters may cross the line only when closed.
        cancelled = all(map(near, moved, plain)) and _gap(moved, plain) < 0.1 * _gap(zeroed, plain)
        if cancelled and not all(map(near, zeroed, plain)):
            raise Unproved(
                f"{target.name} is rescaled by the model before use (weight standardisation or "
                "the like), so gates on it cancel out. Exclude it, or make the weight plain."
            )


def _gap(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference between two answers; infinite where one is no number."""
    pairs = [(a, b) for a, b in zip(some, others) if a.is_floating_point() and a.numel()]
    gaps = [(a - b).abs().nan_to_num(nan=float("inf")).max() for a, b in pairs]
    return max(map(float, gaps), default=0.0)


def _without_gradient(
    wf: FilteredModel, single: Inputs, targets: Sequence[Target]
) -> Sequence[Target]:
    """The targets whose gates have next to no gradient; all where gradients do not flow."""
    gates = torch.full_like(wf.alphas[0], 0.7, requires_grad=True)
    try:
        with torch.enable_grad():
            outputs = [t for t in take_apart(run_path(wf, single, gates))[0] if t.requires_grad]
            squares = torch.stack([t.double().square().sum() for t in outputs])
            slope = torch.autograd.grad(squares.sum(), gates)[0]
    except Exception:
        return targets
    low, spans = 1e-3 * float(squares.sum()), slices(wf.targets)
    return [t for t in targets if float(slope[spans[t.name]].abs().sum()) <= low]
