"""How each kind of layer is gated: rules keyed by the torch function that consumes the parameter.

A convolution or linear map is linear in its weight, so gating the weight's output units equals
scaling the function's output: ``y = gate_w * f(x, W) + gate_b * b``, with one gate per sample if
need be. The functions are intercepted by a ``TorchFunctionMode`` that knows a filtered parameter by
identity, so it does not matter whether the model calls the module or reads its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from wfilter.core.layouts import Layout

Function = Callable[..., Any]


@dataclass(frozen=True)
class Site:
    """One target as the modes see it: its units in the joint axis, and where the samples lie."""

    index: int
    start: int
    stop: int
    layout: Layout | None = None
    standardised: bool = False
    unit_axis: int = 0
    attended: bool = False  # attention reads parts of the output as they are


class Rule(Protocol):
    """Gate one call of a torch function on behalf of a mode."""

    def __call__(self, mode: InterceptMode, function: Function, args: Any, kwargs: Any) -> Any:
        """The call's result, gated where a target takes part in it."""


@dataclass(frozen=True)
class LinearInWeight:
    """A function ``f(x, W) + b``, linear in ``W``, whose output has the units on ``unit_axis``.

    They are those on ``weight_axis`` of ``W``, and ``b`` has one entry for each; other biases are
    not covered. With ``one_axis`` (norms over the last axes, whose second argument lists them) only
    calls with a weight on a single axis are.
    """

    weight: tuple[int, str]
    bias: tuple[int, str] | None
    unit_axis: int
    weight_axis: int = 0
    one_axis: bool = False

    def __call__(self, mode: InterceptMode, function: Function, args: Any, kwargs: Any) -> Any:
        """The gated output, or the plain call when neither weight nor bias is a target."""
        place, key = self.weight  # what most calls need is written out: they meet no target
        weight = args[place] if len(args) > place else kwargs.get(key)
        bias = None
        if self.bias is not None:
            place, key = self.bias
            bias = args[place] if len(args) > place else kwargs.get(key)
        if mode.inspecting:
            mode.unknown_use(function, self._others(args, kwargs))
        if mode.derived:
            site, bias_site = mode.site(weight), mode.site(bias)
        else:
            sites = mode.sites
            site, bias_site = sites.get(id(weight)), sites.get(id(bias))
        if site is not None and site.unit_axis != self.weight_axis:
            mode.unknown_use(function, [weight])
            site = None
        if site is None and bias_site is None:
            return function(*args, **kwargs) if kwargs else function(*args)
        if (self.one_axis and len(args[1]) != 1) or (bias is not None and bias.ndim != 1):
            mode.unknown_use(function, [weight, bias])
            return function(*args, **kwargs)
        if bias is not None and self.bias is not None:
            args, kwargs = _without(args, kwargs, self.bias)
        output = function(*args, **kwargs) if kwargs else function(*args)
        axis = self.unit_axis if self.unit_axis < 0 else self.unit_axis - output.ndim
        return mode.gate(output, axis, site, bias, bias_site)

    def _others(self, args: Any, kwargs: Any) -> list[Any]:
        """All arguments but weight and bias."""
        slots = [slot for slot in (self.weight, self.bias) if slot is not None]
        places, keys = [s[0] for s in slots], [s[1] for s in slots]
        by_place = [value for i, value in enumerate(args) if i not in places]
        return by_place + [value for key, value in kwargs.items() if key not in keys]


def _without(args: Any, kwargs: Any, slot: tuple[int, str]) -> tuple[Any, Any]:
    """The same call with the argument in ``slot`` set to None."""
    if len(args) > slot[0]:
        return (*args[: slot[0]], None, *args[slot[0] + 1 :]), kwargs
    return args, {**kwargs, slot[1]: None}


