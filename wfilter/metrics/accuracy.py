"""Accuracy on the forget and the retain half, by class, and what follows from it.

A *pair* is one image evaluated while one class is forgotten. It is a forget pair when that class is
the image's label and a retain pair otherwise. All numbers are fractions in 0..1.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wfilter.core.renamed import renamed_keywords
from wfilter.data.checks import as_predictions, check_labels
from wfilter.data.reading import read
from wfilter.metrics.cells import Better, Cell, Column, RowScores
from wfilter.metrics.method import Draw, Method
from wfilter.metrics.problem import Problem
from wfilter.metrics.registry import Measured, metric

FULL_CONFUSION = 50  # with more classes than this a report keeps no whole confusions
GAP = ("Acc_r", "Acc_f", "MIA confidence", "probe f")
"""The columns over which the gap to the retrained model is taken."""


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Share of samples whose prediction is the label.

    Args:
        outputs: logits (samples, classes) or predictions (samples,).
        labels: true classes (samples,).

    Example:
        >>> accuracy(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 1, 0, 1]))
        0.75
    """
    predictions = as_predictions(outputs)
    labels = check_labels(labels, len(predictions))
    if not len(labels):
        raise ValueError("outputs has no samples. Check that the class is in the data at all.")
    return float((predictions == labels).double().mean())


def both_accuracies(outputs: Tensor, labels: Tensor, forgotten: Tensor) -> tuple[float, float]:
    """Acc_r and Acc_f pooled over samples; NaN for a half that has no samples.

    Args:
        outputs: logits (samples, classes) or predictions (samples,).
        labels: true classes (samples,).
        forgotten: bool (samples,): whether the sample's own class is forgotten.

    Example:
        >>> predictions, labels = torch.tensor([2, 2, 2, 2]), torch.tensor([0, 1, 2, 2])
        >>> both_accuracies(predictions, labels, forgotten=labels < 2)
        (1.0, 0.0)
    """
    if not len(outputs):
        return math.nan, math.nan
    predictions = as_predictions(outputs)
    hits = (predictions == check_labels(labels, len(predictions))).double()
    retain, forget = (
        float(half.mean()) if len(half) else math.nan
        for half in (hits[~forgotten], hits[forgotten])
    )
    return retain, forget


@renamed_keywords(rows="forget", expected="classes")
def forget_accuracy(
    outputs: Tensor, labels: Tensor, forget: Tensor | int, *, classes: Iterable[int] | None = None
) -> RowScores:
    """Acc_f: for each class, accuracy on its samples while it is forgotten. Lower is better.

    Args:
        outputs: logits (pairs, classes) or predictions (pairs,).
        labels: true classes (pairs,).
        forget: the class each pair was made to forget (pairs,), or one class for all.
        classes: to report; each must have a pair. Default: every class in ``forget``.

    Example:
        >>> predictions, labels = torch.tensor([1, 0, 0, 1]), torch.tensor([0, 0, 1, 1])
        >>> forget_accuracy(predictions, labels, forget=labels).by_row
        {0: 0.5, 1: 0.5}
    """
    hits, labels, forget = _pairs(outputs, labels, forget)
    return _by_row(hits, forget, labels == forget, "forget", classes)


@renamed_keywords(rows="forget", expected="classes")
def retain_accuracy(
    outputs: Tensor, labels: Tensor, forget: Tensor | int, *, classes: Iterable[int] | None = None
) -> RowScores:
    """Acc_r: for each class, accuracy on the samples of all others while the class is forgotten.

    Arguments as in `forget_accuracy`. Higher is better.

    Example:
        >>> predictions, labels = torch.tensor([1, 1, 2]), torch.tensor([0, 1, 2])
        >>> retain_accuracy(predictions, labels, forget=0).mean
        1.0
    """
    hits, labels, forget = _pairs(outputs, labels, forget)
    return _by_row(hits, forget, labels != forget, "retain", classes)


