"""What is put on a base model: a mark while filters are attached, parametrizations in a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wfilter.core.targets import Target, is_standardised


@dataclass(frozen=True)
class Mark:
    """What apply changed on the base model, so that remove can put it back."""

    first_target: str
    trainable: tuple[str, ...]
    training: tuple[str, ...]


MARK = "_weight_filtering"


def unmark(base: nn.Module) -> nn.Module:
    """In place: give a base model back its training flags and gradients."""
    mark: Mark = getattr(base, MARK)
    delattr(base, MARK)
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(name in mark.trainable)
    for name, module in base.named_modules():
        module.training = name in mark.training
    return base


def is_marked(base: nn.Module) -> bool:
    """Whether a model has filters attached."""
    return hasattr(base, MARK)


class WeightFilter(nn.Module):
    """Multiply a tensor by the gates of what is being forgotten.

    The product is kept between calls until a factor changes, and only while it needs no gradient,
    so that inside ``forgetting`` a forward costs what the base model costs.
    """

    def __init__(self, target: Target, alphas: Tensor, gate: Callable[[str], Tensor]):
        super().__init__()
        self._target, self._gate, self._alphas = target, gate, (alphas,)
        self.enabled = True
        self._kept: tuple[object, Tensor] | None = None

    def gate(self) -> Tensor:
        """The target's gates ``(units,)``."""
        return self._gate(self._target.name)

    def forward(self, weight: Tensor) -> Tensor:
        """The gated tensor, or the tensor itself while disabled."""
        if not self.enabled:
            return weight
        factors = (weight, self._alphas[0])
        countable = not any(factor.is_inference() for factor in factors)  # those have no version
        state = (
            [factor._version for factor in factors] if countable else None,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )
        if self._kept is not None and self._kept[0] == state:
            return self._kept[1]
        product = weight * self._target.spread(self.gate()).to(weight.dtype)
        self._kept = (state, product) if countable and not product.requires_grad else None
        return product


@contextmanager
def parametrized(
    base: nn.Module, targets: Sequence[Target], alphas: Tensor, gate: Callable[[str], Tensor]
) -> Iterator[list[WeightFilter]]:
    """Inside, every target of ``base`` reads as multiplied by ``gate(name)``, whoever reads it."""
    filters: list[WeightFilter] = []
    registered: list[tuple[nn.Module, str, list[str]]] = []
    hooks = []
    try:
        for target in targets:
            weight_filter = WeightFilter(target, alphas, gate)
            filters.append(weight_filter)
            for path, name in target.owners:
                module = base.get_submodule(path)
                if is_standardised(module) and name == "weight":
                    hooks.append(module.register_forward_hook(_scale_output(target, weight_filter)))
                    continue
                registered.append((module, name, list(module._parameters)))
                parametrize.register_parametrization(module, name, weight_filter, unsafe=True)
        yield filters
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, order in reversed(registered):
            _unparametrize(module, name, order)


def _scale_output(
    target: Target, weight_filter: WeightFilter
) -> Callable[[nn.Module, object, Tensor], Tensor]:
    """A hook that gates a standardised convolution where its weight is already standardised."""
    ones = [1] * (len(target.shape) - 2)

    def hook(module: nn.Module, _: object, output: Tensor) -> Tensor:
        if not weight_filter.enabled:
            return output
        gate = weight_filter.gate().to(output.dtype).view(-1, *ones)
        bias = module.bias
        if bias is None:
            return output * gate
        shift = bias.view(-1, *ones)  # type: ignore[operator]
        return (output - shift) * gate + shift

    return hook


def _unparametrize(module: nn.Module, name: str, order: list[str]) -> None:
    """In place: put the very tensor back that ``register_parametrization`` moved aside."""
    if not parametrize.is_parametrized(module, name):
        return
    original = module.parametrizations[name].original  # type: ignore[index, union-attr]
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    module._parameters[name] = original
    for key in order:  # removal puts the tensor last: state_dict would come out in another order
        if key in module._parameters:
            module._parameters[key] = module._parameters.pop(key)
