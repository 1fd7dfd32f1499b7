"""Every metric of a report as a function of a subject: numbers by class, columns with definitions.

The formulas are in `wfilter.metrics`; here they meet data, rows and budgets.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from wfilter import columns, metrics
from wfilter.baselines.logit_mask import Mask
from wfilter.columns import Budget, Problem
from wfilter.gates import HARD
from wfilter.metrics.inputs import check_logits
from wfilter.metrics.running import evaluating, seeded
from wfilter.model import FilteredModel
from wfilter.report import Cell, Column
from wfilter.subjects import PAIRS, RowDraw, Subject, read, run, take

FULL_CONFUSION = 50  # classes up to which a report keeps whole confusions


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


def _by_class(subject: Subject, number: Callable[[int], Mapping[str, float | None]]) -> Measured:
    """Cells from a function of the row."""
    found = {row: number(row) for row in subject.rows}
    names = dict.fromkeys(name for numbers in found.values() for name in numbers)
    return Measured({n: Cell({row: found[row][n] for row in found}) for n in names})


# ---- accuracies -------------------------------------------------------------------------------


def accuracy(subject: Subject, bench: Bench) -> Measured:
    """Acc_r, Acc_f and AUS of all rows in mixed batches; confusions and routings as details."""
    draw = RowDraw(subject.rows, bench.problem.retain_rows, bench.seed)
    parts = []
    for images, labels in read(bench.batches, bench.num_classes):
        rows = draw(labels)
        predictions = subject.logits(images, rows).argmax(1)
        parts.append((predictions, labels.repeat_interleave(rows.shape[1]), rows.flatten()))
    predictions, labels, rows = (torch.cat(part) for part in zip(*parts))
    bench.refuse_absent(labels, "data")
    retain = metrics.retain_accuracy(predictions, labels, rows, expected=subject.rows).by_row
    forget = metrics.forget_accuracy(predictions, labels, rows, expected=subject.rows).by_row
    before = bench.original.by_row
    aus = {row: metrics.aus(retain[row], forget[row], before[row]) for row in retain}
    cells = {"Acc_r": Cell(retain), "Acc_f": Cell(forget), "AUS": Cell(aus)}
    own = rows == labels
    details: dict[str, Any] = {"routing": _routings(predictions[own], labels[own], subject.rows)}
    if bench.num_classes <= FULL_CONFUSION:
        by_row = metrics.confusion_by_row(predictions, labels, rows, bench.num_classes)
        details["confusion"] = {row: counts.tolist() for row, counts in by_row.items()}
    return Measured(cells, details)


def _routings(
    predictions: Tensor, labels: Tensor, rows: tuple[int, ...]
) -> dict[int, dict[int, float]]:
    """Class -> predicted class -> share of its images, under its own row; zeros left out."""
    found = {}
    for row in rows:
        counts = torch.bincount(predictions[labels == row]).double()
        shares = (counts / counts.sum()).tolist()
        found[row] = {label: share for label, share in enumerate(shares) if share}
    return found


def sets(subject: Subject, bench: Bench) -> Measured:
    """Acc_r and Acc_f when each image forgets a random set, which holds its class half the time."""
    if subject.sets is None:
        return Measured({})
    images, labels = bench.test
    cells: dict[str, Cell] = {}
    for size in bench.problem.set_sizes:
        wanted = random_sets(labels, bench.num_classes, size, bench.seed)
        logits = torch.cat(
            [
                _set_logits(subject, some, chosen)
                for some, chosen in zip(torch.split(images, PAIRS), torch.split(wanted, PAIRS))
            ]
        )
        retain, forget = metrics.set_accuracies(logits, labels, wanted)
        cells |= {f"{size} Acc_r": Cell(value=retain), f"{size} Acc_f": Cell(value=forget)}
    return Measured(cells)


@torch.no_grad()
def _set_logits(subject: Subject, images: Tensor, wanted: Tensor) -> Tensor:
    assert subject.sets is not None
    if subject.filtered is None:
        return subject.sets(images, wanted).cpu()
    with evaluating(subject.filtered):
        device = subject.filtered.alphas.device
        return subject.sets(images.to(device), wanted.to(device)).float().cpu()


def random_sets(labels: Tensor, num_classes: int, size: int, seed: int) -> Tensor:
    """A random set of ``size`` classes per sample, bool; every other sample's holds its label.

    Example:
        >>> random_sets(torch.tensor([0, 1]), 4, 2, seed=0).sum(1)
        tensor([2, 2])
    """
    generator = torch.Generator().manual_seed(seed + size)
    scores = torch.rand(len(labels), num_classes, generator=generator)
    own = torch.arange(len(labels)) % 2 == 0
    scores.scatter_(1, labels[:, None], torch.where(own, 2.0, -1.0)[:, None])
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter_(1, scores.topk(size, 1).indices, True)


def zrf(subject: Subject, bench: Bench) -> Measured:
    """ZRF on the test sample of each class under its row."""
    images, labels = bench.own_test
    kept = torch.isin(labels, torch.tensor(subject.rows))
    images, labels, references = images[kept], labels[kept], bench.reference_logits[:, kept]
    logits = subject.own_logits(images, labels)

    def number(row: int) -> dict[str, float | None]:
        own = labels == row
        return {"ZRF": metrics.zrf(logits[own], references[:, own])}

    return _by_class(subject, number)


# ---- what is left -----------------------------------------------------------------------------


def probe(subject: Subject, bench: Bench) -> Measured:
    """Linear probe and nearest class mean on the features of training and test sample."""
    kept: dict[str, metrics.Probe] = {}

    def number(row: int) -> dict[str, float | None]:
        train, test = bench.seen(subject, row)
        if not (subject.shared and kept):
            known = (train.features, bench.train[1], test.features, bench.test[1])
            kept["probe"] = metrics.linear_probe(*known)
            kept["NCM"] = metrics.nearest_class_mean(*known)
        return {
            f"{name} {half}": value
            for name, found in kept.items()
            for half, value in zip("fr", _halves(found.by_class, row))
        }

    return _by_class(subject, number)


def _halves(by_class: Mapping[int, float], row: int) -> tuple[float, float]:
    """The number of a class, and the mean of the others."""
    others = [value for label, value in by_class.items() if label != row]
    return by_class[row], sum(others) / len(others)


def membership(subject: Subject, bench: Bench) -> Measured:
    """Both attacks on the forgotten class's training images."""

    def number(row: int) -> dict[str, float | None]:
        train, test = bench.seen(subject, row)
        forgotten, other = bench.train[1] == row, bench.test[1] != row
        retain = train.logits[~forgotten], bench.train[1][~forgotten]
        outside = test.logits[other], bench.test[1][other]
        asked = train.logits[forgotten], bench.train[1][forgotten]
        return {
            "MIA confidence": metrics.confidence_attack(retain, outside, asked, seed=bench.seed),
            "MIA entropy": metrics.entropy_attack(retain[0], outside[0], asked[0]),
        }

    return _by_class(subject, number)


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

    return _by_class(subject, number)


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

    return _by_class(subject, number)


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


