"""Attach filters to a model and take them off again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wfilter.core.filters import MARK, Mark, is_marked, unmark
from wfilter.core.forgetting import refuse_inside
from wfilter.core.gates import HARD
from wfilter.core.guessing import guess_images
from wfilter.core.inspection import Inspection, Plan, inspect, make_plan
from wfilter.core.model import FilteredModel
from wfilter.core.outputs import Inputs, read_example
from wfilter.core.proof import prove
from wfilter.core.state import evaluating
from wfilter.core.targets import Selector, Target, select_targets

Example = Tensor | Mapping[str, Any]


def find_targets(
    model: nn.Module,
    targets: Selector = "auto",
    exclude: Selector = (),
    *,
    granularity: str = "out",
    example_input: Example | None = None,
) -> Plan:
    """What ``apply_weight_filtering`` would filter, and how; changes nothing.

    Example:
        >>> print(find_targets(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten())))
        name      shape          units  path   why
        0.weight  4 x 1 x 3 x 3  4      fused  conv2d, batch on axis 0
        0.bias    4              4      fused  conv2d, batch on axis 0
        2 targets (2 fused), 8 units
    """
    chosen = select_targets(model, targets, exclude, granularity)
    with evaluating(model):
        inspection, _ = _try_inspect(model, chosen, example_input)
    return make_plan(chosen, inspection.findings)


def apply_weight_filtering(
    model: nn.Module,
    num_classes: int | None = None,
    *,
    targets: Selector = "auto",
    exclude: Selector = (),
    granularity: str = "out",
    init: float = 3.0,
    class_names: Sequence[str] | None = None,
    example_input: Example | None = None,
) -> FilteredModel:
    """A filtered model around ``model``: one row of gates per class, on each chosen parameter.

    The model's parameters, buffers and code stay as they are. It is frozen and put in eval mode
    until ``remove_weight_filtering``. A new filter is close to the identity but not equal to it:
    every gate is sigmoid(3) = 0.953.

    Args:
        model: Any classifier that maps a batch to logits.
        num_classes: How many rows; read off the model's output when not given.
        targets: ``"auto"``, globs over parameter names, ``re:`` patterns, module types, callables
            ``(name, module, parameter) -> bool``, or a list of them.
        exclude: What not to filter, in the same words.
        granularity: ``"out"``, one gate per output unit, or ``"element"``, one per element.
        init: The alpha to start from.
        class_names: Names that can stand for class indices; a model of transformers brings its own.
        example_input: A batch the model takes, where wfilter cannot guess its shape, or a dict of
            its keyword inputs.

    Example:
        >>> wf = apply_weight_filtering(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()),
        ...                             example_input=torch.zeros(1, 1, 3, 3))
        >>> wf(torch.zeros(2, 1, 3, 3), forget=torch.tensor([3, -1])).shape
        torch.Size([2, 4])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}, not a torch.nn.Module. Build it first, for "
            "example with timm.create_model('resnet18')."
        )
    _refuse_filtered_or_compiled(model)
    chosen = select_targets(model, targets, exclude, granularity)
    with evaluating(model):
        inspection, example = _try_inspect(model, chosen, example_input)
    inspection.refuse_mixing(model)
    selected = chosen
    chosen, inspection = _drop_unused(selected, inspection, targets)
    rows = _count_classes(model, inspection.classes, num_classes, class_names)
    class_names = _own_names(model, rows) if class_names is None else class_names
    if isinstance(init, bool) or not isinstance(init, (int, float)) or not math.isfinite(init):
        raise ValueError(
            f"init={init!r} must be a finite number; for gates of exactly 1 use {HARD:.0f}."
        )
    mark = Mark(
        chosen[0].name,
        tuple(n for n, p in model.named_parameters() if p.requires_grad),
        tuple(n for n, m in model.named_modules() if m.training),
    )
    wf = FilteredModel(model, chosen, inspection, rows, init, class_names, granularity)
    wf.left_out = tuple(target.name for target in selected if target not in chosen)
    setattr(model, MARK, mark)
    model.eval().requires_grad_(False)
    try:
        wf.known.remember(prove(wf, inspection, example))
    except BaseException:
        unmark(model)
        raise
    return wf


def remove_weight_filtering(filtered: nn.Module) -> nn.Module:
    """The model that was given to ``apply_weight_filtering``, as it was.

    Example:
        >>> net = nn.Linear(4, 3)
        >>> remove_weight_filtering(apply_weight_filtering(net, targets="*")) is net
        True
    """
    base = filtered.base if isinstance(filtered, FilteredModel) else filtered
    mark = getattr(base, MARK, None)
    if not isinstance(mark, Mark):
        raise RuntimeError(
            f"this {type(base).__name__} has no filters (any more). Call apply_weight_filtering "
            "first."
        )
    refuse_inside(base, "remove_weight_filtering")
    return unmark(base)


