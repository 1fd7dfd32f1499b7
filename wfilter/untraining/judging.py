"""What each row keeps and forgets, on images that no step has seen, and whether that is enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wfilter.metrics.accuracy import forget_accuracy, retain_accuracy
from wfilter.untraining.kept import Kept
from wfilter.untraining.recipes import Auto
from wfilter.untraining.sample import Sample

OTHERS, ENOUGH = 3, 2500  # rows under which each image is judged at least; pairs that suffice
SLACK = 0.02  # a single row may lose so much more than the mean: it is judged on few images


@dataclass(frozen=True)
class Judgement:
    """Accuracies in 0..1 of each row that has images to judge it by.

    Attributes:
        classes: How many rows there are.
        retain: Under the row, on images of other classes.
        forget: Under the row, on images of its own class.
        original: Of the base model, on the very images of ``retain``.
    """

    classes: int
    retain: dict[int, float]
    forget: dict[int, float]
    original: dict[int, float]

    def rows(self) -> dict[int, tuple[float, float, float]]:
        """Retain, forget and the base model's accuracy of each row that was judged."""
        return {r: (self.retain.get(r, 1.0), f, self.original.get(r, 1.0))
                for r, f in self.forget.items()}  # fmt: skip

    def means(self) -> tuple[float, float]:
        """Retain and forget, mean over the rows."""
        return _mean(self.retain), _mean(self.forget)

    def lost(self) -> float:
        """What the rows lose on other classes, mean over the rows."""
        return _mean(self.original) - _mean(self.retain)

    def lagging(self, bar: Auto) -> list[int]:
        """The rows that keep the whole from meeting the bar."""
        slow = {r for r, value in self.forget.items() if value > bar.bar_worst}
        if _mean(self.forget) > bar.bar_forget:
            slow |= {r for r, value in self.forget.items() if value > bar.bar_forget}
        loss = {r: self.original[r] - value for r, value in self.retain.items()}
        slow |= {r for r, value in loss.items() if value > bar.bar_retain + SLACK}
        if self.lost() > bar.bar_retain:
            slow |= {r for r, value in loss.items() if value > bar.bar_retain}
        return sorted(slow)

    def scores(self, bar: Auto) -> Tensor:
        """How far each row is from the bar, ``(num_classes,)``; 0 where it meets it."""
        found = torch.zeros(self.classes)
        for row, value in self.forget.items():
            found[row] += max(0.0, value - bar.bar_forget)
        for row, value in self.retain.items():
            found[row] += max(0.0, self.original[row] - value - bar.bar_retain)
        return found


def _mean(by_row: dict[int, float]) -> float:
    return sum(by_row.values()) / max(1, len(by_row))


@torch.no_grad()
def judge(kept: Kept, sample: Sample, base: Tensor, classes: int, seed: int) -> Judgement:
    """Run the held-out images, or all where none is, under their own rows and some others."""
    held = sample.held if bool(sample.held.any()) else torch.ones_like(sample.held)
    index = held.nonzero()[:, 0]
    rows = sample.rows[index]
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(index), classes, generator=generator)
    away = scores.scatter(1, rows[:, None], -1.0).argsort(1, descending=True)
    others = away[:, : min(max(OTHERS, ENOUGH // len(index)), classes - 1)]
    images = torch.cat([index, index.repeat_interleave(others.shape[1])])
    forget = torch.cat([rows, others.flatten()])
    logits = _logits(kept, images, forget)
    if sample.labels is not None:
        return _of_many(logits, base[images], sample.labels[images], forget, len(index), classes)
    labels = sample.rows[images]
    own, rest = slice(0, len(index)), slice(len(index), None)
    return Judgement(
        classes,
        retain_accuracy(logits[rest], labels[rest], forget[rest]).by_row,
        forget_accuracy(logits[own], labels[own], forget[own]).by_row,
        retain_accuracy(base[images[rest]], labels[rest], forget[rest]).by_row,
    )


def _logits(kept: Kept, images: Tensor, forget: Tensor) -> Tensor:
    forget = forget.to(kept.alphas.device)
    parts = torch.split(torch.arange(len(images)), 1024)
    return torch.cat([kept.logits(images[p], forget[p.to(forget.device)]).cpu() for p in parts])


def _of_many(
    logits: Tensor, base: Tensor, labels: Tensor, forget: Tensor, own: int, classes: int
) -> Judgement:
    """Images with several labels: a class is known where its logit is positive."""
    gone = torch.nn.functional.one_hot(forget, classes).bool()
    right, before = (logits > 0) == labels, (base > 0) == labels
    retain, original, known = {}, {}, {}
    for row in torch.unique(forget).tolist():
        here = forget == row
        retain[row] = float(right[here][~gone[here]].float().mean())
        original[row] = float(before[here][~gone[here]].float().mean())
        mine = here & labels[:, row]
        if bool(mine.any()):
            known[row] = float((logits[mine, row] > 0).float().mean())
    return Judgement(classes, retain, known, original)


def verdict(found: Judgement, bar: Auto, name: Callable[[int], str], advice: str) -> str:
    """One line: every row met the bar, or which classes are still known, how well, what to try."""
    retain, forget = found.means()
    figures = (
        f"Acc_r {100 * retain:.1f} (the base model {100 * (retain + found.lost()):.1f}), Acc_f "
        f"{100 * forget:.2f}"
    )
    lagging = found.lagging(bar)
    if not lagging:
        worst = max(found.forget.values(), default=0.0)
        return f"Every row met the bar: {figures}, worst class {100 * worst:.1f}."
    known = sorted((r for r in lagging if found.forget.get(r, 0) > bar.bar_forget),
                   key=lambda r: -found.forget[r])  # fmt: skip
    losing = [r for r in lagging if r not in known]
    parts = []
    if known:
        listed = ", ".join(f"{name(r)} ({100 * found.forget[r]:.0f} %)" for r in known[:10])
        parts.append(f"still known: {listed}{', ...' if len(known) > 10 else ''}")
    if losing:
        listed = ", ".join(
            f"{name(r)} ({100 * (found.original[r] - found.retain[r]):.1f})" for r in losing[:10]
        )
        parts.append(f"points lost on other classes by the rows of {listed}")
    return (
        f"{len(lagging)} of {found.classes} rows fall short: {'; '.join(parts)}. {figures}. Try "
        f"{advice}."
    )