def curves(subject: Subject, bench: Bench) -> Measured:
    """Areas of insertion and deletion, by gate and in a random order."""
    if subject.filtered is None:
        return Measured({})
    from wfilter import explain

    wf, budget, points = subject.filtered, bench.budget, {}

    def number(row: int) -> dict[str, float | None]:
        images = bench.of_class(row)[0][: budget.curve_images]
        found = explain.class_curves(wf, images, row, steps=budget.curve_steps, seed=bench.seed)
        by_name = {name.replace("_", " "): curve for name, curve in vars(found).items()}
        points[row] = {name: list(curve.values) for name, curve in by_name.items()}
        return {name: curve.auc for name, curve in by_name.items()}

    measured = _by_class(subject, number)
    return Measured(measured.cells, {"curves": points})


# ---- cost -------------------------------------------------------------------------------------


def cost(subject: Subject, bench: Bench) -> Measured:
    """What it takes to forget any class: seconds, numbers to store, time to switch."""

    def number(row: int) -> dict[str, float | None]:
        if subject.filtered is not None:
            alphas = subject.filtered.alphas
            stored, size = alphas.numel(), alphas.numel() * alphas.element_size()
            wanted = torch.tensor([row])
            switch = _milliseconds(lambda: subject.filtered and subject.filtered.gates(wanted))
        else:
            own = changed_tensors(subject.model(row), bench.base)
            stored = sum(tensor.numel() for tensor in own) * bench.num_classes
            size = sum(t.numel() * t.element_size() for t in own) * bench.num_classes
            served = [torch.empty_like(tensor) for tensor in own]
            switch = _milliseconds(lambda: [old.copy_(new) for old, new in zip(served, own)])
        found: dict[str, float | None] = {"stored": stored, "MB": size / 1e6, "switch ms": switch}
        if row in subject.seconds:
            found["s/class"] = subject.seconds[row]
            found["s, all"] = subject.seconds[row] * bench.num_classes
        return found

    return _by_class(subject, number)


def changed_tensors(model: nn.Module, base: nn.Module) -> list[Tensor]:
    """Tensors of a model that the base model does not have: what must be stored beside it.

    Example:
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


@torch.no_grad()
def _milliseconds(action: Callable[[], object], repeats: int = 7) -> float:
    """Median wall time, the first of all left out."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[1:])


# ---- by name ----------------------------------------------------------------------------------


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
        >>> bench = Bench(nn.Linear(4, 2), [(torch.ones(2, 4), torch.arange(2))], None, (0,), 2)
        >>> sorted(measure("accuracy", Subject.of_one("original", bench.base, (0,)), bench).cells)
        ['AUS', 'Acc_f', 'Acc_r']
    """
    with seeded(bench.seed):
        return MEASURES[name].run(subject, bench)
