"""What forgetting costs: seconds, numbers to store, time to switch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wfilter.data.running import synchronise
from wfilter.metrics.cells import Column
from wfilter.metrics.method import Method
from wfilter.metrics.problem import Problem
from wfilter.metrics.registry import Measured, by_class, metric


def _columns(problem: Problem) -> list[Column]:
    """Columns of the seconds, the numbers stored and the time to switch."""
    number = problem.num_classes
    every = f"Seconds for all {number} classes; for methods of one class the mean times {number}."
    stored = (
        f"Numbers stored beside the original to serve all {number} classes: alphas and "
        "feature rows, or every changed tensor."
    )
    switch = "Milliseconds to change the class: new gates, or a copy of the changed tensors."
    return [
        Column("s/class", "cost", "lower", "Seconds of forgetting for one class.", "seconds"),
        Column("s, all", "cost", "lower", every, "seconds"),
        Column("stored", "cost", "lower", stored, "count"),
        Column("MB", "cost", "lower", "The same in megabytes.", "seconds"),
        Column("switch ms", "cost", "lower", switch, "seconds"),
    ]


@metric("cost", _columns, order=90)
def measure_cost(method: Method, problem: Problem) -> Measured:
    """What it takes to forget a class: seconds, numbers to store, time to switch."""

    def number(row: int) -> dict[str, float | None]:
        if method.filtered is not None:
            filtered, wanted = method.filtered, torch.tensor([row])
            rows = filtered.feature_rows
            own = [filtered.alphas, *(rows.buffers() if rows is not None else ())]
            stored, size = _numbers(own), _bytes(own)
            switch = _milliseconds(lambda: filtered.gates(wanted), filtered.alphas)
        else:
            own = changed_tensors(method.model(row), problem.base)
            stored = _numbers(own) * problem.num_classes
            size = _bytes(own) * problem.num_classes
            served = [torch.empty_like(tensor) for tensor in own]
            switch = _milliseconds(lambda: _copy(own, served), *own[:1])
        costs: dict[str, float | None] = {"stored": stored, "MB": size / 1e6, "switch ms": switch}
        if row in method.seconds:
            costs["s/class"] = method.seconds[row]
            costs["s, all"] = method.seconds[row] * problem.num_classes
        return costs

    return by_class(method, number)


def _numbers(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def changed_tensors(model: nn.Module, base: nn.Module) -> list[Tensor]:
    """Tensors of a model that the base model lacks, so that they must be stored besides it.

    Example:
        >>> import copy
        >>> from wfilter.core.mask import Mask
        >>> base = nn.Linear(4, 3)
        >>> [t.shape for t in changed_tensors(nn.Sequential(copy.deepcopy(base), Mask([1])), base)]
        [torch.Size([1])]
    """
    known = base.state_dict()
    by_shape: dict[Any, list[Tensor]] = {}
    for tensor in known.values():
        by_shape.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
    return [
        tensor
        for name, tensor in model.state_dict().items()
        if not (name in known and _same(known[name], tensor))
        and not any(_same(old, tensor) for old in by_shape.get((tensor.shape, tensor.dtype), []))
    ]


def _same(old: Tensor, new: Tensor) -> bool:
    return old.shape == new.shape and torch.equal(old.to(new.device, new.dtype), new)


def _copy(tensors: list[Tensor], places: list[Tensor]) -> None:
    for tensor, place in zip(tensors, places):
        place.copy_(tensor)


@torch.no_grad()
def _milliseconds(action: Callable[[], object], *tensors: Tensor, repeats: int = 7) -> float:
    """Median wall time until the device of ``tensors`` is done; the first run does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        for tensor in tensors:
            synchronise(tensor)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[1:])
