"""The paths of a filtered forward, fused or exact, and which of them a batch takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from wfilter.core.compiling import one_graph
from wfilter.core.forgetting import Running, is_any_open
from wfilter.core.gates import ByTarget
from wfilter.core.head import Head, HeadMode
from wfilter.core.inspection import (
    Inspection,
    find_sites,
    make_sites,
    parameter_of,
    sites_now,
)
from wfilter.core.known import KeptSites
from wfilter.core.modes import GateMode, spans
from wfilter.core.outputs import Inputs, join, take_apart

if TYPE_CHECKING:
    from wfilter.core.model import FilteredModel


def run_path(
    wf: FilteredModel,
    inputs: Inputs,
    gates: Tensor,
    sets: Tensor | None = None,
    *,
    features: bool = False,
    replicas: int = 1,
) -> Any:
    """The base model under ``gates``, by the path that fits; gives features where asked for.

    Args:
        wf: The filtered model.
        inputs: What it is called with, of a shape inspected before.
        gates: ``(total_units,)``, one row for all samples, or ``(batch, total_units)``.
        sets: What each sample forgets, ``(batch, num_classes)``, for ``wf.feature_rows``.
        features: Give what the head sees instead of the output.
        replicas: Rows of ``gates`` for each sample.
    """
    inspection = wf.inspection_of(inputs)
    head = wf.head(inputs) if features or sets is not None else None
    job = _Job(gates, sets, head, features, replicas)
    if gates.ndim == 1 or inspection.is_fused:
        return _run(wf, inspection, inputs, job)
    if inspection.singly:
        return _run_singly(wf, inspection, inputs, job)
    return _run_mapped(wf, inspection, inputs, job)


class _Job(NamedTuple):
    """What a forward does beside running the model; fields are those of ``run_path``."""

    gates: Tensor
    sets: Tensor | None
    head: Head | None  # to be caught, or edited
    features: bool
    replicas: int = 1


def _run_singly(wf: FilteredModel, inspection: Inspection, inputs: Inputs, job: _Job) -> Any:
    """One sample after the other, for models with parts that ``vmap`` cannot run."""
    outputs = []
    for sample, single in enumerate(inputs.singly()):
        chosen = None if job.sets is None else job.sets[sample : sample + 1]
        alone = _Job(job.gates[sample], chosen, job.head, job.features)
        outputs.append(_run(wf, inspection, single, alone))
    return join(outputs, (0,) if job.features else inspection.axes)


def _run_mapped(wf: FilteredModel, inspection: Inspection, inputs: Inputs, job: _Job) -> Any:
    """Each sample with weights of its own, all at once by ``vmap``."""
    rebuild: list[Callable[..., Any]] = []

    def one(image: Tensor, row: Tensor, chosen: Tensor | None, own: dict[str, Tensor]) -> Any:
        single = inputs.with_images(image[None], {k: v[None] for k, v in own.items()})
        chosen = None if chosen is None else chosen[None]
        alone = _Job(row, chosen, job.head, job.features)
        tensors, again = take_apart(_run(wf, inspection, single, alone))
        rebuild.append(again)
        return tensors

    own = inputs.per_sample()
    dims = (0, 0, None if job.sets is None else 0, 0 if own else None)
    stacked = vmap(one, dims, randomness="different")(inputs.images, job.gates, job.sets, own)
    return rebuild[0](_unstack(stacked, (0,) if job.features else inspection.axes))


def _run(wf: FilteredModel, inspection: Inspection, inputs: Inputs, job: _Job) -> Any:
    """The base model, gated at outputs where a rule covers the target, at weights elsewhere."""
    wanted = inputs.need_gradients
    mode = gate_mode(wf, inspection, job.gates, job.replicas, differentiated=wanted)
    at_head = None if job.head is None else head_mode(wf, job.head, job.sets, mode)
    with one_graph(), _passing_entries(), at_head or mode:
        output = inputs.run(wf.base)
    refuse_unmet(wf, inspection, mode, at_head)
    return at_head.features(inputs.shape[0]) if job.features and at_head is not None else output


def refuse_unmet(
    wf: FilteredModel, inspection: Inspection, mode: GateMode, at_head: HeadMode | None
) -> None:
    """Stop where a target was not gated, though the inspection saw it used, or a head not met."""
    if at_head is not None:
        at_head.refuse_unseen()
    idle = [] if torch.compiler.is_dynamo_compiling() else mode.idle()
    if idle and not (inspection.singly and _is_as_applied(wf)):
        raise RuntimeError(
            f"{wf.targets[idle[0]].name} was not gated in this forward, though the "
            "inspection saw it used. If a part of the model was compiled or replaced after "
            "apply_weight_filtering, undo that; to compile, call wf.compile()."
        )


def _is_as_applied(wf: FilteredModel) -> bool:
    """Whether no module was replaced or compiled since ``apply``.

    A target that a sample does not use is then one on another branch of the model, not an error.
    """
    compiled = any(module._compiled_call_impl is not None for module in wf.parts)
    return not compiled and all(map(is_, wf.base.modules(), wf.parts))


def _passing_entries() -> AbstractContextManager[None]:
    """Inside, the entries of ``forgetting`` do nothing; only a context with blocks needs it."""
    if torch.compiler.is_dynamo_compiling() or not is_any_open():
        return nullcontext()
    return Running()


def gate_mode(
    wf: FilteredModel,
    inspection: Inspection,
    gates: Tensor,
    replicas: int = 1,
    *,
    differentiated: bool = False,
) -> GateMode:
    """The mode that gates the base model; enter it around a forward of it or of a part."""
    findings, pinned = inspection.findings, wf.pins.indices
    weights = {}
    if inspection.has_weights:
        by_target = ByTarget(wf.targets, gates)
        for index, (target, finding) in enumerate(zip(wf.targets, findings)):
            if finding.by == "weight" and index not in pinned:
                weight = parameter_of(wf.base, target)
                gate = target.spread(by_target[target.name]).to(weight.dtype)
                weights[id(weight)] = index, weight * gate
    if torch.compiler.is_compiling():
        sites = make_sites(wf.base, wf.targets, findings, pinned)
        return GateMode(sites, gates, weights, replicas, differentiated=differentiated)
    kept = _kept_sites(wf, inspection)
    return GateMode(
        sites_now(kept.owned),
        gates,
        weights,
        replicas,
        differentiated=differentiated,
        spans=kept.spans,
        watches=kept.watches,
    )


def _kept_sites(wf: FilteredModel, inspection: Inspection) -> KeptSites:
    """The sites of an inspection, kept: finding them is a fifth of what gates cost eagerly."""
    pinned = wf.pins.indices
    kept = wf.known.sites.get(id(inspection))
    if kept is None or kept.inspection is not inspection or kept.pinned != pinned:
        owned = find_sites(wf.base, wf.targets, inspection.findings, pinned)
        sites = [site for _, _, site in owned]
        bounds = spans(sites, wf.alphas.shape[1])
        watches = any(site.standardised for site in sites)
        kept = KeptSites(inspection, pinned, owned, bounds, watches)
        wf.known.sites[id(inspection)] = kept
    return kept


def plain_features(wf: FilteredModel, inputs: Inputs) -> Tensor:
    """What the head of the base model sees."""
    mode = head_mode(wf, wf.head(inputs), None)
    with Running(), mode:
        inputs.run(wf.base)
    return mode.features(inputs.shape[0])


def head_mode(
    wf: FilteredModel, head: Head, sets: Tensor | None, gated: GateMode | None = None
) -> HeadMode:
    """The seam for feature rows: catches what ``head`` sees, edited by what each sample forgets."""
    rows = wf.feature_rows
    if rows is None or sets is None:
        return HeadMode(wf.base, head, gated=gated)
    return HeadMode(
        wf.base, head, lambda features, as_logits: rows(features, sets, as_logits), gated
    )


def _unstack(stacked: Sequence[Tensor], axes: Sequence[int | None]) -> list[Tensor]:
    """Outputs of single samples, stacked by vmap, as outputs of a batch.

    Each has the samples first and keeps the axis of length one that it had alone.
    """
    return [
        tensor[0] if axis is None else tensor.movedim(0, axis).flatten(axis, axis + 1)
        for tensor, axis in zip(stacked, axes)
    ]
