"""How fast a class is learned again: through its alphas, all weights, or a few images."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wfilter import metrics
from wfilter.baselines.logit_mask import Mask
from wfilter.core.gates import HARD
from wfilter.core.model import FilteredModel
from wfilter.evaluation.measures.bench import Bench, Measured, by_class
from wfilter.evaluation.method import PAIRS, Subject


def relearn(subject: Subject, bench: Bench) -> Measured:
    """Epochs until the class is back: training the row's alphas, and the plain model's weights."""
    budget = bench.budget

    def number(row: int) -> dict[str, float | None]:
        common: dict[str, Any] = {
            "target": bench.class_accuracy(row),
            "samples": budget.relearn_samples,
            "max_epochs": budget.relearn_epochs,
            "seed": bench.seed,
        }
        known = [bench.of_class(row)]
        found: dict[str, float | None] = {}
        if subject.filtered is not None:
            with trainable(subject.filtered, row) as (forward, alphas):
                found["relearn alphas"] = metrics.relearn_time(
                    *(subject.filtered, row, bench.train, known),
                    **(common | {"lr": budget.relearn_alpha_rate}),
                    forward=forward,
                    parameters=[alphas],
                ).epochs
        model = unmasked(subject.model(row))
        found["relearn weights"] = metrics.relearn_time(
            model, row, bench.train, known, **common, lr=budget.relearn_rate
        ).epochs
        return found

    return by_class(subject, number)


def few_shot(subject: Subject, bench: Bench) -> Measured:
    """Acc_f and Acc_r after training the plain model on a few images of each class."""
    budget = bench.budget

    def number(row: int) -> dict[str, float | None]:
        found = metrics.few_shot_relearn(
            unmasked(subject.model(row)),
            row,
            bench.train,
            list(zip(*(torch.split(part, PAIRS) for part in bench.test))),
            shots=budget.shots,
            steps=budget.shot_steps,
            lr=budget.relearn_rate,
            seed=bench.seed,
        )
        halves = {k: {"Acc_f": forget, "Acc_r": retain} for k, (retain, forget) in found.items()}
        return {f"{k}-shot {half}": v for k, both in halves.items() for half, v in both.items()}

    return by_class(subject, number)


@contextmanager
def trainable(
    wf: FilteredModel, row: int
) -> Iterator[tuple[Callable[[Tensor], Tensor], nn.Parameter]]:
    """How to run and what to train, to learn a row back through its alphas.

    An alpha at -1000 has no gradient, so gates that are exactly 0 or 1 are given the straight-
    through gradient and alphas of -1 or 1: the same outputs, and a fair chance. Afterwards
    everything is as it was.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*", init=1000.0)
        >>> with trainable(wf, 0) as (forward, alphas):
        ...     alphas.max().item(), wf.hard
        (1.0, True)
        >>> wf.alphas.max().item(), wf.hard
        (1000.0, False)
    """
    before, hard = wf.alphas.detach().clone(), wf.hard
    exact = bool((before[row].abs() >= HARD).all())
    pinned = {target.name for i, target in enumerate(wf.targets) if i in wf._pinned}
    try:
        if exact or hard:
            wf.hard = True
            with torch.no_grad():
                for name, alpha in wf.alpha.items():
                    if name not in pinned:
                        alpha.clamp_(-1, 1)
        yield lambda images: wf(images, forget=row), wf.alphas
    finally:
        wf.hard = hard
        with torch.no_grad():
            wf.alphas.copy_(before)


def unmasked(model: nn.Module) -> nn.Module:
    """A copy without logit masks: whoever trains a model again takes them off first.

    Example:
        >>> unmasked(nn.Sequential(nn.Linear(2, 2), Mask([0])))[1]
        Identity()
    """
    bare = copy.deepcopy(model)
    for parent in list(bare.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Mask):
                setattr(parent, name, nn.Identity())
    return bare
