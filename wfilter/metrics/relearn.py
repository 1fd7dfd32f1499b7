"""How fast a forgotten class comes back: epochs until its original accuracy has returned."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from wfilter.core.gates import HARD
from wfilter.core.model import FilteredModel
from wfilter.data.batches import Batches, labelled
from wfilter.data.running import (
    Forward,
    collect_logits,
    device_of,
    evaluating,
    seeded,
    select_class,
)
from wfilter.metrics.accuracy import accuracy
from wfilter.metrics.cells import Cell, Column
from wfilter.metrics.layers import forgets_by_gates
from wfilter.metrics.method import Method, run
from wfilter.metrics.problem import Problem
from wfilter.metrics.registry import Measured, by_class, metric
from wfilter.metrics.training import borrowed, step, unmasked

CAP = 100
"""The paper's largest number of epochs; a class not relearned by then counts as a failure."""


@dataclass(frozen=True)
class Relearned:
    """Epochs until the class's original accuracy returned (None: never), and accuracies till then.

    Example:
        >>> Relearned(None, (0.0, 0.2), target=0.9).failed
        True
    """

    epochs: int | None
    accuracies: tuple[float, ...]
    target: float

    @property
    def failed(self) -> bool:
        """Whether the class was not back by the last epoch allowed."""
        return self.epochs is None


@dataclass(frozen=True)
class RelearnSummary:
    """Mean epochs over classes, failures counted at the cap, printed as in the paper.

    Example:
        >>> print(RelearnSummary(27.6, failures=1, classes=10))
        27.6 (1)
        >>> print(RelearnSummary(100.0, failures=10, classes=10))
        > 100 (10)
    """

    mean: float
    failures: int
    classes: int

    def __str__(self) -> str:
        mean = f"{self.mean:.1f}".removesuffix(".0")
        return f"{'> ' if self.failures == self.classes else ''}{mean} ({self.failures})"


def relearn_summary(results: Iterable[Relearned], cap: int = CAP) -> RelearnSummary:
    """The mean over classes, "mean (failures)"; a failure counts as ``cap`` epochs.

    Example:
        >>> done, never = Relearned(20, (), target=0.9), Relearned(None, (), target=0.9)
        >>> print(relearn_summary([done, never]))
        60 (1)
    """
    epochs = [result.epochs for result in results]
    if not epochs:
        raise ValueError("no results to summarise: pass one Relearned for each class.")
    cell = Cell(dict(enumerate(epochs)))
    return RelearnSummary(cell.mean(cap), cell.failures, len(epochs))


def relearn_time(
    model: nn.Module,
    forget: int,
    train: Any,
    test: Batches,
    *,
    target: float,
    forward: Forward | None = None,
    parameters: Iterable[nn.Parameter] | None = None,
    samples: int = 500,
    max_epochs: int = CAP,
    batch_size: int = 64,
    lr: float = 1e-4,
    seed: int = 0,
) -> Relearned:
    """Epochs of ``samples`` random training images until class ``forget`` is back at ``target``.

    Source: Tarun et al., arXiv 2111.08947, as the paper uses it. The paper does not say what is
    trained, nor with which optimiser: Adam here, on the parameters given. Everything that was
    trained is put back afterwards.

    Args:
        model: a baked or unlearned model, or a filtered one with ``forward`` and ``parameters``.
        forget: the forgotten class.
        train: training images of all classes: a dataset, a DataLoader (its dataset is used), or
            a pair of tensors (images, labels).
        test: batches on which the class's accuracy is measured.
        target: the original model's accuracy on the class.
        forward: how to run the model, if not ``model(images)``.
        parameters: what to train; default all of the model's.
        samples: drawn anew for each epoch.
        max_epochs: where to give up.
        batch_size: of the optimiser's steps.
        lr: Adam's. 1e-3 ruins even a ResNet-18 that forgot nothing; alphas need about 0.1.
        seed: of the draws.

    Example:
        >>> x, y = torch.eye(2).repeat(20, 1), torch.arange(2).repeat(20)
        >>> blank = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.constant_(blank.weight, 0.5)
        >>> relearn_time(blank, 1, (x, y), [(x, y)], target=1.0, samples=40, lr=0.1).epochs
        1
    """
    run, dataset = forward or model, _dataset(train)
    shown = select_class(test, forget)
    known = [(shown, torch.full((len(shown),), forget))]
    with seeded(seed), borrowed(model, parameters) as trained:
        optimiser = torch.optim.Adam(trained, lr=lr)
        path = [_class_accuracy(model, run, known)]
        while path[-1] < target and len(path) <= max_epochs:
            picked = torch.randperm(len(dataset))[:samples].tolist()
            for batch in DataLoader(dataset, batch_size, sampler=picked):
                step(model, run, optimiser, *labelled(batch, "train"))
            path.append(_class_accuracy(model, run, known))
    return Relearned(len(path) - 1 if path[-1] >= target else None, tuple(path), target)


