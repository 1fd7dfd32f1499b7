"""How each kind of layer is gated: rules keyed by the torch function that consumes the parameter.

A convolution or linear map is linear in its weight, so gating the weight's output units equals
scaling the function's output: ``y = gate_w * f(x, W) + gate_b * b``, with one gate per sample if
need be. The functions are intercepted by a ``TorchFunctionMode`` that knows a filtered parameter by
identity, so it does not matter whether the model calls the module or reads its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]


@dataclass(frozen=True)
class Layout:
    """Where the samples lie in a function's output.

    ``axis`` has one entry per sample (``"plain"``), or all entries of sample 0, then of sample 1
    (``"major"``: Swin's windows), or sample 0, 1, 2, ... over and over (``"minor"``).
    """

    axis: int
    order: str
    times: int = 1  # entries of one sample

    def __str__(self) -> str:
        fold = {"plain": "", "major": ", folded batch-major", "minor": ", folded batch-minor"}
        return f"batch on axis {self.axis}{fold[self.order]}"


@dataclass(frozen=True)
class Site:
    """One target as the modes see it: its units in the joint axis, and where the samples lie."""

    index: int
    start: int
    stop: int
    layout: Layout | None = None
    standardised: bool = False
    unit_axis: int = 0


class Rule(Protocol):
    """Gate one call of a torch function on behalf of a mode."""

    def __call__(self, mode: InterceptMode, function: Function, args: Any, kwargs: Any) -> Any:
        """The call's result, gated where a target takes part in it."""


@dataclass(frozen=True)
class LinearInWeight:
    """A function ``f(x, W) + b``, linear in ``W``, whose output has the units on ``unit_axis``.

    They are those on ``weight_axis`` of ``W``.
    """

    weight: tuple[int, str]
    bias: tuple[int, str] | None
    unit_axis: int
    weight_axis: int = 0

    def __call__(self, mode: InterceptMode, function: Function, args: Any, kwargs: Any) -> Any:
        """The gated output, or the plain call when neither weight nor bias is a target."""
        weight = _argument(args, kwargs, self.weight)
        bias = None if self.bias is None else _argument(args, kwargs, self.bias)
        if mode.probing:
            mode.unknown_use(function, self._others(args, kwargs))
        site, bias_site = mode.site(weight), mode.site(bias)
        if site is not None and site.unit_axis != self.weight_axis:
            mode.unknown_use(function, [weight])
            site = None
        if site is None and bias_site is None:
            return function(*args, **kwargs)
        if bias is not None and self.bias is not None:
            args, kwargs = _without(args, kwargs, self.bias)
        output = function(*args, **kwargs)
        axis = self.unit_axis - output.ndim if self.unit_axis >= 0 else self.unit_axis
        return mode.gate(output, axis, site, bias, bias_site)

    def _others(self, args: Any, kwargs: Any) -> list[Any]:
        """All arguments but weight and bias."""
        slots = [slot for slot in (self.weight, self.bias) if slot is not None]
        places, keys = [s[0] for s in slots], [s[1] for s in slots]
        by_place = [value for i, value in enumerate(args) if i not in places]
        return by_place + [value for key, value in kwargs.items() if key not in keys]


def self_attention(mode: InterceptMode, function: Function, args: Any, kwargs: Any) -> Any:
    """``nn.MultiheadAttention``, written out so that its projections can be gated.

    Covers what classifiers use: self-attention without masks, dropout or extra key positions.
    Other calls run as they are; the probe then finds the parameter used in an unknown way.
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
    mode.unknown_use(function, [*args, *kwargs.values()])
    if query.device.type != "cpu" or not _is_batched(query):
        return function(*args, **kwargs)
    return torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]


def _is_batched(tensor: Tensor) -> bool:
    """Whether vmap has a hand on it."""
    return torch._C._functorch.is_batchedtensor(tensor)


def norm_over_last_axes(mode: InterceptMode, function: Function, args: Any, kwargs: Any) -> Any:
    """Layer and RMS norm: linear in a weight on one axis; on several there is no rule."""
    if len(args[1]) == 1:
        bias = (3, "bias") if function is F.layer_norm else None
        return LinearInWeight((2, "weight"), bias, -1)(mode, function, args, kwargs)
    mode.unknown_use(function, [*args, *kwargs.values()])
    return function(*args, **kwargs)


RULES: dict[Function, Rule] = {
    F.linear: LinearInWeight((1, "weight"), (2, "bias"), -1),
    F.bilinear: LinearInWeight((2, "weight"), (3, "bias"), -1),
    torch.conv1d: LinearInWeight((1, "weight"), (2, "bias"), -2),
    torch.conv2d: LinearInWeight((1, "weight"), (2, "bias"), -3),
    torch.conv3d: LinearInWeight((1, "weight"), (2, "bias"), -4),
    torch.conv_transpose1d: LinearInWeight((1, "weight"), (2, "bias"), -2, weight_axis=1),
    torch.conv_transpose2d: LinearInWeight((1, "weight"), (2, "bias"), -3, weight_axis=1),
    torch.conv_transpose3d: LinearInWeight((1, "weight"), (2, "bias"), -4, weight_axis=1),
    F.layer_norm: norm_over_last_axes,
    F.rms_norm: norm_over_last_axes,
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

    A standardised convolution turns its weight into another tensor first; ``pending`` carries the
    target from that moment to the convolution that follows.
    """

    probing = False

    def __init__(self, sites: dict[int, Site]):
        super().__init__()
        self.sites = sites
        self.pending: tuple[Site, torch.Size] | None = None
        self.watches = any(site.standardised for site in sites.values())

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is not None and not (self.watches and func is F.batch_norm):
            return rule(self, func, args, kwargs)
        if self.watches and args and isinstance(args[0], Tensor):
            site = self.sites.get(id(args[0]))
            if site is not None and site.standardised:
                self.pending = site, args[0].shape
        return self.other(func, args, kwargs)

    def other(self, function: Function, args: Any, kwargs: Any) -> Any:
        """Any call that no rule covers."""
        return function(*args, **kwargs)

    def site(self, parameter: Tensor | None) -> Site | None:
        """The target that ``parameter`` is (or, after standardisation, comes from)."""
        if parameter is None:
            return None
        site = self.sites.get(id(parameter))
        if site is None and self.pending is not None and parameter.shape == self.pending[1]:
            site, self.pending = self.pending[0], None
        return site

    def unknown_use(self, function: Function, parameters: Iterable[Any]) -> None:
        """A target is used in a way no rule covers; only the probe cares."""

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


class GateMode(InterceptMode):
    """Scale outputs by gates ``(batch, total_units)``, or ``(total_units,)``: one row for all.

    ``weights`` are targets that no rule covers, as index and gated tensor, by the identity of the
    original: every function gets them in its place. The model itself is not touched, so threads can
    share it.
    """

    def __init__(
        self,
        sites: dict[int, Site],
        gates: Tensor,
        weights: dict[int, tuple[int, Tensor]] | None = None,
        replicas: int = 1,
    ):
        super().__init__(sites)
        self.gates = gates
        self.weights = weights or {}
        self.replicas = replicas
        self.acted: set[int] = set()

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.weights:
            args = tuple(self._gated(value) for value in args)
            kwargs = {key: self._gated(value) for key, value in (kwargs or {}).items()}
        return super().__torch_function__(func, types, args, kwargs)

    def _gated(self, value: Any) -> Any:
        """An argument, or what stands in for it when it is an original."""
        if isinstance(value, (list, tuple)):
            items = [self._gated(item) for item in value]
            unchanged = all(new is old for new, old in zip(items, value))
            return value if unchanged else tuple(items) if isinstance(value, tuple) else items
        if not isinstance(value, Tensor) or id(value) not in self.weights:
            return value
        index, weight = self.weights[id(value)]
        self._note(index)
        return weight

    def _note(self, index: int) -> None:
        """Remember that a target was gated; refuse where its gradient would get lost."""
        if not torch.compiler.is_dynamo_compiling():
            self.acted.add(index)
        if self.gates.requires_grad and not torch.is_grad_enabled():
            raise RuntimeError(
                "a filtered layer runs without gradients inside a forward that needs them, as "
                "gradient checkpointing with use_reentrant=True does: its alphas would get none. "
                "Turn that off, or call the model under torch.no_grad()."
            )

    def idle(self) -> list[int]:
        """Indices of the targets that nothing has used so far."""
        known = [site.index for site in self.sites.values()]
        known += [index for index, _ in self.weights.values()]
        return [index for index in known if index not in self.acted]

    def gate(
        self,
        output: Tensor,
        axis: int,
        site: Site | None,
        bias: Tensor | None,
        bias_site: Site | None,
    ) -> Tensor:
        """``gate_w * output + gate_b * bias``, each sample with its own gates."""
        for found in (site, bias_site):
            if found is not None:
                self._note(found.index)
        layout = None
        if self.gates.ndim == 2:
            layout = (site or bias_site).layout  # type: ignore[union-attr]
            output = self._samples(output, layout)  # type: ignore[arg-type]
        position = None if layout is None else layout.axis + (layout.order == "minor")
        shift = None
        if bias is not None:
            if bias_site is not None:
                bias = self._of(bias_site, output.dtype) * bias.to(output.dtype)
            shift = _place(bias.to(output.dtype), output, axis, position)
        scale = None
        if site is not None:
            scale = _place(self._of(site, output.dtype), output, axis, position)
        output = _multiply_add(output, scale, shift)
        if layout is not None and layout.order != "plain":
            return output.flatten(layout.axis, layout.axis + 1)
        return output

    def _samples(self, output: Tensor, layout: Layout) -> Tensor:
        """The output with an axis of one entry per row of the gates.

        Replicas of a sample are one until here, the first layer that treats them differently.
        """
        batch = self.gates.shape[0]
        if self.replicas > 1 and output.shape[layout.axis] * self.replicas == batch:
            if layout.order != "plain":
                raise RuntimeError("replicas cannot be told apart where the batch axis is folded.")
            output = output.repeat_interleave(self.replicas, layout.axis)
        return _unfold(output, layout, batch)

    def _of(self, site: Site, dtype: torch.dtype) -> Tensor:
        return self.gates[..., site.start : site.stop].to(dtype)


@dataclass
class Use:
    """What the probe saw of one target."""

    functions: list[str] = field(default_factory=list)
    layouts: set[Layout | None] = field(default_factory=set)
    shapes: set[tuple[torch.Size, int]] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)


