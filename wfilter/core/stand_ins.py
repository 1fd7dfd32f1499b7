"""An eager forward without a ``TorchFunctionMode``: parameters give way to stand-ins, in a copy.

torch calls a mode for every function of a forward, which costs a small network a third of its time.
A *stand-in* is an object that torch calls for the functions that get it, and for no others. They
take the place of the filtered parameters in a copy of the module tree that lives for one call: the
modules that own a target, and those above them, each with a dictionary of its own and all else
shared. Neither the base model nor another thread ever sees them.

A stand-in knows only ``RULES``. Whatever else happens to it, and any way by which code could reach
the base model's own modules past the copy, ends this path: ``GateMode`` then runs the forward.
"""

from __future__ import annotations

import gc
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any
from weakref import ProxyTypes, ReferenceType

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from wfilter.core.forgetting import Entry
from wfilter.core.modes import GateMode, Spans, spans
from wfilter.core.outputs import Inputs
from wfilter.core.rules import RULES, Function, Site

# What code may ask a parameter without using its values.
_FACTS = frozenset(
    {
        *("dtype", "device", "shape", "ndim", "layout", "requires_grad", "is_leaf", "itemsize"),
        *("size", "dim", "numel", "nelement", "stride", "element_size", "__len__", "names"),
        *("is_floating_point", "is_complex", "is_contiguous", "is_cuda", "is_cpu", "is_meta"),
        *("is_sparse", "is_quantized", "is_mkldnn", "is_nested", "is_inference", "_is_param"),
    }
)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_WEAK = (ReferenceType, *ProxyTypes)
_LOOKED_AT = 100_000  # objects, in the search for ways past the copy


class Uncovered(RuntimeError):
    """A stand-in was used in a way that no rule covers."""


class StandIn:
    """What a filtered parameter is in a copy."""

    __slots__ = ("mode", "original")

    def __init__(self, mode: GateMode, original: Tensor):
        self.mode, self.original = mode, original

    def __getattr__(self, name: str) -> Any:
        if name not in _FACTS:
            raise Uncovered(f"{name} of a filtered parameter is read.")
        return getattr(self.original, name)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The function's result, gated by its rule for every stand-in among the arguments."""
        found = 0
        values = [*args, *kwargs.values()] if kwargs else list(args)
        for place, value in enumerate(values):
            if type(value) is cls:
                found, mode = found + 1, value.mode
                values[place] = value.original
        rule = RULES.get(func)
        if rule is None or not found:
            raise Uncovered(f"{func} takes a filtered parameter.")
        expected, count = mode.notes + found, len(args)
        output = rule(
            mode, func, values[:count], dict(zip(kwargs, values[count:])) if kwargs else {}
        )
        if mode.notes != expected:
            raise Uncovered(f"{func} takes a filtered parameter in a place of its own.")
        return output


@dataclass
class CopyPlan:
    """Which modules a call copies, children before parents; the last is the base model.

    Attributes:
        modules: The modules.
        children: For each, the names of the children that are copied, and their numbers.
        parameters: For each, the names of the parameters that are filtered, and their sites.
        spans: Those of all sites.
        is_safe: Whether no forward so far was wrong or set anything on the copies.
        is_tried: Whether a forward was watched for that.
    """

    modules: tuple[nn.Module, ...]
    children: tuple[tuple[tuple[str, int], ...], ...]
    parameters: tuple[tuple[tuple[str, Site], ...], ...]
    spans: Spans
    is_safe: bool = True
    is_tried: bool = False

    def copies(self, mode: GateMode) -> list[nn.Module] | None:
        """Copies of the modules as they are now, whose stand-ins the mode then knows.

        ``None`` where the modules are not as when planned.
        """
        copies: list[nn.Module] = []
        for module, children, names in zip(self.modules, self.children, self.parameters):
            state = vars(module).copy()
            if (
                state["_forward_hooks"]  # hooks are given the module they were put on
                or state["_forward_pre_hooks"]
                or state["_backward_hooks"]
                or state["_backward_pre_hooks"]
                or "_compiled_call_impl" in state
            ):
                return None
            if "forward" in state:
                state = {key: value for key, value in state.items() if type(value) is not Entry}
            below = state["_modules"] = state["_modules"].copy()
            for name, number in children:
                if below.get(name) is not self.modules[number]:
                    return None
                below[name] = copies[number]
            if names:
                own = state["_parameters"] = state["_parameters"].copy()
                for name, site in names:
                    parameter = own.get(name)
                    if parameter is None:
                        return None
                    mode.sites[id(parameter)] = site
                    own[name] = StandIn(mode, parameter)
            copy = object.__new__(type(module))
            object.__setattr__(copy, "__dict__", state)
            copies.append(copy)
        return copies

    def is_left_alone(self, copies: Sequence[nn.Module]) -> bool:
        """Whether a forward has set nothing on the copies, which the base model would then lack."""
        own = ("_modules", "_parameters")
        for module, copy in zip(self.modules, copies):
            before = {k: v for k, v in vars(module).items() if type(v) is not Entry}
            after = vars(copy)
            if before.keys() != after.keys():
                return False
            if any(before[name] is not after[name] for name in before if name not in own):
                return False
        return True