def _try_inspect(
    model: nn.Module, targets: Sequence[Target], example: Example | None
) -> tuple[Inspection, Inputs]:
    """Inspect with the example given, or with the first guess the model takes."""
    inputs = read_example(guess_images(model) if example is None else example)
    return inspect(model, targets, inputs), inputs


def _refuse_filtered_or_compiled(model: nn.Module) -> None:
    if isinstance(model, FilteredModel):
        model = model.base
    mark = next((getattr(m, MARK) for m in model.modules() if is_marked(m)), None)
    if mark is not None:
        raise RuntimeError(
            f"{mark.first_target} already has a filter. Call remove_weight_filtering(model) to "
            "start over."
        )
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        raise RuntimeError(
            "this model is already compiled, and filters attached now would be ignored. Apply "
            "weight filtering to the plain model, then compile: wf.compile()."
        )
    if any(module._compiled_call_impl is not None for module in model.modules()):
        raise RuntimeError(
            "a part of this model is already compiled, and filters attached now would be ignored. "
            "Apply weight filtering first, then compile: wf.compile()."
        )
    if any(is_lazy(parameter) or parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"this {type(model).__name__} has parameters without values (lazy modules, or the meta "
            "device). Run it once on a batch, or load its weights, then apply weight filtering."
        )
    if any(_is_packed(module) for module in model.modules()):
        raise ValueError(
            f"this {type(model).__name__} is quantised: its int8 weights are packed where no gate "
            "reaches them. Filter the float model, then quantise wf.bake(forget=...)."
        )
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        raise ValueError(
            "this model contains TorchScript modules, whose parameters cannot be intercepted. "
            "Pass the Python model."
        )


def _drop_unused(
    targets: Sequence[Target], inspection: Inspection, selector: Selector
) -> tuple[tuple[Target, ...], Inspection]:
    """Leave out what no forward uses when chosen by "auto"; refuse it when the user named it."""
    findings = inspection.findings
    unused = [t.name for t, f in zip(targets, findings) if f.by == "unused"]
    kept = [(t, f) for t, f in zip(targets, findings) if f.by != "unused"]
    if unused and (selector != "auto" or not kept):
        raise ValueError(
            f"{unused[0]} is a target, but no forward uses it in eval mode"
            + (f" ({len(unused)} such targets)" if len(unused) > 1 else "")
            + f": its gates would do nothing. Add exclude={unused[:3]!r} or choose other targets."
        )
    used = tuple(finding for _, finding in kept)
    return tuple(t for t, _ in kept), replace(inspection, findings=used)


def _count_classes(
    model: nn.Module, seen: int | None, wanted: int | None, names: Sequence[str] | None
) -> int:
    if wanted is None:
        if seen is None:
            raise ValueError(
                f"cannot read the number of classes off {type(model).__name__}'s output, which is "
                "no logits (batch, num_classes). Segmentation models and backbones without a head "
                "are no classifiers; for others pass num_classes=..."
            )
        wanted = seen
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise ValueError(f"num_classes={wanted!r} must be a positive int.")
    if seen is not None and seen != wanted:
        raise ValueError(
            f"num_classes={wanted}, but {type(model).__name__} gives {seen} logits.\n"
            f"Leave num_classes out, or give the model a head with {wanted} outputs."
        )
    if names is not None:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"class_names={names!r} must be a list of names, each a str.")
        if len(names) != wanted:
            raise ValueError(f"class_names has {len(names)} entries for {wanted} classes.")
        twice = [name for name in dict.fromkeys(names) if list(names).count(name) > 1]
        if twice:
            raise ValueError(f"class_names has {twice[0]!r} more than once; names must be unique.")
    return wanted


def _own_names(model: nn.Module, rows: int) -> list[str] | None:
    """The class names in a model of transformers, unless they are mere numbers (LABEL_0)."""
    known = getattr(getattr(model, "config", None), "id2label", None)
    if not isinstance(known, dict) or set(known) != set(range(rows)):
        return None
    names = [known[row] for row in range(rows)]
    usable = all(isinstance(name, str) for name in names) and len(set(names)) == rows
    return names if usable and names[0] != "LABEL_0" else None


def _is_packed(module: nn.Module) -> bool:
    """Whether a module is int8; a float model still to be converted has FloatFunctionals only."""
    quantised = ".quantized" in type(module).__module__
    return quantised and isinstance(getattr(module, "weight", None), MethodType)