class ProbeMode(InterceptMode):
    """Run the model unchanged and note how each target is used, and where its samples lie.

    The batch has ``batch`` samples of which number 1 is NaN, so the entries of an output that
    depend on that sample are those that are NaN.
    """

    probing = True

    def __init__(self, sites: dict[int, Site], batch: int):
        super().__init__(sites)
        self.batch = batch
        self.uses: dict[int, Use] = {site.index: Use() for site in sites.values()}
        self._function = ""

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._function = getattr(func, "__name__", str(func))
        return super().__torch_function__(func, types, args, kwargs)

    def other(self, function: Function, args: Any, kwargs: Any) -> Any:
        """Note targets that reach a function without a rule and come out as another tensor."""
        result = function(*args, **kwargs)
        if isinstance(result, torch.Size):  # reading a shape is no use
            return result
        written = function is Tensor.__setitem__
        derived = isinstance(result, (Tensor, tuple, list, float)) and id(result) not in self.sites
        if written or derived:
            values = [*args, *kwargs.values()]
            nested = [v for value in values if isinstance(value, (tuple, list)) for v in value]
            self.unknown_use(function, [*values, *nested])
        return result

    def unknown_use(self, function: Function, parameters: Iterable[Any]) -> None:
        """Note a use without a rule, unless it is the standardisation of a weight."""
        for parameter in parameters:
            site = self.sites.get(id(parameter)) if isinstance(parameter, Tensor) else None
            if site is not None and not site.standardised:
                name = getattr(function, "__name__", str(function))
                self.uses[site.index].unknown.append(name)

    def gate(
        self,
        output: Tensor,
        axis: int,
        site: Site | None,
        bias: Tensor | None,
        bias_site: Site | None,
    ) -> Tensor:
        """Note the layout; the result is that of the plain call."""
        layout = find_layout(output, axis, self.batch)
        for found in (site, bias_site):
            if found is not None:
                self.uses[found.index].functions.append(self._function)
                self.uses[found.index].layouts.add(layout)
                self.uses[found.index].shapes.add((output.shape, axis))
        return output if bias is None else output + _place(bias, output, axis, None)