def plan_copies(base: nn.Module, sites: Mapping[int, Site], units: int) -> CopyPlan | None:
    """What to copy for stand-ins; ``None`` where they are not safe.

    Args:
        base: The base model.
        sites: Identity of each filtered parameter -> its site.
        units: Of all targets.
    """
    numbers: dict[int, int | None] = {}
    found: list[tuple[nn.Module, Any, Any]] = []

    def visit(module: nn.Module) -> int | None:
        if id(module) not in numbers:
            numbers[id(module)] = None
            below = [(name, visit(m)) for name, m in module._modules.items() if m is not None]
            children = tuple((name, number) for name, number in below if number is not None)
            own = module._parameters.items()
            names = tuple((name, sites[id(p)]) for name, p in own if id(p) in sites)
            if children or names:
                numbers[id(module)] = len(found)
                found.append((module, children, names))
        return numbers[id(module)]

    if visit(base) is None or not all(_is_ordinary(module) for module, _, _ in found):
        return None
    covered = {site.index for _, _, names in found for _, site in names}
    if covered != {site.index for site in sites.values() if not site.standardised}:
        return None
    modules, children, names = zip(*found)
    if _is_held_elsewhere(base, {id(module) for module in modules}, sites):
        return None
    return CopyPlan(modules, children, names, spans(sites.values(), units))


def _is_ordinary(module: nn.Module) -> bool:
    """Whether all there is to a module is its dictionary, read and called as torch does."""
    kind = type(module)
    methods = ("__call__", "__getattr__", "__getattribute__", "__setattr__", "__delattr__")
    own = any(getattr(kind, name) is not getattr(nn.Module, name) for name in methods)
    slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return not own and not slots and kind.__new__ is object.__new__


def _is_held_elsewhere(base: nn.Module, copied: set[int], tensors: Container[int]) -> bool:
    """Whether the model knows one of them by another way than as child or parameter.

    Such as a list of layers, a bound method, or what a function of its own encloses.
    """
    known, seen = {id(module) for module in base.modules()}, set[int]()
    stack = [v for m in base.modules() for k, v in vars(m).items() if k not in _OF_EVERY_MODULE]
    while stack:
        value = stack.pop()
        kind = type(value)
        if id(value) in copied or id(value) in tensors or kind in _WEAK or len(seen) > _LOOKED_AT:
            return True
        passed_over = (type, ModuleType, Tensor, Entry)
        if id(value) in seen or id(value) in known or issubclass(kind, passed_over):
            continue
        seen.add(id(value))
        if kind is FunctionType:  # not its globals, through which all of Python can be reached
            stack += [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
        else:
            stack += gc.get_referents(value)
    return False


def run_copied(plan: CopyPlan, mode: GateMode, inputs: Inputs) -> tuple[Any] | None:
    """The output of a forward on copies, with every target gated; ``None`` where it has no way.

    The mode is not entered: it gates what the stand-ins hand it, and comes without sites.

    Errors are the caller's to judge: they may be those of the model or of the stand-ins.
    """
    if not plan.is_safe or torch._C._len_torch_function_stack() or _has_any_global_hook():  # type: ignore[no-untyped-call]
        return None
    copies = plan.copies(mode)
    if copies is None:
        return None
    output = inputs.run(copies[-1])
    if not plan.is_tried:
        plan.is_safe, plan.is_tried = plan.is_left_alone(copies), True
    return None if mode.idle() else (output,)
