"""Attach filters to a model, take them off, fold them in. Only this module changes a model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wfilter.gates import HARD
from wfilter.probe import Finding, Plan, example_inputs, make_plan, probe
from wfilter.targets import Selector, Target, is_standardised, select_targets

if TYPE_CHECKING:
    from wfilter.model import FilteredModel


@dataclass(frozen=True)
class Mark:
    """What apply changed on the base model, so that remove can put it back."""

    first_target: str
    trainable: tuple[str, ...]
    training: tuple[str, ...]


_MARK = "_weight_filtering"


def find_targets(
    model: nn.Module,
    targets: Selector = "auto",
    exclude: Selector = (),
    *,
    granularity: str = "out",
    example_input: Tensor | None = None,
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
    with _evaluating(model):
        findings, _, _ = _try_probe(model, chosen, example_input)
    return make_plan(chosen, findings)


def apply_weight_filtering(
    model: nn.Module,
    num_classes: int | None = None,
    *,
    targets: Selector = "auto",
    exclude: Selector = (),
    granularity: str = "out",
    init: float = 3.0,
    class_names: Sequence[str] | None = None,
    example_input: Tensor | None = None,
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
        class_names: Names that can stand for class indices.
        example_input: A batch the model takes, where wfilter cannot guess its shape.

    Example:
        >>> wf = apply_weight_filtering(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()),
        ...                             example_input=torch.zeros(1, 1, 3, 3))
        >>> wf(torch.zeros(2, 1, 3, 3), forget=torch.tensor([3, -1])).shape
        torch.Size([2, 4])
    """
    from wfilter.model import FilteredModel

    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}, not a torch.nn.Module. Build it first, for "
            "example with timm.create_model('resnet18')."
        )
    _refuse_filtered_or_compiled(model)
    chosen = select_targets(model, targets, exclude, granularity)
    with _evaluating(model):
        findings, output, mixes = _try_probe(model, chosen, example_input)
    if mixes:
        raise ValueError(
            f"{type(model).__name__} mixes the samples of a batch: the logits of one depend on the "
            "others, so a batch in which each sample forgets its own class has no defined answer. "
            "Use a model whose samples are independent in eval mode."
        )
    chosen, findings = _drop_unused(chosen, findings, targets)
    rows = _count_classes(model, output, num_classes, class_names)
    if not math.isfinite(init):
        raise ValueError(f"init={init} must be finite; for gates of exactly 1 use {HARD:.0f}.")
    mark = Mark(
        chosen[0].name,
        tuple(n for n, p in model.named_parameters() if p.requires_grad),
        tuple(n for n, m in model.named_modules() if m.training),
    )
    wf = FilteredModel(model, chosen, findings, rows, init, class_names, granularity)
    setattr(model, _MARK, mark)
    model.eval().requires_grad_(False)
    return wf


def remove_weight_filtering(filtered: nn.Module) -> nn.Module:
    """The model that was given to ``apply_weight_filtering``, as it was.

    Example:
        >>> net = nn.Linear(4, 3)
        >>> remove_weight_filtering(apply_weight_filtering(net, targets="*")) is net
        True
    """
    from wfilter.model import FilteredModel

    base = filtered.base if isinstance(filtered, FilteredModel) else filtered
    mark = getattr(base, _MARK, None)
    if not isinstance(mark, Mark):
        raise RuntimeError(
            f"this {type(base).__name__} has no filters (any more). Call apply_weight_filtering "
            "first."
        )
    if isinstance(filtered, FilteredModel):
        filtered.refuse_inside_forgetting("remove_weight_filtering")
    if any(isinstance(module, WeightFilter) for module in base.modules()):
        raise RuntimeError("remove_weight_filtering inside a forgetting block. Leave it first.")
    return unmark(base)


def unmark(base: nn.Module) -> nn.Module:
    """In place: give a base model back its training flags and gradients."""
    mark: Mark = getattr(base, _MARK)
    delattr(base, _MARK)
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(name in mark.trainable)
    for name, module in base.named_modules():
        module.training = name in mark.training
    return base


def is_marked(base: nn.Module) -> bool:
    """Whether a model has filters attached."""
    return hasattr(base, _MARK)


def plain_copy(base: nn.Module) -> nn.Module:
    """An independent copy without any trace of filtering; standardised convolutions become plain.

    Only there can a gate act on the weight itself: before standardisation it would cancel out.
    """
    model = unmark(copy.deepcopy(base))
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Conv2d) and is_standardised(module):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _plain_convolution(module))
    return model


