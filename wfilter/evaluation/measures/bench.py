"""``Bench``: the problem all methods are measured on; and what a measurement gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from wfilter import metrics
from wfilter.data.checks import check_logits
from wfilter.evaluation.cells import Cell
from wfilter.evaluation.columns import Budget, Problem
from wfilter.evaluation.method import PAIRS, Subject, read, run, take


@dataclass(frozen=True)
class Seen:
    """Logits and penultimate features of one model on the samples in memory."""

    logits: Tensor
    features: Tensor


@dataclass
class Bench:
    """The problem all methods are measured on; what they share is computed once.

    Attributes:
        base: The original model.
        batches: Test data.
        train_batches: Training data, or ``None``.
        rows: Classes to forget, one at a time.
        num_classes: Of the model.
        budget: See `Budget`.
        seed: Of everything random.
        factory: Makes a freshly initialised model where one cannot be had by resetting a copy.
        class_names: For errors.
    """

    base: nn.Module
    batches: Any
    train_batches: Any
    rows: tuple[int, ...]
    num_classes: int
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    factory: Callable[[], nn.Module] | None = None
    class_names: tuple[str, ...] | None = None
    _seen: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def test(self) -> tuple[Tensor, Tensor]:
        """Some test images of every class."""
        return self._sample(self.batches, self.budget.test_images, "data")

    @cached_property
    def train(self) -> tuple[Tensor, Tensor]:
        """Some training images of every class."""
        if self.train_batches is None:
            raise ValueError("this metric needs training images: pass train=.")
        return self._sample(self.train_batches, self.budget.train_images, "train")

    def _sample(self, batches: Any, size: int, name: str) -> tuple[Tensor, Tensor]:
        images, labels = take(batches, self.num_classes, size, name)
        self.refuse_absent(labels, name)
        return images, labels

    def refuse_absent(self, labels: Tensor, name: str) -> None:
        """Stop if a class to forget, or any other, has no images."""
        present = set(labels.tolist())
        absent = [row for row in self.rows if row not in present]
        if absent:
            named = ", ".join(map(self._named, absent[:10]))
            raise ValueError(
                f"{name} has no samples of class {named}. Add some, or name the classes to "
                "evaluate with rows=."
            )
        if len(present) < 2:
            raise ValueError(f"{name} has samples of class {self.rows[0]} only: none to retain.")

    def _named(self, row: int) -> str:
        return str(row) if self.class_names is None else f"{row} ({self.class_names[row]})"

    @property
    def problem(self) -> Problem:
        """What the columns' definitions mention."""
        return Problem(self.budget, len(self.rows), self.num_classes)

    @cached_property
    def random_networks(self) -> list[nn.Module]:
        """Freshly initialised models of the same architecture."""
        draws = range(max(1, self.budget.zrf_draws))
        return [
            metrics.fresh_copy(self.base, factory=self.factory, seed=self.seed + draw).eval()
            for draw in draws
        ]

    @cached_property
    def reference_logits(self) -> Tensor:
        """Of the random networks on the test sample's images of ``rows``."""
        images = self.own_test[0]
        return torch.stack([run(network, images) for network in self.random_networks])

    @cached_property
    def own_test(self) -> tuple[Tensor, Tensor]:
        """The test sample's images of the classes to forget."""
        images, labels = self.test
        kept = torch.isin(labels, torch.tensor(self.rows))
        return images[kept], labels[kept]

    def of_class(self, row: int) -> tuple[Tensor, Tensor]:
        """The test sample's images of one class."""
        images, labels = self.test
        return images[labels == row], labels[labels == row]

    @cached_property
    def counts(self) -> tuple[Tensor, Tensor]:
        """Of each class, the test images the original model gets right, and all of them."""
        hits = torch.zeros(self.num_classes, dtype=torch.double)
        counts = torch.zeros_like(hits)
        for images, labels in read(self.batches, self.num_classes):
            logits = check_logits(run(self.base, images), "the output of the original")
            hits.index_add_(0, labels, (logits.argmax(1) == labels).double())
            counts += torch.bincount(labels, minlength=self.num_classes)
        return hits, counts

    @property
    def original(self) -> metrics.RowScores:
        """Acc_r of the original model by row, over all test images."""
        hits, counts = self.counts
        by_row = {r: float((hits.sum() - hits[r]) / (counts.sum() - counts[r])) for r in self.rows}
        return metrics.RowScores(by_row, higher_is_better=True)

    def class_accuracy(self, row: int) -> float:
        """The original model's accuracy on a class, on the test sample."""
        images, labels = self.of_class(row)
        return metrics.accuracy(run(self.base, images), labels)

    def seen(self, subject: Subject, row: int) -> tuple[Seen, Seen]:
        """What a subject's model makes of the training and the test sample; the last is kept."""
        key = (subject.name, None if subject.shared else row)
        if key not in self._seen:
            model = subject.model(row)
            self._seen = {key: (look(model, self.train[0]), look(model, self.test[0]))}
        found: tuple[Seen, Seen] = self._seen[key]
        return found


@torch.no_grad()
def look(model: nn.Module, images: Tensor) -> Seen:
    """Logits and features in one forward.

    Example:
        >>> look(nn.Linear(4, 3), torch.ones(2, 4)).features.shape
        torch.Size([2, 4])
    """
    logits: list[Tensor] = []

    def forward(batch: Tensor) -> Tensor:
        logits.append(model(batch))
        return logits[-1]

    labels = torch.zeros(len(images), dtype=torch.long)
    batches = list(zip(torch.split(images, PAIRS), torch.split(labels, PAIRS)))
    features, _ = metrics.collect_features(model, batches, forward=forward)
    return Seen(torch.cat(logits).float().cpu(), features.float())


@dataclass(frozen=True)
class Measured:
    """The numbers of one metric: column name -> cell, and details by name."""

    cells: Mapping[str, Cell]
    details: Mapping[str, Any] = field(default_factory=dict)


def by_class(subject: Subject, number: Callable[[int], Mapping[str, float | None]]) -> Measured:
    """Cells from a function of the row."""
    found = {row: number(row) for row in subject.rows}
    names = dict.fromkeys(name for numbers in found.values() for name in numbers)
    return Measured({n: Cell({row: found[row][n] for row in found}) for n in names})
