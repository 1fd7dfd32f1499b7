"""Fold gates into the weights of a plain copy of a model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wfilter.core.filters import is_marked, unmark
from wfilter.core.folding import fold_head
from wfilter.core.forget import Rows, as_sets
from wfilter.core.forgetting import strip_methods
from wfilter.core.gates import ByTarget
from wfilter.core.outputs import logits_of
from wfilter.core.refusals import check_base
from wfilter.core.standardised import effective_weight, is_standardised, pads_like_timm
from wfilter.core.targets import Target

if TYPE_CHECKING:
    from wfilter.core.model import FilteredModel


@dataclass(frozen=True)
class SnapEffect:
    """What exact gates would change: counts of units, and the move of the logits."""

    closed: int
    opened: int
    between: int
    largest_move: float
    predictions_changed: float


def plain_copy(base: nn.Module) -> nn.Module:
    """An independent copy without a trace of filtering; standardised convolutions become plain."""
    model = copy.deepcopy(base)
    if is_marked(model):
        unmark(model)
    strip_methods(model)
    return make_plain(model)


def make_plain(model: nn.Module) -> nn.Module:
    """In place: plain convolutions instead of standardised ones, with the weights that these use.

    Only there can a gate act on the weight itself: before standardisation it would cancel out.
    """
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Conv2d) and is_standardised(module):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _plain_convolution(module))
    return model


@torch.no_grad()
def bake_rows(wf: FilteredModel, rows: Rows, snap: float) -> nn.Module:
    """A plain copy of the base model with the gates, and the feature rows, of a set folded in."""
    check_base(wf.base)
    gates = snapped(wf.row_gates(rows), snap)
    baked = bake(wf.base, wf.targets, ByTarget(wf.targets, gates))
    if wf.feature_rows is None:
        return baked
    chosen = as_sets(wf.per_sample(rows, 1), wf.num_classes)[0]
    return fold_head(baked, wf.feature_rows, chosen)


@torch.no_grad()
def bake(base: nn.Module, targets: Sequence[Target], gates: Mapping[str, Tensor]) -> nn.Module:
    """A plain copy of ``base`` with each target multiplied by its gates ``(units,)``.

    Under a gate of 0 nothing is left of a weight. The copy is in eval mode, whatever mode the model
    was given in: in training mode BatchNorm would scale gated channels up again.
    """
    model = plain_copy(base).eval()
    for target in targets:
        path, name = target.owners[0]
        parameter = getattr(model.get_submodule(path), name)
        gate = target.spread(gates[target.name]).to(parameter.dtype)
        # Not just the product: -2 * 0 is -0, whose sign would still tell the weight's.
        parameter.copy_(torch.where(gate == 0, 0.0, parameter * gate))
    return model


def _plain_convolution(module: nn.Conv2d) -> nn.Module:
    """A plain convolution that uses a standardised convolution's effective weight."""
    weight = effective_weight(module)
    cls: type[nn.Conv2d] = nn.Conv2d
    if pads_like_timm(module):
        from timm.layers.conv2d_same import Conv2dSame

        cls = Conv2dSame
    plain = cls(
        module.in_channels,
        module.out_channels,
        module.kernel_size,  # type: ignore[arg-type]
        stride=module.stride,  # type: ignore[arg-type]
        padding=module.padding,  # type: ignore[arg-type]
        dilation=module.dilation,  # type: ignore[arg-type]
        groups=module.groups,
        bias=module.bias is not None,
    ).to(weight)  # not as arguments: timm 1.0.20's Conv2dSame takes neither device nor dtype
    with torch.no_grad():
        plain.weight.copy_(weight)
        if plain.bias is not None and module.bias is not None:
            plain.bias.copy_(module.bias)
    plain.weight.requires_grad_(module.weight.requires_grad)
    return plain.train(module.training)


def snapped(gates: Tensor, snap: float) -> Tensor:
    """Gates below ``snap`` at exactly 0, and those above ``1 - snap`` at exactly 1.

    Example:
        >>> snapped(torch.tensor([0.1, 0.5, 0.9]), 0.2)
        tensor([0.0000, 0.5000, 1.0000])
    """
    if not 0 <= snap <= 0.5:
        raise ValueError(f"snap={snap} is outside 0..0.5.")
    gates = torch.where(gates < snap, 0.0, gates)
    return torch.where(gates > 1 - snap, 1.0, gates) if snap else gates


def measure_snap(
    soft: nn.Module, exact: nn.Module, x: Tensor, gates: Tensor, snap: float
) -> SnapEffect:
    """What ``exact``, a model baked with snapped gates, changes against ``soft`` on ``x``."""
    before, after = logits_of(soft.eval()(x)), logits_of(exact.eval()(x))
    closed, opened = int((gates < snap).sum()), int((gates > 1 - snap).sum())
    return SnapEffect(
        closed,
        opened,
        gates.numel() - closed - opened,
        float((before - after).abs().max()),
        float((before.argmax(-1) != after.argmax(-1)).float().mean()),
    )