@torch.no_grad()
def bake(base: nn.Module, targets: Sequence[Target], gates: Mapping[str, Tensor]) -> nn.Module:
    """A plain copy of ``base`` with each target multiplied by its gates ``(units,)``.

    Under a gate of 0 nothing is left of a weight.
    """
    model = plain_copy(base)
    for target in targets:
        path, name = target.owners[0]
        parameter = getattr(model.get_submodule(path), name)
        gate = target.spread(gates[target.name]).to(parameter.dtype)
        # Not just the product: -2 * 0 is -0, whose sign would still tell the weight's.
        parameter.copy_(torch.where(gate == 0, 0.0, parameter * gate))
    return model


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


def _plain_convolution(module: nn.Conv2d) -> nn.Module:
    """A plain convolution that uses a standardised convolution's effective weight."""
    weight = effective_weight(module)
    cls: type[nn.Conv2d] = nn.Conv2d
    if any(t.__name__.endswith("Same") for t in type(module).__mro__):
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


def effective_weight(module: nn.Conv2d) -> Tensor:
    """The weight a standardised convolution convolves with, read off one call of it."""
    seen: list[Tensor] = []

    class Catch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.conv2d:
                seen.append(args[1])
            return func(*args, **(kwargs or {}))

    edge = [d * (k - 1) + 1 for d, k in zip(module.dilation, module.kernel_size)]
    with torch.no_grad(), Catch():
        module(module.weight.new_zeros(1, module.in_channels, *edge))
    return seen[-1].detach()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, each module's own flag back afterwards."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True


def _try_probe(
    model: nn.Module, targets: Sequence[Target], example: Tensor | None
) -> tuple[tuple[Finding, ...], object, bool]:
    """Probe with the example given, or with the first guess the model takes."""
    if example is not None:
        return probe(model, targets, example)
    reasons = []
    for guess in example_inputs(model):
        try:
            return probe(model, targets, guess)
        except Exception as error:
            first = (str(error) or type(error).__name__).splitlines()[0]
            reasons.append(f"{tuple(guess.shape)}: {first[:120]}")
    tried = "\n  ".join(reasons[:4])
    raise ValueError(
        f"could not guess an input that {type(model).__name__} takes. Pass example_input=images "
        f"(a small batch). Tried:\n  {tried}"
    )


def _refuse_filtered_or_compiled(model: nn.Module) -> None:
    from wfilter.model import FilteredModel

    if isinstance(model, FilteredModel):
        model = model.base
    mark = next((getattr(m, _MARK) for m in model.modules() if is_marked(m)), None)
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
    if any(m._compiled_call_impl is not None for m in model.modules()):
        raise RuntimeError(
            "a part of this model is already compiled, and filters attached now would be ignored. "
            "Apply weight filtering first, then compile: wf.compile()."
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
    targets: Sequence[Target], findings: Sequence[Finding], selector: Selector
) -> tuple[tuple[Target, ...], tuple[Finding, ...]]:
    """Leave out what no forward uses when chosen by "auto"; refuse it when the user named it."""
    unused = [t.name for t, f in zip(targets, findings) if f.by == "unused"]
    kept = [(t, f) for t, f in zip(targets, findings) if f.by != "unused"]
    if unused and (selector != "auto" or not kept):
        raise ValueError(
            f"{unused[0]} is a target, but no forward uses it in eval mode"
            + (f" ({len(unused)} such targets)" if len(unused) > 1 else "")
            + f": its gates would do nothing. Add exclude={unused[:3]!r} or choose other targets."
        )
    return tuple(t for t, _ in kept), tuple(f for _, f in kept)


def _count_classes(
    model: nn.Module, output: object, given: int | None, names: Sequence[str] | None
) -> int:
    seen = output.shape[-1] if isinstance(output, Tensor) and output.ndim == 2 else None
    if given is None:
        if seen is None:
            raise ValueError(
                f"cannot read the number of classes off {type(model).__name__}'s output. Pass "
                "num_classes=..."
            )
        given = seen
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"num_classes={given!r} must be a positive int.")
    if seen is not None and seen != given:
        raise ValueError(
            f"num_classes={given}, but {type(model).__name__} gives {seen} logits.\n"
            f"Leave num_classes out, or give the model a head with {given} outputs."
        )
    if names is not None:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"class_names={names!r} must be a list of names, each a str.")
        if len(names) != given:
            raise ValueError(f"class_names has {len(names)} entries for {given} classes.")
        twice = [name for name in dict.fromkeys(names) if list(names).count(name) > 1]
        if twice:
            raise ValueError(f"class_names has {twice[0]!r} more than once; names must be unique.")
    return given


def _is_packed(module: nn.Module) -> bool:
    """Whether a module is int8; a float model still to be converted has FloatFunctionals only."""
    quantised = ".quantized" in type(module).__module__
    return quantised and isinstance(getattr(module, "weight", None), MethodType)
