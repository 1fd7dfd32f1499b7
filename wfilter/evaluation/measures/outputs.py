"""What the outputs say: accuracies of single classes and of sets, and ZRF."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wfilter import metrics
from wfilter.data.running import evaluating
from wfilter.evaluation.cells import Cell
from wfilter.evaluation.measures.bench import Bench, Measured, by_class
from wfilter.evaluation.method import PAIRS, RowDraw, Subject, read

FULL_CONFUSION = 50  # classes up to which a report keeps whole confusions


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

    return by_class(subject, number)
