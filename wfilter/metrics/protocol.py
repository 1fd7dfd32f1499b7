"""The field's protocol for the removal of a class: UA, RA and TA, beside the retrained model's.

With MIA (see `wfilter.metrics.membership`) these make the average gap of Fan et al., SalUn, arXiv
2310.12508. UA and RA are of *training* images, TA is of test images of the classes that stay.
"""

from __future__ import annotations

import torch

from wfilter.metrics.accuracy import both_accuracies
from wfilter.metrics.cells import Column
from wfilter.metrics.method import Method
from wfilter.metrics.problem import Problem
from wfilter.metrics.registry import Measured, by_class, metric

PROTOCOL = ("UA", "RA", "TA", "MIA confidence")
"""The four numbers over which the field takes its average gap."""


def _columns(problem: Problem) -> list[Column]:
    group = "the field's protocol"
    unlearned = "100 less the accuracy on the forgotten class's training images."
    retained = "Accuracy on the training images of the other classes."
    tested = "Accuracy on the test images of the other classes."
    gap = f"Mean absolute difference to the retrained model over {', '.join(PROTOCOL)}."
    return [
        Column("UA", group, "retrained", unlearned, over="forget train"),
        Column("RA", group, "retrained", retained, over="retain train"),
        Column("TA", group, "retrained", tested, over="retain sample"),
        Column("average gap", group, "lower", gap, derived="gap", source=", ".join(PROTOCOL)),
    ]


@metric("protocol", _columns, order=12, needs_train=True)
def measure_protocol(method: Method, problem: Problem) -> Measured:
    """UA, RA and TA on the training and the test sample."""

    def number(row: int) -> dict[str, float | None]:
        train, test = problem.seen(method, row)
        kept, forgotten = both_accuracies(
            train.logits, problem.train[1], torch.eq(problem.train[1], row)
        )
        tested, _ = both_accuracies(test.logits, problem.test[1], torch.eq(problem.test[1], row))
        return {"UA": 1 - forgotten, "RA": kept, "TA": tested}

    return by_class(method, number)
