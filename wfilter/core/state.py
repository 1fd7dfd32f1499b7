"""Everything a forward may leave behind in a model, put back: what a proof touches stays untouched.

Buffers written or reassigned, plain attributes, caches in dicts and lists, random states, flags.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Not looked into: code, and modules, which are all visited on their own.
_OPAQUE = (nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_DEPTH = 4  # of containers and objects within each other


class Kept:
    """A model's state at one moment; ``restore`` brings it back and says what had changed."""

    def __init__(self, model: nn.Module):
        self._undo: list[Callable[[], bool]] = []
        self._seen: set[int] = set()
        self._parameters = {id(parameter) for parameter in model.parameters()}
        for module in model.modules():
            self._keep(vars(module), 0)
        self._random = _random_states(model)

    def restore(self) -> bool:
        """In place: as it was; whether anything but random states had changed."""
        for put_back in self._random:
            put_back()
        changes = [undo() for undo in self._undo]
        return any(changes)

    def _keep(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or isinstance(value, _OPAQUE):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            if id(value) not in self._parameters:  # parameters are not written by a forward
                self._undo.append(_undo_tensor(value))
        elif isinstance(value, dict):
            self._undo.append(_undo_dict(value))
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
        if depth < _DEPTH:
            for value in list(values):
                self._keep(value, depth + 1)


@contextmanager
def kept(model: nn.Module) -> Iterator[Kept]:
    """Whatever happens inside, the model is afterwards as it was.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with kept(norm):
        ...     _ = norm(torch.randn(4, 2))
        >>> norm.running_mean
        tensor([0., 0.])
    """
    state = Kept(model)
    try:
        yield state
    finally:
        state.restore()


def _undo_tensor(tensor: Tensor) -> Callable[[], bool]:
    before = tensor.detach().clone()

    def undo() -> bool:
        now = tensor.detach()
        same = now.shape == before.shape and torch.equal(
            torch.nan_to_num(now) if now.is_floating_point() else now,
            torch.nan_to_num(before) if before.is_floating_point() else before,
        )
        same = same and (not now.is_floating_point() or torch.equal(now.isnan(), before.isnan()))
        if not same:  # torch.func allows no write, even of the same values
            tensor.data = before.clone() if now.shape != before.shape else tensor.data.copy_(before)
        return not same

    return undo


def _undo_dict(found: dict[Any, Any]) -> Callable[[], bool]:
    before = dict(found)

    def undo() -> bool:
        same = len(found) == len(before) and all(
            key in found and found[key] is value for key, value in before.items()
        )
        if not same:
            for key in [key for key in found if key not in before]:
                del found[key]
            found.update(before)
        return not same

    return undo


def _undo_list(found: list[Any]) -> Callable[[], bool]:
    before = list(found)

    def undo() -> bool:
        same = len(found) == len(before) and all(a is b for a, b in zip(found, before))
        if not same:
            found[:] = before
        return not same

    return undo


def _undo_set(found: set[Any]) -> Callable[[], bool]:
    before = set(found)

    def undo() -> bool:
        same = found == before
        if not same:
            found.clear()
            found.update(before)
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
