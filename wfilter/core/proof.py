"""The proof of a plan: its own forward, on a few real images, against one sample at a time.

Marks find where samples lie; they follow one sample, and cannot see a permutation that leaves it in
place, mixing that drops NaN, state, or functions that no mode intercepts. So each plan is tried by
numbers before it is used. One that fails gives way to the next slower one; a model for which none
is right is refused, with the cause.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wfilter.core.forgetting import running
from wfilter.core.gates import slices
from wfilter.core.inspection import Finding, Inspection, inspect, mixing_text
from wfilter.core.oracle import gateable, run_by_hand
from wfilter.core.outputs import Inputs, take_apart
from wfilter.core.paths import run_path
from wfilter.core.state import Kept, kept
from wfilter.core.targets import Target

if TYPE_CHECKING:
    from wfilter.core.model import FilteredModel

SAMPLES = 4  # other than the marked batch's number
# Largest difference that rounding explains, as a part of a sample's largest entry.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 5e-3}


class Unproved(ValueError):
    """No plan of this model is right."""


@torch.no_grad()
def prove(wf: FilteredModel, inspection: Inspection, example: Inputs) -> Inspection:
    """The inspection, or a slower one, with which forwards of ``wf`` are right.

    Args:
        wf: The filtered model, not yet used with inputs of this shape.
        inspection: What the marks found.
        example: Inputs of the shape in question; of the images only shape and dtype matter.

    Raises:
        ValueError: No path is right, with the cause.
    """
    generator = torch.Generator().manual_seed(1)
    batch = _images(example, generator)
    gates = _gates(wf, generator)
    with kept(wf.base) as state, running():
        _check_samples(wf.base, batch, inspection, state)
        base, expected = gateable(wf.base), []
        for single, row in zip(batch.singly(), gates):
            state.restore()
            expected.append(take_apart(run_by_hand(wf, base, single, row))[0])
        reasons = []
        for candidate in _candidates(inspection):
            wf.remember(candidate)
            reason = _fault(wf, candidate, batch, gates, expected, state)
            if reason is None:
                _refuse_without_effect(wf, candidate, next(batch.singly()), state)
                return candidate
            reasons.append(reason)
        state.restore()
        raise Unproved(_explain(wf, batch, gates, reasons))


def _images(example: Inputs, generator: torch.Generator) -> Inputs:
    """Images of several magnitudes, whose order under no usual score is that of the batch."""
    inputs = example.of_samples(torch.arange(SAMPLES) % len(example.images))
    shape = inputs.images.shape
    drawn = torch.rand(shape, generator=generator)
    drawn[1] *= 40
    drawn[2] = 2 * torch.randn(shape[1:], generator=generator)
    drawn[3] *= 0.1
    return inputs.with_images(drawn.to(example.images))


def _gates(wf: FilteredModel, generator: torch.Generator) -> Tensor:
    """Random gates ``(SAMPLES, total_units)``, a few near 0; those of pinned targets are 1."""
    drawn = torch.rand(SAMPLES, wf.alphas.shape[1], generator=generator)
    gates = torch.where(drawn < 0.1, 0.1 * drawn, 0.3 + 0.7 * drawn).to(wf.alphas)
    start = 0
    for index, target in enumerate(wf.targets):
        if index in wf.pins.indices:
            gates[:, start : start + target.units] = 1
        start += target.units
    return gates


def inspect_again(wf: FilteredModel, inputs: Inputs) -> Inspection:
    """Inspect and prove another shape, on a copy: other threads may be using the model."""
    try:
        trial = copy.deepcopy(wf)
    except Exception:  # some models cannot be copied; all is put back afterwards
        trial = wf
    with running():
        inspection = inspect(trial.base, wf.targets, inputs)
    for target, finding in zip(wf.targets, inspection.findings):
        if finding.by == "unused":
            raise RuntimeError(
                f"{target.name} is filtered but not used for inputs of shape "
                f"{tuple(inputs.images.shape[1:])}: its gates would do nothing. Exclude it."
            )
    inspection.refuse_mixing(wf.base)
    return prove(trial, inspection, inputs)


def _check_samples(model: nn.Module, batch: Inputs, inspection: Inspection, state: Kept) -> None:
    """Stop where the base model treats a sample differently in company."""
    together = _run(model, batch, state)
    singles = [_run(model, single, state) for single in batch.singly()]
    if not _alike(together, singles, inspection.axes):
        name = type(model).__name__
        again = _run(model, batch, state)
        if not all(_near(a, b) for a, b in zip(together, again)):
            raise Unproved(
                f"{name} gives two answers to the same images: it is random, or keeps state that "
                "cannot be put back, even in eval mode."
            )
        order = [_twin(sample, together, singles, inspection.axes) for sample in range(SAMPLES)]
        if sorted(str(i) for i in order) == [str(i) for i in range(SAMPLES)]:
            raise Unproved(f"{name} permutes the samples of a batch: answers change places.")
        raise Unproved(mixing_text(model))


def _run(model: nn.Module, inputs: Inputs, state: Kept) -> list[Tensor]:
    """The tensors of the output, from the state in which the model was found."""
    state.restore()
    return take_apart(inputs.run(model))[0]


def _twin(sample: int, together: Any, singles: Any, axes: Any) -> int | None:
    """Which place of the batch has the answer of a sample alone."""
    for place in range(SAMPLES):
        rows = [t if a is None else t.narrow(a, place, 1) for t, a in zip(together, axes)]
        if all(r.shape == s.shape and _near(r, s) for r, s in zip(rows, singles[sample])):
            return place
    return None


def _candidates(inspection: Inspection) -> Iterator[Inspection]:
    """What to try, fastest first: as found, exact by vmap, one by one, and all by weights."""
    yield inspection
    slow = [_unfused(finding) for finding in inspection.findings]
    for findings in (slow, [_by_weight(finding) for finding in slow]):
        yield replace(inspection, findings=tuple(findings))
        one_by_one = [replace(f, why=f"{f.why}; one sample at a time") for f in findings]
        yield replace(inspection, findings=tuple(one_by_one), singly=True)


def _unfused(finding: Finding) -> Finding:
    if finding.path != "fused":
        return finding
    why = f"{finding.why}, but by numbers another answer than alone"
    return replace(finding, layout=None, why=why)


def _by_weight(finding: Finding) -> Finding:
    if finding.by != "output":
        return finding
    return Finding("weight", None, "gated at its weight: no rule holds by numbers")


def _fault(
    wf: FilteredModel,
    candidate: Inspection,
    batch: Inputs,
    gates: Tensor,
    expected: Sequence[list[Tensor]],
    state: Kept,
) -> str | None:
    """What is wrong with a plan; ``None`` where its forwards are right and leave no trace.

    Each is run twice, the second time in another order and on what the first has left behind, as
    it will be in use; then the base model must still be itself.
    """
    try:
        plain = _run(wf.base, batch, state)
        for order in (torch.arange(SAMPLES), torch.arange(SAMPLES).flip(0)):
            found = take_apart(run_path(wf, batch.of_samples(order), gates[order]))[0]
            if not _alike(found, [expected[i] for i in order.tolist()], candidate.axes):
                return "differs"
        state.restore()
        one = take_apart(run_path(wf, batch, gates[0]))[0]
        if not _alike(one, expected[:1], candidate.axes):
            return "differs"
        after = take_apart(batch.run(wf.base))[0]
        if not all(_near(a, b) for a, b in zip(after, plain)):
            return "stays behind"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _refuse_without_effect(
    wf: FilteredModel, inspection: Inspection, single: Inputs, state: Kept
) -> None:
    """Stop at a weight that the model rescales before use: there gates cancel out."""
    by_weight = [t for t, f in zip(wf.targets, inspection.findings) if f.by == "weight"]
    if not by_weight:
        return
    plain, gates = _run(wf.base, single, state), torch.ones_like(wf.alphas[0])
    spans = slices(wf.targets)
    for target in _without_gradient(wf, single, by_weight):
        halved, closed = gates.clone(), gates.clone()
        halved[spans[target.name]], closed[spans[target.name]] = 0.3, 0.0
        moved = take_apart(run_path(wf, single, halved))[0]
        if all(_near(a, b) for a, b in zip(moved, plain)):
            zeroed = take_apart(run_path(wf, single, closed))[0]
            if not all(_near(a, b) for a, b in zip(zeroed, plain)):
                raise Unproved(
                    f"{target.name} is rescaled by the model before use (weight standardisation or "
                    "the like), so gates on it cancel out. Exclude it, or make the weight plain."
                )


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


def _alike(
    together: Sequence[Tensor], singles: Sequence[Sequence[Tensor]], axes: Sequence[int | None]
) -> bool:
    """Whether an output for a batch is that of its first samples alone, put together."""
    for place, single in enumerate(singles):
        for whole, alone, axis in zip(together, single, axes):
            row = whole
            if axis is not None:
                size = alone.shape[axis]
                row = whole.narrow(axis, place * size, size)
            if row.shape != alone.shape or not _near(row, alone):
                return False
    return True


def _near(found: Tensor, expected: Tensor) -> bool:
    """Equal up to rounding, which is relative to the largest entry; NaN is equal to itself."""
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    limit = _ROUNDING.get(expected.dtype, 0.1)
    a, b = torch.nan_to_num(found.double()), torch.nan_to_num(expected.double())
    scale = float(b.abs().max()) if b.numel() else 0.0
    same_nan = torch.equal(found.isnan(), expected.isnan())
    return same_nan and bool(((a - b).abs() <= limit * scale + 1e-30).all())


def _explain(wf: FilteredModel, batch: Inputs, gates: Tensor, reasons: Sequence[str]) -> str:
    """Why no path is right, in words: the first target whose gates do not do what they should."""
    name = type(wf.base).__name__
    if "stays behind" in reasons:
        return (
            f"{name} keeps what it computes in a forward (a cache, or a buffer written in eval "
            f"mode): gates of one call would show in the next. {_culprit(wf, batch, gates)}"
        )
    errors = [f" ({reason})" for reason in reasons if ": " in reason]
    return (
        f"no way to filter {name} gives the answer of a single sample with its weights "
        f"multiplied. {_culprit(wf, batch, gates)}{errors[0] if errors else ''}"
    )


def _culprit(wf: FilteredModel, batch: Inputs, gates: Tensor) -> str:
    single, start = next(batch.singly()), 0
    for target in wf.targets:
        row = torch.ones_like(gates[0])
        row[start : start + target.units] = gates[0][start : start + target.units]
        start += target.units
        if not _is_right(wf, target, single, row):
            return (
                f"{target.name} is used where its gates cannot follow: in a compiled or scripted "
                "function, through a copy, or from a cache. "
                f"Add exclude={target.name!r}, or rewrite that part of the model."
            )
    return "Choose other targets."


def _is_right(wf: FilteredModel, target: Target, single: Inputs, row: Tensor) -> bool:
    try:
        with kept(wf.base) as state:
            expected = take_apart(run_by_hand(wf, gateable(wf.base), single, row))[0]
            _run(wf.base, single, state)
            found = take_apart(run_path(wf, single, row))[0]
        return all(_near(a, b) for a, b in zip(found, expected))
    except Exception:
        return False