def _dataset(train: Any) -> Any:
    """Something with a length and items, so that samples can be drawn at random."""
    if isinstance(train, (tuple, list)) and len(train) == 2 and isinstance(train[0], Tensor):
        return TensorDataset(*labelled(train, "train"))
    dataset = getattr(train, "dataset", train)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"train is a {type(train).__name__} without length or items; expected a dataset, a "
            "DataLoader over one, or a pair of tensors (images, labels)."
        )
    return dataset


def _class_accuracy(model: nn.Module, run: Forward, known: Batches) -> float:
    with evaluating(model):
        return accuracy(*collect_logits(run, known, device=device_of(model)))


def _columns(problem: Problem) -> list[Column]:
    """Columns of the epochs, for training alphas and for training weights."""
    cap, samples = problem.budget.relearn_epochs, problem.budget.relearn_samples
    text = (
        f"Epochs of {samples} training images until the class's original accuracy is back, at most "
        f"{cap}; in brackets the classes that never came back. Adam on the"
    )
    ways = {
        "alphas": "row's alphas, straight-through where gates are exact, "
        f"learning rate {problem.budget.relearn_alpha_rate:g}.",
        "weights": "weights of the baked or unlearned model, logit masks taken off first, "
        f"learning rate {problem.budget.relearn_rate:g}.",
    }
    return [
        Column(f"relearn {name}", "relearning", "higher", f"{text} {what}", "epochs", cap)
        for name, what in ways.items()
    ]


@metric("relearn", _columns, order=60, needs_train=True)
def measure_relearn(method: Method, problem: Problem) -> Measured:
    """Epochs until the class is back: training the row's alphas, and the plain model's weights."""
    budget = problem.budget

    def number(row: int) -> dict[str, float | None]:
        common: dict[str, Any] = {
            "target": original_accuracy(problem, row),
            "samples": budget.relearn_samples,
            "max_epochs": budget.relearn_epochs,
            "seed": problem.seed,
        }
        known = [problem.of_class(row)]
        epochs: dict[str, float | None] = {}
        if method.filtered is not None and forgets_by_gates(method.filtered):
            with trainable(method.filtered, row) as (forward, alphas):
                epochs["relearn alphas"] = relearn_time(
                    *(method.filtered, row, problem.train, known),
                    **(common | {"lr": budget.relearn_alpha_rate}),
                    forward=forward,
                    parameters=[alphas],
                ).epochs
        model = unmasked(method.model(row))
        epochs["relearn weights"] = relearn_time(
            model, row, problem.train, known, **common, lr=budget.relearn_rate
        ).epochs
        return epochs

    return by_class(method, number)


def original_accuracy(problem: Problem, row: int) -> float:
    """The original model's accuracy on a class, on the test sample.

    Example:
        >>> base = nn.Linear(4, 2)
        >>> problem = Problem(base, [(torch.ones(2, 4), torch.arange(2))], None, (0, 1), 2)
        >>> original_accuracy(problem, 0) in (0.0, 1.0)
        True
    """
    images, labels = problem.of_class(row)
    return accuracy(run(problem.base, images), labels)


@contextmanager
def trainable(
    wf: FilteredModel, row: int
) -> Iterator[tuple[Callable[[Tensor], Tensor], nn.Parameter]]:
    """The forward and the parameter to train, to learn a row back through its alphas.

    An alpha at -1000 has no gradient, so gates that are exactly 0 or 1 are given the straight-
    through gradient and alphas of -1 or 1: the outputs stay the same and training can move them.
    Afterwards everything is as it was.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="weight", init=1000.0)
        >>> wf.alphas.data[0, 1] = -1000.0
        >>> with trainable(wf, 0) as (forward, alphas):
        ...     alphas.max().item(), wf.hard
        (1.0, True)
        >>> wf.alphas.max().item(), wf.hard
        (1000.0, False)
    """
    before, hard = wf.alphas.detach().clone(), wf.hard
    exact = bool((before[row].abs() >= HARD).all())
    try:
        if exact or hard:
            wf.hard = True
            with torch.no_grad():
                for alpha in wf.alpha.values():
                    # A target that is open for all classes may be pinned open, and must stay open.
                    if not bool((alpha == HARD).all()):
                        alpha.clamp_(-1, 1)
        yield lambda images: wf(images, forget=row), wf.alphas
    finally:
        wf.hard = hard
        with torch.no_grad():
            wf.alphas.copy_(before)
