"""The reference for every path: one sample at a time, weights multiplied by hand.

Slow and obvious on purpose; every fast path is compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from wfilter.core.bake import plain_copy
from wfilter.core.forget import Forget, as_sets, check_per_sample, per_sample, read_forget
from wfilter.core.gates import ByTarget
from wfilter.core.nearness import gap
from wfilter.core.outputs import Inputs, join, read_inputs, take_apart
from wfilter.core.standardised import is_standardised

if TYPE_CHECKING:
    from wfilter.core.model import FilteredModel


def one_at_a_time(wf: FilteredModel, x: Tensor | Inputs, forget: Tensor) -> Any:
    """The output for a mixed batch, each sample run alone with its own weights.

    Args:
        wf: The filtered model.
        x: Images ``(batch, ...)``, or all inputs of a call.
        forget: Labels ``(batch,)``, -1 for nothing, or sets ``(batch, num_classes)``.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="*")
        >>> one_at_a_time(wf, torch.ones(2, 4), torch.tensor([2, -1])).shape
        torch.Size([2, 3])
    """
    inputs = x if isinstance(x, Inputs) else read_inputs(x, {})
    check_per_sample(forget, len(inputs.images), wf.num_classes)
    base = gateable(wf.base)
    outputs = []
    sets = as_sets(forget, wf.num_classes)
    for single, wanted, chosen in zip(inputs.singly(), forget, sets):
        rows = wanted.nonzero().flatten().tolist() if wanted.ndim else [int(wanted)]
        weights = gated_weights(wf, base, [row for row in rows if row >= 0])
        with _rerouted(wf, base, chosen):
            outputs.append(single.run(lambda *a, **k: _call(base, weights, a, k)))  # noqa: B023
    return join(outputs, wf.inspection_of(inputs).axes)


@contextmanager
def _rerouted(wf: FilteredModel, base: torch.nn.Module, chosen: Tensor) -> Iterator[None]:
    """Feature rows by a hook on the module of the head, where there are any."""
    rows = wf.feature_rows
    if rows is None:
        yield
        return

    def edit(module: Any, args: Any, output: Tensor) -> Tensor:
        plain = partial(F.linear, weight=module.weight, bias=module.bias)
        logits: Tensor = rows(args[0], chosen, plain)[1]
        return logits

    hook = base.get_submodule(rows.head.rpartition(".")[0]).register_forward_hook(edit)
    try:
        yield
    finally:
        hook.remove()


def gateable(base: torch.nn.Module) -> torch.nn.Module:
    """The model itself, or a copy whose standardised convolutions have become plain ones."""
    if any(is_standardised(module) for module in base.modules()):
        return plain_copy(base).eval()
    return base


def run_by_hand(
    wf: FilteredModel,
    base: torch.nn.Module,
    inputs: Inputs,
    gates: Tensor,
    products: dict[str, Tensor] | None = None,
) -> Any:
    """The output of ``base`` with every target multiplied by ``gates``, ``(total_units,)``.

    ``products`` is memory that calls can share: new memory costs more than the multiplication.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="*")
        >>> run_by_hand(wf, wf.base, read_inputs(torch.ones(2, 4), {}), torch.zeros(6))
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
    """
    weights, by_target = {}, ByTarget(wf.targets, gates)
    products = {} if products is None else products
    for target in wf.targets:
        path, name = target.owners[0]
        weight = getattr(base.get_submodule(path), name)
        gate = target.spread(by_target[target.name]).to(weight.dtype)
        product = torch.mul(weight, gate, out=products.get(target.name))
        products[target.name] = product
        for owner in target.owners:
            weights[".".join(part for part in owner if part)] = product
    return inputs.run(lambda *args, **kwargs: _call(base, weights, args, kwargs))


def _call(base: torch.nn.Module, weights: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
    return functional_call(base, weights, args, kwargs, tie_weights=False)


def compare(wf: FilteredModel, inputs: Inputs, forget: Forget) -> dict[str, float]:
    """Largest difference between the path that ``wf`` takes for these inputs and the oracle.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="*")
        >>> compare(wf, read_inputs(torch.ones(2, 4), {}), 1)["fused"] < 1e-5
        True
    """
    if forget is None:
        raise TypeError("verify compares filtered forwards. Pass what to forget.")
    batch = len(inputs.images)
    wanted = read_forget(forget, batch, wf.num_classes, wf.class_names)
    labels = per_sample(wanted, batch, wf.num_classes, wf.alphas.device)
    with torch.no_grad():
        fast, _ = take_apart(inputs.run(lambda *a, **k: wf(*a, forget=labels, **k)))
        slow, _ = take_apart(one_at_a_time(wf, inputs, labels))
    path = "fused" if wf.is_fused(inputs) else "exact"
    return {path: max(gap(a, b) for a, b in zip(fast, slow))}


def gated_weights(wf: FilteredModel, base: torch.nn.Module, rows: list[int]) -> dict[str, Tensor]:
    """Every target of ``base`` times the gates of each class in ``rows``, by dotted name."""
    weights = {}
    for target in wf.targets:
        path, name = target.owners[0]
        weight = getattr(base.get_submodule(path), name)
        for row in rows:
            alpha = wf.alpha[target.name][row]
            gate = (alpha > 0).to(alpha.dtype) if wf.hard else torch.sigmoid(alpha)
            weight = weight * target.spread(gate).to(weight.dtype)
        for owner in target.owners:
            weights[".".join(part for part in owner if part)] = weight
    return weights
