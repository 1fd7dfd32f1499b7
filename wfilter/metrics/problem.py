"""The problem that methods are measured on: the data, the classes to forget, and the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from wfilter.core.model import FilteredModel
from wfilter.core.outputs import logits_of
from wfilter.data.checks import check_logits
from wfilter.data.reading import read, take
from wfilter.metrics.cells import RowScores
from wfilter.metrics.features import collect_features
from wfilter.metrics.method import PAIRS, Method, run
from wfilter.metrics.reinit import fresh_copy


@dataclass(frozen=True)
class Budget:
    """How much is spent on each metric; part of every report.

    Attributes:
        test_images: Test images held in memory for all metrics but the accuracies, the same number
            of each class: the test sample.
        train_images: Likewise the training sample, for probe, membership inference, relearning.
        retain_rows: Classes besides its own that an image is made to forget; ``None``: all of them
            for up to 20 classes, else 4.
        zrf_draws: Random networks that ZRF is averaged over.
        set_sizes: Sizes of the random sets.
        relearn_samples: Images of an epoch of relearning.
        relearn_epochs: The cap; the paper's is 100.
        relearn_rate: Adam's learning rate on weights. Too large a rate ruins any model and looks
            like lasting forgetting: at 1e-3 a ResNet-18 on CIFAR-10 that forgot nothing falls
            from 93 to 33 % in three steps, at 1e-4 it does not. The original is the control.
        relearn_alpha_rate: Adam's learning rate on alphas.
        shots: Images of each class to relearn from.
        shot_steps: Full-batch steps on those images.
        shot_rates: Adam's learning rates for these steps; the one best for the attacker counts.
        curve_images: Of each class, for insertion and deletion.
        curve_steps: Steps of a curve, which has one point more.
    """

    test_images: int = 1000
    train_images: int = 2000
    retain_rows: int | None = None
    zrf_draws: int = 3
    set_sizes: tuple[int, ...] = (2, 3, 5)
    relearn_samples: int = 500
    relearn_epochs: int = 100
    relearn_rate: float = 1e-4
    relearn_alpha_rate: float = 0.1
    shots: tuple[int, ...] = (1, 5, 10)
    shot_steps: int = 20
    shot_rates: tuple[float, ...] = (1e-4, 1e-3)
    curve_images: int = 20
    curve_steps: int = 20


ROOM = 10**8
"""How many numbers of logits and features are kept for other metrics: 400 MB of them."""


@dataclass(frozen=True)
class LogitsAndFeatures:
    """Logits and penultimate features of one model on the samples in memory."""

    logits: Tensor
    features: Tensor


@dataclass
class Problem:
    """The problem all methods are measured on; what they share is computed once.

    Attributes:
        base: The original model.
        batches: Test data.
        train_batches: Training data, or ``None``.
        classes: To forget, one at a time.
        num_classes: Of the model.
        budget: See `Budget`.
        seed: Of everything random.
        factory: Makes a freshly initialised model where one cannot be had by resetting a copy.
        class_names: Shown in errors.
    """

    base: nn.Module
    batches: Any
    train_batches: Any
    classes: tuple[int, ...]
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
        """Stop if a class to forget has no images, or if no other class has any."""
        present = set(labels.tolist())
        absent = [row for row in self.classes if row not in present]
        if absent:
            named = ", ".join(map(self.named, absent[:10]))
            raise ValueError(
                f"{name} has no samples of class {named}. Add some, or name the classes to "
                "evaluate with classes=."
            )
        if len(present) < 2:
            raise ValueError(f"{name} has samples of class {self.classes[0]} only: none to retain.")

    def named(self, row: int) -> str:
        """A class by number and, if it has one, name."""
        return str(row) if self.class_names is None else f"{row} ({self.class_names[row]})"

    @property
    def retain_rows(self) -> int | None:
        """Classes besides its own that an image is made to forget; ``None``: all."""
        if self.budget.retain_rows is not None:
            return self.budget.retain_rows
        return None if len(self.classes) <= 20 else 4

    @property
    def set_sizes(self) -> list[int]:
        """The budget's sizes of sets that leave at least one class to retain."""
        return [size for size in self.budget.set_sizes if size < self.num_classes]

    @cached_property
    def random_networks(self) -> list[nn.Module]:
        """Freshly initialised models of the same architecture."""
        draws = range(max(1, self.budget.zrf_draws))
        return [
            fresh_copy(self.base, factory=self.factory, seed=self.seed + draw).eval()
            for draw in draws
        ]

    @property
    def resettable(self) -> bool:
        """Whether a freshly initialised model can be had."""
        try:
            return bool(self.random_networks)
        except ValueError:
            return False

    @cached_property
    def reference_logits(self) -> Tensor:
        """Logits of the random networks on the test sample's images of ``classes``."""
        images = self.own_test[0]
        return torch.stack([run(network, images) for network in self.random_networks])

    @cached_property
    def own_test(self) -> tuple[Tensor, Tensor]:
        """The test sample's images of the classes to forget."""
        images, labels = self.test
        kept = torch.isin(labels, torch.tensor(self.classes))
        return images[kept], labels[kept]

    def of_class(self, row: int) -> tuple[Tensor, Tensor]:
        """The test sample's images of one class."""
        images, labels = self.test
        return images[labels == row], labels[labels == row]

    @cached_property
    def counts(self) -> tuple[Tensor, Tensor]:
        """For each class, how many test images the original gets right, and how many there are."""
        hits = torch.zeros(self.num_classes, dtype=torch.double)
        counts = torch.zeros_like(hits)
        for images, labels in read(self.batches, self.num_classes):
            logits = check_logits(run(self.base, images), "the output of the original")
            hits.index_add_(0, labels, (logits.argmax(1) == labels).double())
            counts += torch.bincount(labels, minlength=self.num_classes)
        return hits, counts

    @property
    def original(self) -> RowScores:
        """Acc_r of the original model by row, over all test images."""
        hits, counts = self.counts
        by_row = {
            r: float((hits.sum() - hits[r]) / (counts.sum() - counts[r])) for r in self.classes
        }
        return RowScores(by_row, higher_is_better=True)

    def seen(self, method: Method, row: int) -> tuple[LogitsAndFeatures, LogitsAndFeatures]:
        """Logits and features of a method's model on the training and on the test sample.

        Kept for the metrics that come after, as long as there is room (`ROOM`).
        """
        key = (method.name, None if method.shared else row)
        if key not in self._seen:
            see = _rerouted(method.filtered, row) or partial(look, method.model(row))
            self._seen[key] = (see(self.train[0]), see(self.test[0]))
            while len(self._seen) > 1 and self._kept_numbers() > ROOM:
                del self._seen[next(iter(self._seen))]
        seen: tuple[LogitsAndFeatures, LogitsAndFeatures] = self._seen[key]
        return seen

    def features(self, method: Method, row: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features and labels of the training sample and of the test sample, for probes."""
        train, test = self.seen(method, row)
        return train.features, self.train[1], test.features, self.test[1]

    def _kept_numbers(self) -> int:
        both = (part for pair in self._seen.values() for part in pair)
        return sum(part.logits.numel() + part.features.numel() for part in both)


def _rerouted(wf: FilteredModel | None, row: int) -> Callable[[Tensor], LogitsAndFeatures] | None:
    """How to look at a model with feature rows, or ``None`` where there are none.

    The filtered model itself is asked: baking keeps only the linear part of a feature row.
    """
    if wf is None or wf.feature_rows is None:
        return None

    @torch.no_grad()
    def see(images: Tensor) -> LogitsAndFeatures:
        parts = [part.to(wf.alphas.device) for part in torch.split(images, PAIRS)]
        logits = torch.cat([logits_of(wf(part, forget=row)).float().cpu() for part in parts])
        features = torch.cat([wf.features(part, forget=row).float().cpu() for part in parts])
        return LogitsAndFeatures(logits, features)

    return see


@torch.no_grad()
def look(model: nn.Module, images: Tensor) -> LogitsAndFeatures:
    """Logits and features in one forward.

    Example:
        >>> look(nn.Linear(4, 3), torch.ones(2, 4)).features.shape
        torch.Size([2, 4])
    """
    logits: list[Tensor] = []

    def forward(batch: Tensor) -> Tensor:
        logits.append(logits_of(model(batch)))
        return logits[-1]

    labels = torch.zeros(len(images), dtype=torch.long)
    batches = list(zip(torch.split(images, PAIRS), torch.split(labels, PAIRS)))
    features, _ = collect_features(model, batches, forward=forward)
    return LogitsAndFeatures(torch.cat(logits).float().cpu(), features.float())
