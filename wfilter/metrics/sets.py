"""Forgetting sets of classes: accuracy inside and outside a random set drawn for each image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wfilter.data.checks import as_predictions, check_labels
from wfilter.data.running import evaluating
from wfilter.metrics.accuracy import both_accuracies
from wfilter.metrics.cells import Cell, Column
from wfilter.metrics.method import PAIRS, Method
from wfilter.metrics.problem import Problem
from wfilter.metrics.registry import Measured, metric


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
    return both_accuracies(predictions, labels, forgotten)


def _columns(problem: Problem) -> list[Column]:
    """Columns of two accuracies for each size of set."""
    group, columns = "sets of classes", []
    for size in problem.set_sizes:
        what = f"each image forgets a random set of {size} classes, its own in it every other time"
        columns.append(Column(f"{size} Acc_r", group, "higher", f"Outside the set, {what}."))
        columns.append(Column(f"{size} Acc_f", group, "lower", f"Inside the set, {what}."))
    return columns


@metric("sets", _columns, order=20)
def measure_sets(method: Method, problem: Problem) -> Measured:
    """Acc_r and Acc_f when each image forgets a random set, which holds its class half the time."""
    if method.sets is None:
        return Measured({})
    images, labels = problem.test
    cells: dict[str, Cell] = {}
    for size in problem.set_sizes:
        wanted = random_sets(labels, problem.num_classes, size, problem.seed)
        logits = torch.cat(
            [
                _set_logits(method, some, chosen)
                for some, chosen in zip(torch.split(images, PAIRS), torch.split(wanted, PAIRS))
            ]
        )
        retain, forget = set_accuracies(logits, labels, wanted)
        cells |= {f"{size} Acc_r": Cell(value=retain), f"{size} Acc_f": Cell(value=forget)}
    return Measured(cells)


@torch.no_grad()
def _set_logits(method: Method, images: Tensor, wanted: Tensor) -> Tensor:
    assert method.sets is not None
    if method.filtered is None:
        return method.sets(images, wanted).cpu()
    with evaluating(method.filtered):
        device = method.filtered.alphas.device
        return method.sets(images.to(device), wanted.to(device)).float().cpu()


def random_sets(labels: Tensor, num_classes: int, size: int, seed: int) -> Tensor:
    """A random set of ``size`` classes per sample, bool; every second one holds the sample's label.

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
