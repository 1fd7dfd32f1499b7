"""Find channels that are one number for every image, by running a model on nothing but NaN.

NaN stands for "depends on the image" and spreads by itself; an exact zero stops it here, since a
zero times any finite number is zero. What still is a number at the end is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

CONVOLVE = (torch.conv1d, torch.conv2d, torch.conv3d)
_TIMES = ("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__")
_MATMUL = ("matmul", "__matmul__", "bmm")
_ATTEND = F.scaled_dot_product_attention


@dataclass(frozen=True)
class WeightUse:
    """One call of a weight: what it was given, NaN where that depends on the image.

    ``seen`` is one sample's input, ``(1, channels, ...)`` or ``(..., features)``; ``again`` applies
    the same call to another input and weight, without bias.
    """

    seen: Tensor
    again: Callable[[Tensor, Tensor], Tensor]
    axis: int
    padded: bool

    def channels(self) -> Tensor:
        """The input as ``(channels, positions)``."""
        return self.seen.movedim(self.axis, 0).flatten(1)


class ConstantMode(TorchFunctionMode):
    """Let exact zeros stop NaN, and keep the input of each weight's calls in ``uses``.

    Args:
        weights: Identity of a weight -> its name.
    """

    def __init__(self, weights: Mapping[int, str]):
        super().__init__()
        self.weights = weights
        self.uses: dict[str, list[WeightUse]] = {name: [] for name in weights.values()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls where a zero may meet NaN, done with care; all others as they are."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in CONVOLVE or func is F.linear:
            return self._weighted(func, *weight_call(args, kwargs))
        if name in _TIMES and len(args) == 2:
            return _times(func, name, *args)
        if name in _MATMUL and len(args) == 2:
            return known_product(torch.matmul, *args)
        if func is _ATTEND:
            return _attend(func, args, kwargs)
        return func(*args, **kwargs)

    def _weighted(
        self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rest: dict[str, Any]
    ) -> Tensor:
        name = self.weights.get(id(weight))
        axis = -1 if func is F.linear else -(weight.ndim - 1)
        if name is not None:
            padded = func is not F.linear and _pads(rest, weight)
            again = _without_bias(func, rest)
            self.uses[name].append(WeightUse(x[:1].clone(), again, axis, padded))
        output = known_product(lambda a, b: func(a, b, None, **rest), x, weight)
        if bias is not None:
            output += bias if func is F.linear else bias.view(-1, *[1] * (weight.ndim - 2))
        return output


def known_product(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """A product that sums over pairs: NaN only where NaN meets something other than zero."""
    unknown_a, unknown_b = a.isnan(), b.isnan()
    values = product(torch.where(unknown_a, 0.0, a), torch.where(unknown_b, 0.0, b))
    touched = product(unknown_a.to(a.dtype), (b != 0).to(b.dtype))  # NaN != 0 holds
    if bool(unknown_b.any()):
        touched = touched + product((a != 0).to(a.dtype), unknown_b.to(b.dtype))
    return values.masked_fill(touched > 0.5, torch.nan)


def _times(func: Any, name: str, a: Any, b: Any) -> Any:
    zero = (a == 0) | (b == 0)
    result = func(a, b)
    if not isinstance(zero, Tensor) or not result.is_floating_point():
        return result
    if name in ("mul_", "__imul__"):
        return result.masked_fill_(zero, 0.0)
    return torch.where(zero, torch.zeros_like(result), result)


def _attend(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Attention weights sum to 1: a value that is one number for all tokens comes out as it is."""
    output: Tensor = func(*args, **kwargs)
    value: Tensor = args[2] if len(args) > 2 else kwargs["value"]
    first = value[..., :1, :]
    same = (value == first).all(-2, keepdim=True)
    if value.shape[:-2] != output.shape[:-2]:  # fewer value heads than query heads
        return output
    return torch.where(same, first, output)


def weight_call(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """The input, weight, bias and remaining settings of a convolution or linear call."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    named = {**dict(zip(names, args)), **kwargs}
    return named.pop("input"), named.pop("weight"), named.pop("bias", None), named


def _pads(rest: dict[str, Any], weight: Tensor) -> bool:
    padding = rest.get("padding", 0)
    if isinstance(padding, str):
        return padding == "same" and max(weight.shape[2:]) > 1
    return any(padding) if isinstance(padding, (tuple, list)) else bool(padding)


def _without_bias(func: Any, rest: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def again(x: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = func(x, weight, None, **rest)
        return output

    return again