def confusion(outputs: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Counts, int64 (num_classes, num_classes): entry (i, j) is label i predicted as j.

    Example:
        >>> confusion(torch.tensor([1, 1, 0]), torch.tensor([0, 1, 0]), num_classes=2)
        tensor([[1, 1],
                [0, 1]])
    """
    predictions = check_labels(as_predictions(outputs), len(outputs), num_classes)
    labels = check_labels(labels, len(predictions), num_classes)
    counts = torch.bincount(labels * num_classes + predictions, minlength=num_classes**2)
    return counts.view(num_classes, num_classes)


@renamed_keywords(rows="forget")
def confusion_by_row(
    outputs: Tensor, labels: Tensor, forget: Tensor, num_classes: int
) -> dict[int, Tensor]:
    """For each class in ``forget``, the confusion of the pairs that forget it.

    Example:
        >>> labels = torch.tensor([0, 1])
        >>> confusion_by_row(torch.tensor([1, 1]), labels, labels, 2)[0]
        tensor([[0, 1],
                [0, 0]])
    """
    predictions = as_predictions(outputs)
    forget = check_labels(forget, len(predictions), num_classes)
    return {
        row: confusion(predictions[forget == row], labels[forget == row], num_classes)
        for row in sorted(set(forget.tolist()))
    }


def routing(outputs: Tensor, labels: Tensor, forget: int, num_classes: int) -> Tensor:
    """Where the forgotten class's images go: the share predicted as each class, (num_classes,).

    Only samples with label ``forget`` count; entry ``forget`` is the forget accuracy.

    Example:
        >>> routing(torch.tensor([1, 2, 2, 1]), torch.tensor([0, 0, 0, 1]), 0, 3)
        tensor([0.0000, 0.3333, 0.6667], dtype=torch.float64)
    """
    row = confusion(outputs, labels, num_classes)[forget].double()
    if not row.sum():
        raise ValueError(f"class {forget} has no samples in the data.")
    return row / row.sum()


def routing_distance(routing: Tensor, retrained: Tensor) -> float:
    """Total variation between two routings: 0 where they agree, 1 where they share no class.

    It says how much of the forgotten class goes elsewhere than the retrained model sends it.

    Example:
        >>> routing_distance(torch.tensor([0.0, 0.5, 0.5]), torch.tensor([0.0, 1.0, 0.0]))
        0.5
    """
    if routing.shape != retrained.shape:
        raise ValueError(
            f"the routings have shapes {tuple(routing.shape)}\nand {tuple(retrained.shape)}. "
            "Compare models over the same classes."
        )
    return float((routing.double() - retrained.double()).abs().sum() / 2)


def aus(retain: float, forget: float, original: float) -> float:
    """Adaptive unlearning score, (1 - (Acc_original - Acc_r)) / (1 + Acc_f); 1 is ideal.

    Source: Cotogni et al., DUCK, arXiv 2312.02052, for the removal of a class.

    Args:
        retain: Acc_r after forgetting, in 0..1.
        forget: Acc_f after forgetting, in 0..1.
        original: Acc_r of the original model, in 0..1.

    Example:
        >>> aus(retain=0.75, forget=0.0, original=1.0)
        0.75
    """
    for name, value in {"retain": retain, "forget": forget, "original": original}.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is not a fraction in 0..1. Divide percentages first.")
    return (1 - (original - retain)) / (1 + forget)


def average_gap(values: Mapping[str, float], retrained: Mapping[str, float]) -> float:
    """Mean absolute difference to the retrained model over metrics that both must have.

    Source: "average gap" of Fan et al., SalUn, arXiv 2310.12508. Lower is better.

    Example:
        >>> average_gap({"Acc_r": 0.5, "Acc_f": 0.25}, {"Acc_r": 1.0, "Acc_f": 0.0})
        0.375
    """
    if not values or set(values) != set(retrained):
        raise ValueError(
            f"the metrics differ: {sorted(values)}\nagainst the retrained model's "
            f"{sorted(retrained)}. Compare the same metrics."
        )
    return sum(abs(values[name] - retrained[name]) for name in values) / len(values)


def _pairs(outputs: Tensor, labels: Tensor, forget: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
    """Hits (1.0 where the prediction is right), labels and forgotten classes, each (pairs,)."""
    predictions = as_predictions(outputs)
    labels = check_labels(labels, len(predictions))
    if isinstance(forget, int):
        forget = torch.full_like(labels, forget)
    if len(forget) != len(labels) or forget.ndim != 1 or (len(forget) and int(forget.min()) < 0):
        raise ValueError(
            f"forget has shape {tuple(forget.shape)} for {len(labels)} pairs, smallest entry "
            f"{int(forget.min()) if forget.numel() else 'none'}; expected one class per pair, 0 or "
            "above. Leave out pairs that forget nothing (-1)."
        )
    return (predictions == labels).double(), labels, forget.long()


def _by_row(
    hits: Tensor, forget: Tensor, kept: Tensor, half: str, classes: Iterable[int] | None
) -> RowScores:
    """For each class asked for, the mean of ``hits`` over its ``kept`` pairs."""
    wanted = sorted(set(forget.tolist() if classes is None else classes))
    size = max([*wanted, int(forget.max()) if len(forget) else 0], default=0) + 1
    counts = torch.bincount(forget[kept], minlength=size).tolist()
    sums = torch.bincount(forget[kept], weights=hits[kept], minlength=size).tolist()
    missing = [row for row in wanted if not counts[row]]
    if missing or not wanted:
        raise ValueError(
            f"no {half} pair for class(es) {missing[:10]}: the data has no such samples. "
            "Add samples of these classes, or name the classes to report with classes=."
        )
    by_row = {row: sums[row] / counts[row] for row in wanted}
    return RowScores(by_row, higher_is_better=half == "retain")


# ---- measured ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """What a method answers to pairs of an image and a class to forget; all (pairs,).

    Example:
        >>> answers = Answers(torch.tensor([1, 1]), torch.tensor([0, 1]), torch.tensor([0, 0]))
        >>> answers.retain.mean, answers.forget.mean
        (1.0, 0.0)
    """

    predictions: Tensor
    labels: Tensor
    forgotten: Tensor

    @property
    def retain(self) -> RowScores:
        """Acc_r of every class that was forgotten."""
        return retain_accuracy(self.predictions, self.labels, self.forgotten)

    @property
    def forget(self) -> RowScores:
        """Acc_f of every class that was forgotten."""
        return forget_accuracy(self.predictions, self.labels, self.forgotten)

    def routing(self, row: int, num_classes: int) -> Tensor:
        """Where the images of a class go once it is forgotten, (num_classes,)."""
        own = self.forgotten == row
        return routing(self.predictions[own], self.labels[own], row, num_classes)


def answers(method: Method, problem: Problem) -> Answers:
    """The answers to all test images, each made to forget its own class and others in turn.

    Example:
        >>> base = torch.nn.Linear(4, 2)
        >>> problem = Problem(base, [(torch.ones(2, 4), torch.arange(2))], None, (0, 1), 2)
        >>> answers(Method.of_one("original", base, (0, 1)), problem).forgotten
        tensor([0, 1, 0, 1])
    """
    draw = Draw(method.classes, problem.retain_rows, problem.seed)
    parts = []
    for images, labels in read(problem.batches, problem.num_classes):
        forget = draw(labels)
        predictions = method.logits(images, forget).argmax(1)
        parts.append((predictions, labels.repeat_interleave(forget.shape[1]), forget.flatten()))
    answered = Answers(*(torch.cat(part) for part in zip(*parts)))
    problem.refuse_absent(answered.labels, "data")
    return answered


def _columns(problem: Problem) -> list[Column]:
    """Columns of the accuracies, and of what follows from them and the retrained model."""
    limit, group, bar = problem.retain_rows, "accuracy", "against the retrained model"
    tried = (
        "all rows"
        if limit is None
        else f"{limit} random rows for each image, dealt evenly out of {len(problem.classes)}"
    )
    retain = f"Accuracy on the other classes, {tried}; mean of rows."
    forget = "Accuracy on the forgotten class; mean of rows."
    aus = "(1 - (Acc_r of the original - Acc_r)) / (1 + Acc_f); 1 is ideal (arXiv 2312.02052)."
    routing = (
        "Share of the forgotten class's images sent elsewhere than the retrained model sends them "
        "(total variation)."
    )
    gap = f"Mean absolute difference over {', '.join(GAP)}, those the retrained model has."
    return [
        Column("Acc_r", group, "higher", retain, over="retain test"),
        Column("Acc_f", group, "lower", forget, over="forget test"),
        _worst("Acc_r", "higher", "lowest"),
        _worst("Acc_f", "lower", "highest"),
        Column("AUS", group, "higher", aus, "number"),
        Column("routing", bar, "lower", routing, derived="routing"),
        Column("gap", bar, "lower", gap, derived="gap", source=", ".join(GAP)),
    ]


def _worst(source: str, better: Better, word: str) -> Column:
    text = f"The row with the {word} {source}."
    return Column(f"worst {source}", "accuracy", better, text, derived="worst", source=source)


@metric("accuracy", _columns, order=10)
def measure_accuracy(method: Method, problem: Problem) -> Measured:
    """Acc_r, Acc_f and AUS of all classes in mixed batches; confusions and routings as details."""
    answered = answers(method, problem)
    retain, forget, before = answered.retain.by_row, answered.forget.by_row, problem.original.by_row
    scores = {row: aus(retain[row], forget[row], before[row]) for row in retain}
    cells = {"Acc_r": Cell(retain), "Acc_f": Cell(forget), "AUS": Cell(scores)}
    shares = {row: answered.routing(row, problem.num_classes).tolist() for row in method.classes}
    details: dict[str, Any] = {
        "routing": {r: {c: x for c, x in enumerate(routed) if x} for r, routed in shares.items()}
    }
    if problem.num_classes <= FULL_CONFUSION:
        by_row = confusion_by_row(
            answered.predictions, answered.labels, answered.forgotten, problem.num_classes
        )
        details["confusion"] = {row: counts.tolist() for row, counts in by_row.items()}
    return Measured(cells, details)