def self_attention(mode: InterceptMode, function: Function, args: Any, kwargs: Any) -> Any:
    """``nn.MultiheadAttention``, written out so that its projections can be gated.

    Covers what classifiers use: self-attention without masks, dropout or extra key positions.
    Other calls run as they are; an inspection then finds the parameter used in an unknown way.
    """
    query, key, value, _, heads, weight, bias = args[:7]
    out_weight, out_bias = args[11], args[12]
    parameters = [*args[5:], *kwargs.values()]  # also those of keys and values of other widths
    tensors = [p for p in (query, *parameters) if isinstance(p, Tensor)]
    # Lists, not any() and all(): old versions of dynamo do not follow those in a function mode.
    if not [p for p in tensors if mode.site(p) is not None or _is_batched(p)]:
        return function(*args, **kwargs)
    extras = kwargs.get("attn_mask"), kwargs.get("key_padding_mask"), args[7], args[8]
    masks = [extra for extra in extras if extra is not None]
    unusual = query is not key or key is not value or query.ndim != 3 or args[9]
    dropout = kwargs.get("training", True) and args[10] > 0
    if unusual or dropout or masks or len(args) > 13:
        mode.unknown_use(function, parameters)
        return function(*args, **kwargs)
    linear = RULES[F.linear]
    length, batch, width = query.shape
    projected = linear(mode, F.linear, (query, weight, bias), {})
    split = projected.view(length, batch, 3, heads, width // heads)
    q, k, v = split.permute(2, 1, 3, 0, 4).unbind(0)  # each (batch, heads, length, head width)
    weights = None
    if kwargs.get("need_weights", True):
        weights = torch.softmax(q @ k.transpose(-2, -1) / (width // heads) ** 0.5, dim=-1)
        mixed = weights @ v
        weights = weights.mean(1) if kwargs.get("average_attn_weights", True) else weights
    else:
        mixed = attention_core(mode, F.scaled_dot_product_attention, (q, k, v), {})
    mixed = mixed.permute(2, 0, 1, 3).reshape(length, batch, width)
    return linear(mode, F.linear, (mixed, out_weight, out_bias), {}), weights


def attention_core(mode: InterceptMode, function: Function, args: Any, kwargs: Any) -> Any:
    """Attention written out where vmap has no batching rule for the CPU's fused kernel."""
    query = args[0] if args else kwargs["query"]
    if mode.inspecting:
        mode.unknown_use(function, [*args, *kwargs.values()])
        if len(args) < 4 and kwargs.get("attn_mask") is None:
            mode.attended(query)
    if not _is_batched(query) or query.device.type != "cpu":
        return function(*args, **kwargs)
    return torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]


def _is_batched(tensor: Tensor) -> bool:
    """Whether vmap has wrapped it."""
    return torch._C._functorch.is_batchedtensor(tensor)


RULES: dict[Function, Rule] = {
    F.linear: LinearInWeight((1, "weight"), (2, "bias"), -1),
    F.bilinear: LinearInWeight((2, "weight"), (3, "bias"), -1),
    torch.conv1d: LinearInWeight((1, "weight"), (2, "bias"), -2),
    torch.conv2d: LinearInWeight((1, "weight"), (2, "bias"), -3),
    torch.conv3d: LinearInWeight((1, "weight"), (2, "bias"), -4),
    torch.conv_transpose1d: LinearInWeight((1, "weight"), (2, "bias"), -2, weight_axis=1),
    torch.conv_transpose2d: LinearInWeight((1, "weight"), (2, "bias"), -3, weight_axis=1),
    torch.conv_transpose3d: LinearInWeight((1, "weight"), (2, "bias"), -4, weight_axis=1),
    F.layer_norm: LinearInWeight((2, "weight"), (3, "bias"), -1, one_axis=True),
    F.rms_norm: LinearInWeight((2, "weight"), None, -1, one_axis=True),
    F.group_norm: LinearInWeight((2, "weight"), (3, "bias"), 1),
    F.batch_norm: LinearInWeight((3, "weight"), (4, "bias"), 1),
    F.multi_head_attention_forward: self_attention,
    F.scaled_dot_product_attention: attention_core,
}


def register(
    function: Function,
    *,
    weight: tuple[int, str],
    bias: tuple[int, str] | None = None,
    unit_axis: int = -1,
) -> None:
    """Tell wfilter that a torch function is linear in one of its arguments.

    Parameters that reach the function as that argument then take the fused path. Without a rule
    they are still exact, but each sample gets weights of its own. The function's result must be a
    tensor of its own, not a view of an argument: it is scaled in place.

    Args:
        function: What the layer calls, as ``__torch_function__`` sees it (``torch.einsum``, ...).
        weight: Position and keyword of the weight among the function's arguments.
        bias: The same for a bias that is added to the output, if there is one.
        unit_axis: The output axis that holds the weight's units; negative counts from the end.

    Example:
        >>> register(torch.einsum, weight=(2, "weight"))   # einsum("bi,oi->bo", x, weight)
        >>> _ = RULES.pop(torch.einsum)
    """
    if not callable(function):
        raise TypeError(f"register takes a torch function, not {type(function).__name__}.")
    RULES[function] = LinearInWeight(weight, bias, unit_axis)


class InterceptMode(TorchFunctionMode):
    """Send calls of the functions in ``RULES`` through their rule.

    A standardised convolution turns its weight into another tensor first; ``derived`` are the
    tensors made of such weights, so that the convolution is known which takes one of them.
    """

    inspecting = False

    def __init__(self, sites: dict[int, Site], watches: bool | None = None):
        super().__init__()
        self.sites = sites
        self.derived: list[tuple[Site, torch.Size, Tensor]] = []
        if watches is None:
            watches = any(site.standardised for site in sites.values())
        self.watches = watches

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if not self.watches and rule is None:
            return self.other(func, args, kwargs)
        if not self.watches:
            return rule(self, func, args, kwargs)  # type: ignore[misc]
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if rule is not None and self._source(tensors[:1]) is None:
            return rule(self, func, args, kwargs)
        source, result = self._source(tensors), self.other(func, args, kwargs)
        if source is not None and isinstance(result, Tensor):
            self.derived.append((*source, result))
        return result

    def _source(self, tensors: Sequence[Tensor]) -> tuple[Site, torch.Size] | None:
        """The standardised target, with its shape, of which one of these tensors is made."""
        for value in tensors:
            site = self.sites.get(id(value))
            if site is not None and site.standardised:
                return site, value.shape
            for derived in self.derived:
                if derived[2] is value:
                    return derived[0], derived[1]
        return None

    def other(self, function: Function, args: Any, kwargs: Any) -> Any:
        """Any call that no rule covers."""
        return function(*args, **kwargs)

    def site(self, parameter: Tensor | None) -> Site | None:
        """The target that ``parameter`` is (or, after standardisation, comes from)."""
        if parameter is None:
            return None
        site = self.sites.get(id(parameter))
        if site is None and self.derived:
            source = self._source([parameter])
            if source is not None and source[1] == parameter.shape:
                site = source[0]
                used = [entry for entry in self.derived if entry[2] is parameter]
                self.derived = used + [entry for entry in self.derived if entry[0] is not site]
        return site

    def unknown_use(self, function: Function, parameters: Iterable[Any]) -> None:
        """A target is used in a way no rule covers; only an inspection cares."""

    def attended(self, query: Tensor) -> None:
        """Attention without a mask reads this tensor; only an inspection cares."""

    def gate(
        self,
        output: Tensor,
        axis: int,
        site: Site | None,
        bias: Tensor | None,
        bias_site: Site | None,
    ) -> Tensor:
        """The output of a bias-free call, with gates and bias applied."""
        raise NotImplementedError
