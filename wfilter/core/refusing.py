"""Why a model cannot be filtered at all: what a failed proof found out, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wfilter.core.inspection import mixing_text
from wfilter.core.nearness import Near
from wfilter.core.oracle import gateable, run_by_hand
from wfilter.core.outputs import Inputs, take_apart
from wfilter.core.paths import run_path
from wfilter.core.state import Snapshot, kept
from wfilter.core.targets import Target

if TYPE_CHECKING:
    from wfilter.core.model import FilteredModel

Axes = Sequence[int | None]


class Unproved(ValueError):
    """No plan of this model is right."""


def run_from(state: Snapshot, model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The tensors of the output, from the state in which the model was found."""
    state.restore()
    return take_apart(inputs.run(model))[0]


def refuse_company(model: nn.Module, batch: Inputs, axes: Axes, state: Snapshot) -> None:
    """Stop where the base model answers otherwise for a sample alone than for it in a batch."""
    near = Near()
    together = run_from(state, model, batch)
    singles = [run_from(state, model, single) for single in batch.singly()]
    if near.alike(together, singles, axes):
        return
    name = type(model).__name__
    if not all(map(near, together, run_from(state, model, batch))):
        raise Unproved(
            f"{name} gives two answers to the same images: it is random, or keeps state that "
            "cannot be put back, even in eval mode."
        )
    places = range(len(singles))
    order = [_place_of(single, together, axes, len(singles)) for single in singles]
    if sorted(map(str, order)) == [str(place) for place in places]:
        raise Unproved(f"{name} permutes the samples of a batch: answers change places.")
    raise Unproved(mixing_text(model))


def _place_of(
    single: Sequence[Tensor], together: Sequence[Tensor], axes: Axes, places: int
) -> int | None:
    """Which place of the batch has the answer of a sample alone."""
    near = Near()
    for place in range(places):
        rows = [t if a is None else t.narrow(a, place, 1) for t, a in zip(together, axes)]
        if all(map(near, rows, single)):
            return place
    return None


def explain(wf: FilteredModel, single: Inputs, gates: Tensor, reasons: Sequence[str]) -> str:
    """Why no path is right, in words: the first target whose gates do not do what they should.

    Args:
        wf: The filtered model.
        single: One sample.
        gates: ``(total_units,)``, none of them 1.
        reasons: What was wrong with each plan.
    """
    name = type(wf.base).__name__
    if "stays behind" in reasons:
        return (
            f"{name} keeps what it computes in a forward (a cache, or a buffer written in eval "
            f"mode): gates of one call would show in the next. {_culprit(wf, single, gates)}"
        )
    errors = [f" ({reason})" for reason in reasons if ": " in reason]
    return (
        f"no way to filter {name} gives the answer of a single sample with its weights "
        f"multiplied. {_culprit(wf, single, gates)}{errors[0] if errors else ''}"
    )


def _culprit(wf: FilteredModel, single: Inputs, gates: Tensor) -> str:
    start = 0
    for target in wf.targets:
        row = torch.ones_like(gates)
        row[start : start + target.units] = gates[start : start + target.units]
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
            run_from(state, wf.base, single)
            answered = take_apart(run_path(wf, single, row))[0]
        return all(map(Near(), answered, expected))
    except Exception:
        return False
