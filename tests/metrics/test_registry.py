"""A metric is one file: what registers is measured, put in order, and asked for by name."""

import pytest
import torch
from torch import nn

from wfilter.evaluation.run import evaluate
from wfilter.metrics import METRICS, Column, Measured, Method, metric
from wfilter.metrics.cells import Cell


@pytest.fixture
def certainty():
    """A metric as a new file would add it."""
    column = Column("certainty", "mine", "lower", "Largest probability on the forgotten class.")

    @metric("certainty", lambda problem: [column], order=15)
    def measure_certainty(method: Method, problem) -> Measured:
        images, labels = problem.test
        top = method.own_logits(images, labels).softmax(1).amax(1)
        return Measured({"certainty": Cell({c: float(top[labels == c].mean()) for c in (0, 1)})})

    yield
    del METRICS["certainty"]


def test_a_registered_metric_is_part_of_every_report(certainty):
    names = list(METRICS)
    assert names.index("accuracy") < names.index("certainty") < names.index("sets")
    base, data = nn.Linear(4, 2), (torch.randn(20, 4), torch.arange(20) % 2)
    report = evaluate(base, data, original=base, classes=[0, 1], metrics="certainty")
    assert 0.5 <= report.value("original", "certainty") <= 1
    assert "Largest probability" in str(report)


def test_every_module_of_the_folder_registers_what_it_measures():
    assert list(METRICS) == [
        *("accuracy", "protocol", "sets", "zrf", "probe", "attacks", "depth", "membership"),
        *("relearn", "few_shot", "curves", "cost"),
    ]
