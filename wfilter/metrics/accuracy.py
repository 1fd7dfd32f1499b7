"""Accuracy on the forget and the retain half, by row, and what follows from it.

A *pair* is one image evaluated under one row. It is a forget pair when the row is the image's
label and a retain pair otherwise. All numbers are fractions in 0..1.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wfilter.data.checks import as_predictions, check_labels


@dataclass(frozen=True)
class RowScores:
    """One number for each row, with their mean and the worst of them.

    Example:
        >>> scores = RowScores({0: 0.9, 1: 0.5}, higher_is_better=True)
        >>> scores.mean, scores.worst, scores.worst_row
        (0.7, 0.5, 1)
    """

    by_row: dict[int, float]
    higher_is_better: bool

    @property
    def mean(self) -> float:
        """Mean over rows, each row counting once however many samples it has."""
        return sum(self.by_row.values()) / len(self.by_row)

    @property
    def worst_row(self) -> int:
        """The row with the worst number."""
        pick = min if self.higher_is_better else max
        return pick(self.by_row, key=self.by_row.__getitem__)

    @property
    def worst(self) -> float:
        """The worst row's number."""
        return self.by_row[self.worst_row]


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


def forget_accuracy(
    outputs: Tensor, labels: Tensor, rows: Tensor | int, *, expected: Iterable[int] | None = None
) -> RowScores:
    """Acc_f: for each row c, accuracy on the samples of class c under row c. Lower is better.

    Args:
        outputs: logits (pairs, classes) or predictions (pairs,).
        labels: true classes (pairs,).
        rows: the row each pair was evaluated under (pairs,), or one row for all.
        expected: rows that must have a forget pair; default: every row in ``rows``.

    Example:
        >>> predictions, labels = torch.tensor([1, 0, 0, 1]), torch.tensor([0, 0, 1, 1])
        >>> forget_accuracy(predictions, labels, rows=labels).by_row
        {0: 0.5, 1: 0.5}
    """
    hits, labels, rows = _pairs(outputs, labels, rows)
    return _by_row(hits, rows, labels == rows, "forget", expected)


def retain_accuracy(
    outputs: Tensor, labels: Tensor, rows: Tensor | int, *, expected: Iterable[int] | None = None
) -> RowScores:
    """Acc_r: for each row c, accuracy on the samples of every other class under row c.

    Arguments as in `forget_accuracy`. Higher is better.

    Example:
        >>> predictions, labels = torch.tensor([1, 1, 2]), torch.tensor([0, 1, 2])
        >>> retain_accuracy(predictions, labels, rows=0).mean
        1.0
    """
    hits, labels, rows = _pairs(outputs, labels, rows)
    return _by_row(hits, rows, labels != rows, "retain", expected)


def set_accuracies(
    outputs: Tensor, labels: Tensor, forget: int | Sequence[int] | Tensor
) -> tuple[float, float]:
    """Acc_r and Acc_f pooled over samples, when sets of classes are forgotten.

    Args:
        outputs: logits (samples, classes) or predictions (samples,).
        labels: true classes (samples,).
        forget: one class or several, the same for all samples; or bool (samples, classes).

    Example:
        >>> predictions, labels = torch.tensor([2, 2, 2, 2]), torch.tensor([0, 1, 2, 2])
        >>> set_accuracies(predictions, labels, forget=[0, 1])
        (1.0, 0.0)
    """
    predictions = as_predictions(outputs)
    labels = check_labels(labels, len(predictions))
    if isinstance(forget, Tensor) and forget.dtype == torch.bool:
        forgotten = forget.gather(1, labels[:, None]).squeeze(1)
    else:
        forgotten = torch.isin(labels, torch.as_tensor(forget, device=labels.device))
    if not 0 < int(forgotten.sum()) < len(labels):
        half = "forget" if not forgotten.any() else "retain"
        raise ValueError(f"no sample belongs to the {half} half for forget={forget}.")
    hits = (predictions == labels).double()
    return float(hits[~forgotten].mean()), float(hits[forgotten].mean())


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


def confusion_by_row(
    outputs: Tensor, labels: Tensor, rows: Tensor, num_classes: int
) -> dict[int, Tensor]:
    """For each row in ``rows``, the confusion of the pairs evaluated under it.

    Example:
        >>> labels = torch.tensor([0, 1])
        >>> confusion_by_row(torch.tensor([1, 1]), labels, labels, 2)[0]
        tensor([[0, 1],
                [0, 0]])
    """
    predictions = as_predictions(outputs)
    rows = check_labels(rows, len(predictions), num_classes)
    return {
        row: confusion(predictions[rows == row], labels[rows == row], num_classes)
        for row in sorted(set(rows.tolist()))
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
    """Mean absolute difference to the retrained model over the metrics of both.

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


def _pairs(outputs: Tensor, labels: Tensor, rows: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
    """Hits as float64, labels and rows, each (pairs,)."""
    predictions = as_predictions(outputs)
    labels = check_labels(labels, len(predictions))
    if isinstance(rows, int):
        rows = torch.full_like(labels, rows)
    if len(rows) != len(labels) or rows.ndim != 1 or (len(rows) and int(rows.min()) < 0):
        raise ValueError(
            f"rows has shape {tuple(rows.shape)} for {len(labels)} pairs, smallest entry "
            f"{int(rows.min()) if rows.numel() else 'none'}; expected one class per pair, 0 or "
            "above. Leave out pairs that forget nothing (-1)."
        )
    return (predictions == labels).double(), labels, rows.long()


def _by_row(
    hits: Tensor, rows: Tensor, kept: Tensor, half: str, expected: Iterable[int] | None
) -> RowScores:
    """Mean of the kept hits for each expected row."""
    wanted = sorted(set(rows.tolist() if expected is None else expected))
    size = max([*wanted, int(rows.max()) if len(rows) else 0], default=0) + 1
    counts = torch.bincount(rows[kept], minlength=size).tolist()
    sums = torch.bincount(rows[kept], weights=hits[kept], minlength=size).tolist()
    missing = [row for row in wanted if not counts[row]]
    if missing or not wanted:
        raise ValueError(
            f"no {half} pair for row(s) {missing[:10]}: the data has no such samples under them. "
            "Add samples of these classes, or name the rows to report with expected=."
        )
    by_row = {row: sums[row] / counts[row] for row in wanted}
    return RowScores(by_row, higher_is_better=half == "retain")
