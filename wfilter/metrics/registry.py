"""Every metric by name. A metric registers itself: its file is all there is to add.

@metric("zrf", _columns, order=30)
def measure_zrf(method: Method, problem: Problem) -> Measured: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from wfilter.data.running import seeded
from wfilter.metrics.cells import Cell, Column
from wfilter.metrics.method import Method
from wfilter.metrics.problem import Problem


@dataclass(frozen=True)
class Measured:
    """The numbers of one metric: column name -> cell, and details by name."""

    cells: Mapping[str, Cell]
    details: Mapping[str, Any] = field(default_factory=dict)


Measure: TypeAlias = Callable[[Method, Problem], Measured]


@dataclass(frozen=True)
class Metric:
    """How a metric is measured, which columns it fills, and where in a report they stand."""

    name: str
    measure: Measure
    columns: Callable[[Problem], list[Column]]
    order: int
    needs_train: bool = False


METRICS: dict[str, Metric] = {}
"""Every metric by name, in the order of a report."""


def metric(
    name: str, columns: Callable[[Problem], list[Column]], *, order: int, needs_train: bool = False
) -> Callable[[Measure], Measure]:
    """Register the decorated function as the measure of a metric.

    Args:
        name: What users ask for in ``evaluate(metrics=...)``.
        columns: From the problem to the columns it fills.
        order: Its place in a report: smaller is higher.
        needs_train: Whether it needs training images.

    Example:
        >>> @metric("nothing", lambda problem: [], order=999)
        ... def measure_nothing(method, problem):
        ...     return Measured({})
        >>> METRICS.pop("nothing").order
        999
    """

    def register(measure: Measure) -> Measure:
        known = {**METRICS, name: Metric(name, measure, columns, order, needs_train)}
        METRICS.clear()
        METRICS.update(sorted(known.items(), key=lambda item: item[1].order))
        return measure

    return register


def measure(name: str, method: Method, problem: Problem) -> Measured:
    """One metric of one method, with torch's random state as it was.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> problem = Problem(nn.Linear(4, 2), [(torch.ones(2, 4), torch.arange(2))], None, (0,), 2)
        >>> method = Method.of_one("original", problem.base, (0,))
        >>> sorted(measure("accuracy", method, problem).cells)
        ['AUS', 'Acc_f', 'Acc_r']
    """
    with seeded(problem.seed):
        return METRICS[name].measure(method, problem)


def by_class(method: Method, number: Callable[[int], Mapping[str, float | None]]) -> Measured:
    """Cells filled by calling ``number`` for every class the method can forget.

    Example:
        >>> from torch import nn
        >>> method = Method.of_one("original", nn.Identity(), (0, 4))
        >>> by_class(method, lambda row: {"Acc_f": row / 4}).cells["Acc_f"].mean()
        0.5
    """
    measured = {row: number(row) for row in method.classes}
    names = dict.fromkeys(name for numbers in measured.values() for name in numbers)
    return Measured({n: Cell({row: measured[row][n] for row in measured}) for n in names})
