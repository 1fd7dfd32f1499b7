"""Every metric of a report as a function of a subject: numbers by class, columns with definitions.

The formulas are in `wfilter.metrics`; here they meet data, rows and budgets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wfilter.data.running import seeded
from wfilter.evaluation import columns
from wfilter.evaluation.cells import Column
from wfilter.evaluation.measures.bench import Bench, Measured
from wfilter.evaluation.measures.costs import cost
from wfilter.evaluation.measures.outputs import accuracy, sets, zrf
from wfilter.evaluation.measures.relearning import few_shot, relearn
from wfilter.evaluation.measures.remains import curves, membership, probe
from wfilter.evaluation.method import Subject

__all__ = ["MEASURES", "Bench", "Measure", "Measured", "measure"]


@dataclass(frozen=True)
class Measure:
    """A metric by name: how it is measured and which columns it fills."""

    run: Callable[[Subject, Bench], Measured]
    columns: Callable[[columns.Problem], list[Column]]
    needs_train: bool = False


MEASURES: dict[str, Measure] = {
    "accuracy": Measure(accuracy, columns.accuracy),
    "sets": Measure(sets, columns.sets),
    "zrf": Measure(zrf, columns.zrf),
    "probe": Measure(probe, columns.probe, needs_train=True),
    "membership": Measure(membership, columns.membership, needs_train=True),
    "relearn": Measure(relearn, columns.relearn, needs_train=True),
    "few_shot": Measure(few_shot, columns.few_shot, needs_train=True),
    "curves": Measure(curves, columns.curves),
    "cost": Measure(cost, columns.cost),
}
"""Every metric by name, in the order of a report."""


def measure(name: str, subject: Subject, bench: Bench) -> Measured:
    """One metric of one subject, with torch's random state as it was.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> bench = Bench(nn.Linear(4, 2), [(torch.ones(2, 4), torch.arange(2))], None, (0,), 2)
        >>> sorted(measure("accuracy", Subject.of_one("original", bench.base, (0,)), bench).cells)
        ['AUS', 'Acc_f', 'Acc_r']
    """
    with seeded(bench.seed):
        return MEASURES[name].run(subject, bench)
