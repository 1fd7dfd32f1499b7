"""Run one rival, timed; its learning rate, where it has one, chosen on held-out images."""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wfilter.data.batches import Batches
from wfilter.data.running import collect_logits
from wfilter.metrics import set_accuracies

FACTORS = (1.0, 0.1, 10.0)
"""The learning rates tried, as multiples of the method's default, in this order."""

ENOUGH = 0.01
"""A rate whose score is at most this far below the original's Acc_r ends the search."""


@dataclass(frozen=True)
class Tried:
    """A learning rate and the accuracies it led to on the held-out images.

    Example:
        >>> Tried(lr=0.01, retain=0.9, forget=0.2).score
        0.7
    """

    lr: float
    retain: float
    forget: float

    @property
    def score(self) -> float:
        """Acc_r - Acc_f: highest where the gap to a model that never saw the class is smallest.

        Such a model has Acc_f = 0 and an Acc_r that does not depend on the rate.
        """
        return round(self.retain - self.forget, 6)


@dataclass(frozen=True)
class Rival:
    """The model a method made, the seconds it took, and how its learning rate was chosen.

    Attributes:
        model: of the rate chosen.
        seconds: of the rate chosen alone; trying the others is not the method's cost.
        lr: the rate chosen, if it was chosen here.
        tried: every rate with its held-out accuracies; empty if none was chosen.

    Example:
        >>> Rival(nn.Identity(), seconds=0.5).tried
        ()
    """

    model: nn.Module
    seconds: float
    lr: float | None = None
    tried: tuple[Tried, ...] = ()


def run_method(
    method: Callable[..., nn.Module],
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    options: Mapping[str, Any],
    *,
    held_out: Batches | None = None,
) -> Rival:
    """The rival that a method's function makes, timed.

    Args:
        method: from `wfilter.baselines.METHODS`.
        model: left untouched.
        forget: class or classes.
        train: batches of all classes.
        options: keyword arguments of the method; an ``lr`` among them is kept.
        held_out: batches of all classes, not of the test images, on which to choose among
            `FACTORS` times the method's learning rate; ``None``: take its own. The search
            ends at a rate that forgets and keeps the original's Acc_r, to within `ENOUGH`.

    Example:
        >>> import torch
        >>> from wfilter.baselines.fine_tuning import fine_tuning
        >>> batch = (torch.eye(2).repeat(8, 1), torch.arange(2).repeat(8))
        >>> rival = run_method(fine_tuning, nn.Linear(2, 2), 0, [batch], {}, held_out=[batch])
        >>> [tried.lr for tried in rival.tried]
        [0.01]
    """
    default = inspect.signature(method).parameters.get("lr")
    if held_out is None or default is None or "lr" in options:
        return _timed(method, model, forget, train, options)
    best: Rival | None = None
    tried: list[Tried] = []
    goal = _judge(model, 0.0, forget, held_out).retain - ENOUGH
    for factor in FACTORS:
        lr = round(factor * default.default, 12)
        rival = _timed(method, model, forget, train, {**options, "lr": lr})
        tried.append(_judge(rival.model, lr, forget, held_out))
        if best is None or tried[-1].score > max(past.score for past in tried[:-1]):
            best = Rival(rival.model, rival.seconds, lr)
        if tried[-1].score >= goal:
            break
    assert best is not None
    return Rival(best.model, best.seconds, best.lr, tuple(tried))


def _judge(model: nn.Module, lr: float, forget: int | Sequence[int], held_out: Batches) -> Tried:
    logits, labels = collect_logits(model, held_out)
    forgotten = torch.isin(labels, torch.tensor(forget))
    if forgotten.all() or not forgotten.any():
        lacking = "of the other classes" if forgotten.all() else "of a class to forget"
        raise ValueError(f"held_out has no images {lacking}: hold out some of every class.")
    if logits.isnan().any():
        return Tried(lr, retain=0.0, forget=1.0)  # it diverged: the worst score there is
    return Tried(lr, *set_accuracies(logits, labels, forget))


def _timed(
    method: Callable[..., nn.Module],
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    options: Mapping[str, Any],
) -> Rival:
    start = time.perf_counter()
    changed = method(model, forget, train, **options)
    return Rival(changed, time.perf_counter() - start)
