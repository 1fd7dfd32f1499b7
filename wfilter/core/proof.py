"""The proof of a plan: its own forward, on a few real images, against one sample at a time.

Marks find where samples lie; they follow one sample, and cannot see a permutation that leaves it in
place, mixing that drops NaN, state, or functions that no mode intercepts. So each plan is tried by
numbers before it is used. One that fails gives way to the next slower one; a model for which none
is right is refused, with the cause (``refusing.py``).

Nearly all of the cost are forwards, so there are eight small ones: four samples alone, of which the
first has open gates and is the base model; two mixed batches of other orders and sizes, which no
sorting survives; one row for all; and the base model once more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wfilter.core.effect import refuse_aliases, refuse_without_effect
from wfilter.core.forgetting import Running
from wfilter.core.inspection import Finding, Inspection, inspect
from wfilter.core.messages import first_line
from wfilter.core.nearness import Near
from wfilter.core.oracle import gateable, run_by_hand
from wfilter.core.outputs import Inputs, take_apart
from wfilter.core.paths import run_path
from wfilter.core.refusals import refuse_single_image
from wfilter.core.refusing import Unproved, explain, refuse_company, run_from
from wfilter.core.state import Snapshot, kept

if TYPE_CHECKING:
    from wfilter.core.model import FilteredModel

SAMPLES = 4  # not the number of a marked batch, so that no shape fits both
# The samples in another order, and more of them: some models lay out larger batches differently.
AGAIN = (3, 2, 1, 0, 2, 0, 3, 1, 0)


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
    near, refusal, proved = Near(), None, inspection
    try:
        proved = _prove(wf, inspection, example, near)
    except Unproved as error:
        refusal = error
    if near.in_doubt or refusal is not None:
        # Deep random networks amplify rounding until it looks like mixing; float64 tells which.
        double = None if example.images.dtype == torch.float64 else _in_double(wf, example)
        if double is not None:
            proved, refusal = _prove(double[0], inspection, double[1], Near()), None
    if refusal is not None:
        raise refusal
    wf.known.remember(proved)
    return proved


def inspect_again(wf: FilteredModel, inputs: Inputs) -> Inspection:
    """Inspect and prove another shape, on a copy: other threads may be using the model."""
    try:
        trial = copy.deepcopy(wf)
    except Exception:  # some models cannot be copied; all is put back afterwards
        trial = wf
    with Running():
        refuse_single_image(wf.known.latest.key, inputs)
        inspection = inspect(trial.base, wf.targets, inputs)
    for target, finding in zip(wf.targets, inspection.findings):
        if finding.by == "unused":
            raise RuntimeError(
                f"{target.name} is filtered but not used for inputs of shape "
                f"{tuple(inputs.images.shape[1:])}: its gates would do nothing. Exclude it."
            )
    inspection.refuse_mixing(wf.base)
    return prove(trial, inspection, inputs)


@dataclass(frozen=True)
class _Trial:
    """What every plan is tried on: samples, their gates, and their answers alone."""

    wf: FilteredModel
    batch: Inputs
    gates: Tensor  # (SAMPLES, total_units), all open for sample 0
    alone: Sequence[Sequence[Tensor]]
    state: Snapshot
    near: Near


def _prove(wf: FilteredModel, inspection: Inspection, example: Inputs, near: Near) -> Inspection:
    generator = torch.Generator().manual_seed(1)
    batch = _images(example, generator)
    gates = _gates(wf, generator)
    with kept(wf.base) as state, Running():
        trial = _Trial(wf, batch, gates, _alone(wf, batch, gates, state), state, near)
        reasons: list[str] = []
        is_fused = True
        for candidate in _candidates(inspection):
            if is_fused and not candidate.is_fused:
                refuse_company(wf.base, batch, inspection.axes, state)
            is_fused = candidate.is_fused
            wf.known.remember(candidate)
            reason = _fault(trial, candidate)
            if reason is None:
                _refuse_used_once(wf, candidate, batch)
                refuse_without_effect(wf, candidate, next(batch.singly()), state)
                return candidate
            reasons.append(reason)
        state.restore()
        raise Unproved(explain(wf, next(batch.singly()), gates[1], reasons))


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
    """Random gates, a few near 0; those of sample 0 and of pinned targets are 1."""
    drawn = torch.rand(SAMPLES, wf.alphas.shape[1], generator=generator)
    gates = torch.where(drawn < 0.1, 0.1 * drawn, 0.3 + 0.7 * drawn).to(wf.alphas)
    gates[0], start = 1, 0
    for index, target in enumerate(wf.targets):
        if index in wf.pins.indices:
            gates[:, start : start + target.units] = 1
        start += target.units
    return gates


def _alone(
    wf: FilteredModel, batch: Inputs, gates: Tensor, state: Snapshot
) -> Sequence[Sequence[Tensor]]:
    """The answers by the oracle, each sample alone with its weights multiplied by hand."""
    first, *others = batch.singly()
    alone, base = [run_from(state, wf.base, first)], gateable(wf.base)
    refuse_aliases(wf)
    if not torch.equal(first.images, batch.images[:1]):
        raise Unproved(
            f"{type(wf.base).__name__} writes to the images it is given (x -= mean): whoever uses "
            "them again gets others. Let it make new ones (x = x - mean)."
        )
    products: dict[str, Tensor] = {}
    for single, row in zip(others, gates[1:]):
        state.restore()
        alone.append(take_apart(run_by_hand(wf, base, single, row, products))[0])
    return alone


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


def _fault(trial: _Trial, candidate: Inspection) -> str | None:
    """What is wrong with a plan; ``None`` where its forwards are right and leave no trace."""
    trial.state.restore()
    try:
        return _difference(trial, candidate.axes)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"


def _difference(trial: _Trial, axes: Sequence[int | None]) -> str | None:
    """Every forward but the first runs on what those before it have left behind, as in use."""
    wf, batch, gates, near = trial.wf, trial.batch, trial.gates, trial.near
    for order in (torch.arange(SAMPLES), torch.tensor(AGAIN)):
        mixed = run_path(wf, batch.of_samples(order), gates[order])
        if not near.alike(_tensors(mixed), [trial.alone[i] for i in order.tolist()], axes):
            return "differs"
    if trial.state.holds_wrapped():
        return "leaves tensors of vmap behind"
    one = run_path(wf, batch.of_samples(torch.tensor([1])), gates[1])
    if not near.alike(_tensors(one), trial.alone[1:2], axes):
        return "differs"
    after = _tensors(batch.run(wf.base))
    if near.alike(after, trial.alone[:1], axes):
        return None
    before = run_from(trial.state, wf.base, batch)
    return "differs" if all(map(near, after, before)) else "stays behind"


def _refuse_used_once(wf: FilteredModel, proved: Inspection, batch: Inputs) -> None:
    """Stop at targets that are used no more, since the model kept what its first forward made.

    One sample at a time a target may rest, for branches on samples; so look at the same ones again.
    """
    if not proved.singly:
        return
    findings = inspect(wf.base, wf.targets, batch).findings
    resting = [t.name for t, f in zip(wf.targets, findings) if f.by == "unused"]
    if resting:
        raise Unproved(
            f"{type(wf.base).__name__} uses {resting[0]} in its first forward alone and keeps what "
            "it makes of it (a cache, such as functools.lru_cache): gates would come too late. "
            f"Add exclude={resting!r}, or turn the cache off."
        )


def _tensors(output: Any) -> list[Tensor]:
    return take_apart(output)[0]


def _in_double(wf: FilteredModel, example: Inputs) -> tuple[FilteredModel, Inputs] | None:
    """A copy of the model in float64, where it has one that runs, and inputs for it."""
    others = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in example.others.items()
    }
    inputs = Inputs(example.images.double(), example.keyword, others)
    try:
        double = copy.deepcopy(wf).double()
        with Running():
            inputs.run(double.base)
    except Exception:
        return None
    return double, inputs
