"""What ``wf(x, forget=...)`` does: read ``forget``, make gates, and run the path that fits.

``run_call`` reads what a call forgets, ``gates_and_sets`` turns that into what the paths take, and
``paths.run_path`` runs the base model. Every filtered forward comes through here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wfilter.core.compiling import refuse_freezing
from wfilter.core.forget import Forget, Rows, as_sets, read_forget
from wfilter.core.forgetting import Running, innermost, is_any_open
from wfilter.core.gates import Look, traced
from wfilter.core.outputs import Inputs, take_apart
from wfilter.core.paths import gate_mode, head_mode, plain_features, refuse_unmet, run_path
from wfilter.core.refusals import (
    check_base,
    check_values,
    look_for_bad,
    refuse_recomputation,
    refuse_training,
)

if TYPE_CHECKING:
    from wfilter.core.model import FilteredModel


def run_call(wf: FilteredModel, inputs: Inputs, forget: Forget, *, features: bool = False) -> Any:
    """The output of a call of ``wf``, or what its head sees.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
        >>> run_call(wf, Inputs(torch.ones(2, 4), None, {}), 2).shape
        torch.Size([2, 3])
    """
    if traced(inputs.images) and not features:
        return _run_traced(wf, inputs, forget)
    check_base(wf.base, wf.parts)
    batch = inputs.images.shape[0]
    wanted = _wanted(wf, batch, forget)
    if wanted is None or not batch:
        return plain_features(wf, inputs) if features else _run_plain(wf, inputs)
    refuse_recomputation(wf, inputs.images)
    if wf.compiled is not None and not features:
        check_values(wf, wanted)
        wf.inspection_of(inputs)  # a graph cannot stop to look at images of a new size
        wanted = wf.per_sample(wanted, batch)
        return wf.compiled.gated(inputs, wf.compiled.gates(wanted), _sets(wf, wanted, 0))
    gates, sets = gates_and_sets(wf, wanted, batch, look_for_bad(wf))
    return run_path(wf, inputs, gates, sets, features=features)


def _wanted(wf: FilteredModel, batch: int, forget: Forget) -> Rows | Tensor | None:
    """What a call forgets, by its argument or by the block it is in."""
    if forget is not None:
        return read_forget(forget, batch, wf.num_classes, wf.class_names)
    block = innermost(wf) if is_any_open() else None
    return None if block is None else block.rows


def gates_and_sets(
    wf: FilteredModel, wanted: Rows | Tensor, batch: int, look: Look | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gates for the targets, and for the feature rows, where there are any, a set per sample.

    One class or set for all samples has one row of gates, ``(total_units,)``. ``look`` is called
    with the alphas that the gates are made of.
    """
    if isinstance(wanted, tuple):
        return wf.row_gates(wanted, look), _sets(wf, wanted, batch)
    wanted = wf.per_sample(wanted, batch)
    return wf.mixed_gates(wanted, look), _sets(wf, wanted, batch)


def _sets(wf: FilteredModel, wanted: Rows | Tensor, batch: int) -> Tensor | None:
    if wf.feature_rows is None:
        return None
    return as_sets(wf.per_sample(wanted, batch), wf.num_classes)


def _run_plain(wf: FilteredModel, inputs: Inputs) -> Any:
    """The base model as it is; in a context with blocks its modules must not look for them."""
    base = wf.base if wf.compiled is None else wf.compiled.plain
    if not is_any_open():
        return inputs.run(base)
    with Running():
        return inputs.run(base)


def _run_traced(wf: FilteredModel, inputs: Inputs, forget: Forget) -> Any:
    """What a graph holds of a call: no checks of values, no inspection."""
    refuse_training(wf.parts)
    if wf.open_blocks:
        return _outside_graph(wf, inputs, forget)
    if forget is None:
        return inputs.run(wf.base)
    refuse_freezing()
    batch = inputs.images.shape[0]
    wanted = read_forget(forget, batch, wf.num_classes, wf.class_names)
    refuse_recomputation(wf, inputs.images)
    gates, sets = gates_and_sets(wf, wf.per_sample(wanted, batch), batch)
    return run_path(wf, inputs, gates, sets)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside_graph(wf: FilteredModel, inputs: Inputs, forget: Forget) -> Any:
    """Which block a call is in depends on its context, which no graph can hold."""
    return inputs.run(partial(wf, forget=forget))


def run_part(
    wf: FilteredModel,
    method: Callable[..., Any],
    rows: Rows,
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A method of the base model or of one of its modules, called inside a block."""
    whole = module is wf.base and method is type(module).forward
    if whole and len(args) < 2:
        return wf(*args, **kwargs)
    check_base(wf.base)
    gates, sets = gates_and_sets(wf, rows, 1, look_for_bad(wf))
    inspection = wf.known.latest
    wanted = any(tensor.requires_grad for tensor in take_apart((args, kwargs))[0])
    mode = gate_mode(wf, inspection, gates, differentiated=wanted)
    at_head = None
    if wf.feature_rows is not None:
        at_head = head_mode(wf, wf.feature_rows.head_of(wf.base), sets)
    with Running(), mode, at_head or nullcontext():
        output = method(module, *args, **kwargs)
    if whole:
        refuse_unmet(wf, inspection, mode, at_head)
    return output