class MarkMode(InterceptMode):
    """Run the model with sample 1 of one target's output turned to NaN, as a layout places it."""

    def __init__(self, sites: dict[int, Site], index: int, layout: Layout, batch: int):
        super().__init__(sites)
        self.index, self.layout, self.batch = index, layout, batch

    def gate(
        self,
        output: Tensor,
        axis: int,
        site: Site | None,
        bias: Tensor | None,
        bias_site: Site | None,
    ) -> Tensor:
        """The plain call's result, marked if the target takes part in it."""
        if bias is not None:
            output = output + _place(bias, output, axis, None)
        if self.index not in [found.index for found in (site, bias_site) if found is not None]:
            return output
        samples = _unfold(output.clone(), self.layout, self.batch)
        samples.select(self.layout.axis + (self.layout.order == "minor"), 1).fill_(float("nan"))
        return samples.reshape(output.shape)


def possible_layouts(shape: torch.Size, axis: int, batch: int) -> list[Layout]:
    """Every way in which an output of this shape could hold the samples before its unit axis."""
    sizes = [(a, shape[a]) for a in range(len(shape) + axis) if shape[a] % batch == 0]
    plain = [Layout(a, "plain") for a, size in sizes if size == batch]
    folded = [(a, size // batch) for a, size in sizes if size != batch]
    return plain + [Layout(a, order, n) for a, n in folded for order in ("major", "minor")]


def find_layout(output: Tensor, axis: int, batch: int) -> Layout | None:
    """Where sample 1 of ``batch`` lies in an output in which just that sample is NaN.

    ``None`` when no sample axis before the unit axis explains the NaNs: the output does not depend
    on the input, or mixes samples.
    """
    marked = torch.isnan(output)
    for candidate in range(output.ndim + axis):
        size = output.shape[candidate]
        if size % batch:
            continue
        others = [a for a in range(output.ndim) if a != candidate]
        touched = marked.sum(dim=others) > 0 if others else marked
        place = torch.arange(size, device=output.device)
        if size == batch and torch.equal(touched, place == 1):
            return Layout(candidate, "plain")
        times = size // batch
        if times and torch.equal(touched, place // times == 1):
            return Layout(candidate, "major", times)
        if times and torch.equal(touched, place % batch == 1):
            return Layout(candidate, "minor", times)
    return None


def _unfold(output: Tensor, layout: Layout, batch: int) -> Tensor:
    """Give the samples an axis of their own."""
    if output.shape[layout.axis] != batch * layout.times:
        raise RuntimeError(
            f"a filtered layer gave {output.shape[layout.axis]} entries for {batch} samples, "
            f"where the probe saw {layout.times} for each. Call wf.probe(images) with images of "
            "this size; a model that splits its batch needs smaller batches."
        )
    if layout.order == "plain":
        return output
    shape = (batch, -1) if layout.order == "major" else (-1, batch)
    return torch.unflatten(output, layout.axis, shape)


def _multiply_add(output: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """``scale * output + shift``, in place where no gradient or transform needs the old output.

    It is fresh from its function, so nobody else holds it; a second buffer of its size would cost
    a CPU as much time as a small layer itself.
    """
    factors = [t for t in (output, scale, shift) if t is not None]
    if torch.compiler.is_compiling() or any(map(_is_tracked, factors)):
        if scale is None:
            return output if shift is None else output + shift
        return output * scale if shift is None else torch.addcmul(shift, output, scale)
    if scale is None:
        return output if shift is None else output.add_(shift)
    return output.mul_(scale) if shift is None else torch.addcmul(shift, output, scale, out=output)


def _is_tracked(tensor: Tensor) -> bool:
    """Whether autograd, forward-mode differentiation or torch.func has a hand on it."""
    tracked = tensor.requires_grad and torch.is_grad_enabled()
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return tracked or forward_mode or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _place(values: Tensor, output: Tensor, axis: int, position: int | None) -> Tensor:
    """Values ``(units,)`` or ``(batch, units)`` shaped to meet ``output`` at its unit axis."""
    units = output.shape[axis]
    if values.shape[-1] != units:  # a grouped transposed convolution shares units between groups
        values = values.repeat(*[1] * (values.ndim - 1), units // values.shape[-1])
    shape = [1] * output.ndim
    shape[axis] = units
    if values.ndim == 2 and position is not None:
        shape[position] = values.shape[0]
    return values.reshape(shape)


def _argument(args: Any, kwargs: Any, slot: tuple[int, str]) -> Any:
    return args[slot[0]] if len(args) > slot[0] else kwargs.get(slot[1])


def _without(args: Any, kwargs: Any, slot: tuple[int, str]) -> tuple[Any, Any]:
    """The same call with the argument in ``slot`` set to None."""
    if len(args) > slot[0]:
        return (*args[: slot[0]], None, *args[slot[0] + 1 :]), kwargs
    return args, {**kwargs, slot[1]: None}
