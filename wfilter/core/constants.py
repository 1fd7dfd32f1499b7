"""Find channels that are one number for every image, by running a model on nothing but NaN.

NaN stands for "depends on the image" and spreads by itself; an exact zero stops it here, since a
zero times any finite number is zero. What still is a number at the end is a constant. Where NaN
would get lost, as in a comparison, `UnknownMode` takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CONVOLVE = (torch.conv1d, torch.conv2d, torch.conv3d)
_TIMES = ("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__")
_MATMUL = ("matmul", "__matmul__", "bmm")
_ATTEND = F.scaled_dot_product_attention
# fmt: off
_LOSE_NAN = {
    "sign", "sign_", "sgn", "sgn_", "heaviside", "nan_to_num", "nan_to_num_", "fmax", "fmin",
    "nansum", "nanmedian", "copysign", "histc", "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_channel_affine_cachemask",
}
# fmt: on
_TO_NUMBERS = ("_local_scalar_dense", "equal")
_LEAVE_TORCH = ("numpy", "tolist", "__array__")
_FRESH = ("new_", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like")


class Unfollowable(ValueError):
    """What a model does depends on the image in a way that NaN cannot show."""


class UnknownMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep NaN from getting lost in comparisons, rounding and indices.

    A tensor of booleans or whole numbers that was made from NaN is ``unknown``; all that is
    computed with it is unknown again, or NaN. Where Python asks for its value, to choose a branch,
    that is an error. This works one level below function modes, so it also sees scripted code.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown: dict[int, Tensor] = {}  # by identity; kept, so that none is used anew
        self.watching = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For code that tells known from unknown values by itself."""
        self.watching, before = False, self.watching
        try:
            yield
        finally:
            self.watching = before

    def depends(self, values: Any) -> bool:
        """Whether any tensor in here was computed with an unknown one."""
        return any(id(leaf) in self.unknown for leaf in tree_leaves(values))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """One operation, and what of its result is unknown."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        unknown = self.watching and self.depends((args, kwargs))
        lost = name in (*_LOSE_NAN, *_TO_NUMBERS) and self.watching and _some_nan((args, kwargs))
        if name in _TO_NUMBERS and (unknown or lost):
            raise Unfollowable("its code looks at values that depend on the image")
        result = func(*args, **kwargs)
        if not self.watching or name.startswith(_FRESH):
            return result
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            if leaf.is_floating_point() or leaf.is_complex():
                if unknown or lost:
                    leaf.fill_(torch.nan)
            elif unknown or _some_nan((args, kwargs)):
                self.unknown[id(leaf)] = leaf
        return result


def _some_nan(values: Any) -> bool:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return any(
        bool(leaf.isnan().any()) for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()
    )


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
        self.unknown = UnknownMode()
        self.uses: dict[str, list[WeightUse]] = {name: [] for name in weights.values()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls where a zero may meet NaN, done with care; all others as they are."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        unknown = self.unknown.depends((args, kwargs))
        with self.unknown.paused():
            if name in _LEAVE_TORCH and (unknown or _some_nan(args)):
                raise Unfollowable(f"its code reads values of the image's features by {name}")
            if not unknown and (func in CONVOLVE or func is F.linear):
                return self._weighted(func, *weight_call(args, kwargs))
            if not unknown and name in _TIMES and len(args) == 2:
                return _times(func, name, *args)
            if not unknown and name in _MATMUL and len(args) == 2:
                return known_product(torch.matmul, *args)
            if not unknown and func is _ATTEND:
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
