"""Remember all that a forward may leave behind in a model (buffers, attributes) and put it back.

Buffers written or reassigned, plain attributes, caches in dicts and lists, random states, flags.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Not looked into: plain values; code; and modules, which are all visited on their own.
_PLAIN = frozenset((int, float, bool, str, bytes, type(None), torch.dtype, torch.device))
_OPAQUE = (nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_DICTS = frozenset((dict, OrderedDict))
_DEPTH = 4  # levels of containers and objects that are looked into


class Snapshot:
    """A model's state at one moment; ``restore`` brings it back and says what had changed.

    A model has thousands of dicts, nearly all empty, so the look at each is kept cheap.
    """

    def __init__(self, model: nn.Module):
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._empty: list[dict[Any, Any]] = []
        self._undo: list[Callable[[], bool]] = []
        self._seen = {id(parameter) for parameter in model.parameters()}  # a forward writes to none
        for module in model.modules():
            self._keep(vars(module), 0)
        self._random = _random_states(model)

    def restore(self) -> bool:
        """In place: as it was; whether anything but random states had changed."""
        for put_back in self._random:
            put_back()
        changes = [undo() for undo in self._undo]
        filled = [now for now in self._empty if now]
        for now in filled:
            now.clear()
        changed = [pair for pair in self._dicts if (pair[0] or pair[1]) and not _same(*pair)]
        for now, before in changed:
            for key in [key for key in now if key not in before]:
                del now[key]
            now.update(before)
        return any(changes) or bool(changed) or bool(filled)

    def holds_wrapped(self) -> bool:
        """Whether a forward left a tensor of ``vmap`` behind, which nothing outside can read."""
        changed = [now for now, before in self._dicts if not _same(now, before)] + self._empty
        values = [value for now in changed for value in now.values() if isinstance(value, Tensor)]
        return any(map(torch._C._functorch.is_functorch_wrapped_tensor, values))

    def _keep(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or isinstance(value, _OPAQUE):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._undo.append(_undo_tensor(value))
        elif isinstance(value, dict):
            self._dicts.append((value, dict(value)))
            self._inside(value.values(), depth)
        elif isinstance(value, list):
            self._undo.append(_undo_list(value))
            self._inside(value, depth)
        elif isinstance(value, set):
            self._undo.append(_undo_set(value))
        elif isinstance(value, tuple):
            self._inside(value, depth)
        elif hasattr(value, "__dict__"):
            self._keep(vars(value), depth + 1)

    def _inside(self, values: Any, depth: int) -> None:
        if depth == _DEPTH:
            return
        for value in values:
            kind = type(value)
            if kind in _DICTS and not value:
                self._empty.append(value)
            elif kind not in _PLAIN:
                self._keep(value, depth + 1)


def _same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    same_keys = now.keys() == before.keys()
    return same_keys and all(map(is_, map(now.get, before), before.values()))


@contextmanager
def kept(model: nn.Module) -> Iterator[Snapshot]:
    """Whatever happens inside, the model is afterwards as it was.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with kept(norm):
        ...     _ = norm(torch.randn(4, 2))
        >>> norm.running_mean
        tensor([0., 0.])
    """
    state = Snapshot(model)
    try:
        yield state
    finally:
        state.restore()


def _undo_tensor(tensor: Tensor) -> Callable[[], bool]:
    before = tensor.detach().clone()

    def undo() -> bool:
        now = tensor.detach()
        same = now.shape == before.shape and _equal(now, before)
        if not same:  # torch.func allows no write, even of the same values
            tensor.data = before.clone() if now.shape != before.shape else tensor.data.copy_(before)
        return not same

    return undo


def _equal(now: Tensor, before: Tensor) -> bool:
    """Entry by entry, where NaN is equal to itself."""
    if torch.equal(now, before) or not now.is_floating_point():
        return torch.equal(now, before)
    gaps = now.isnan()
    return torch.equal(gaps, before.isnan()) and torch.equal(now[~gaps], before[~gaps])


def _undo_list(values: list[Any]) -> Callable[[], bool]:
    before = list(values)

    def undo() -> bool:
        same = len(values) == len(before) and all(map(is_, values, before))
        if not same:
            values[:] = before
        return not same

    return undo


def _undo_set(values: set[Any]) -> Callable[[], bool]:
    before = set(values)

    def undo() -> bool:
        same = values == before
        if not same:
            values.clear()
            values.update(before)
        return not same

    return undo


def _random_states(model: nn.Module) -> list[Callable[[], Any]]:
    """Put back the generators of torch (the CPU's and the model's device's), Python and NumPy."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()
    undo: list[Callable[[], Any]] = [
        lambda: torch.set_rng_state(torch_state),
        lambda: random.setstate(python_state),
        lambda: np.random.set_state(numpy_state),
    ]
    first = next(model.parameters(), None)
    if first is not None and first.is_cuda:
        device, state = first.device, torch.cuda.get_rng_state(first.device)
        undo.append(lambda: torch.cuda.set_rng_state(state, device))
    return undo


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Eval mode inside, each module's own mode again afterwards; other callables are left alone.

    Example:
        >>> layer = nn.Dropout().train()
        >>> with evaluating(layer):
        ...     layer.training
        False
        >>> layer.training
        True
    """
    modes = {m: m.training for m in model.modules()} if isinstance(model, nn.Module) else {}
    try:
        if isinstance(model, nn.Module):
            model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
