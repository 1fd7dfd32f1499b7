"""Judge each row on held-out images: what it keeps and forgets, and whether that is enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wfilter.core.forget import as_sets
from wfilter.metrics.accuracy import forget_accuracy, retain_accuracy
from wfilter.untraining.kept import Blend
from wfilter.untraining.objectives import Auto
from wfilter.untraining.sample import Sample

# Logits of images by index, each forgetting a label (-1: nothing) or a set, perhaps blended.
Answer = Callable[[Tensor, Tensor, Blend | None], Tensor]

OTHERS, ENOUGH = 2, 2000  # rows under which each image is judged at least; pairs that suffice
LARGEST_SET = 5
SLACK = 0.02  # a single row may lose so much more than the mean: it is judged on few images
# The base model has mostly learned the images it is judged on, and is surer of them than of new
# ones. Blended with another by so much at most, they change their answers about as often as new
# images do, and so many of these changes are losses: found on digits kept from the training of
# small networks, by `benchmarks/judging.py`.
BLENDED = 0.3
OF_BLENDS = 0.6


@dataclass(frozen=True)
class Sets:
    """Accuracies under random sets of classes, in 0..1, pooled over images.

    Attributes:
        retain: Of images whose class is not in the set.
        forget: Of images whose class is.
        original: Of the base model, on the images of ``retain``.
        size: Mean number of classes in a set.
    """

    retain: float
    forget: float
    original: float
    size: float

    def short_by(self, bar: Auto) -> float:
        """How far the sets are from the bar, 0 at best: one may lose what its rows together may."""
        lost = self.original - self.retain - self.size * bar.bar_retain
        return max(0.0, lost) + max(0.0, self.forget - bar.bar_worst)


@dataclass(frozen=True)
class Judgement:
    """Accuracies in 0..1 of each row that has images to judge it by.

    Attributes:
        classes: How many rows there are.
        retain: Under the row, on images of other classes.
        forget: Under the row, on images of its own class.
        original: Of the base model, on the very images of ``retain``.
        changed: Share of blended images that the row answers otherwise than the base model would
            without the class.
        sets: The same under random sets, where they were judged.
    """

    classes: int
    retain: dict[int, float]
    forget: dict[int, float]
    original: dict[int, float]
    changed: dict[int, float] = field(default_factory=dict)
    sets: Sets | None = None

    def rows(self) -> dict[int, tuple[float, float, float]]:
        """Retain, forget and the base model's accuracy of each row that was judged."""
        return {r: (self.retain.get(r, 1.0), f, self.original.get(r, 1.0))
                for r, f in self.forget.items()}  # fmt: skip

    def means(self) -> tuple[float, float]:
        """Retain and forget, mean over the rows."""
        return _mean(self.retain), _mean(self.forget)

    def losses(self) -> dict[int, float]:
        """What each row loses on other classes: on images as they are or, if more, on blends."""
        return {
            r: max(self.original[r] - value, OF_BLENDS * self.changed.get(r, 0.0))
            for r, value in self.retain.items()
        }

    def lost(self) -> float:
        """What the rows lose on other classes, mean over the rows."""
        plain = _mean(self.original) - _mean(self.retain)
        return max(plain, OF_BLENDS * _mean(self.changed))

    def lagging(self, bar: Auto) -> list[int]:
        """The rows that keep the whole from meeting the bar."""
        slow = {r for r, value in self.forget.items() if value > bar.bar_worst}
        if _mean(self.forget) > bar.bar_forget:
            slow |= {r for r, value in self.forget.items() if value > bar.bar_forget}
        loss = self.losses()
        slow |= {r for r, value in loss.items() if value > bar.bar_retain + SLACK}
        if self.lost() > bar.bar_retain:
            slow |= {r for r, value in loss.items() if value > bar.bar_retain}
        return sorted(slow)

    @property
    def unjudged(self) -> list[int]:
        """The rows of classes without an image to judge them by."""
        return [row for row in range(self.classes) if row not in self.forget]

    def is_met(self, bar: Auto) -> bool:
        """Whether every row that was judged and the random sets meet the bar."""
        return not self.lagging(bar) and (self.sets is None or not self.sets.short_by(bar))

    def scores(self, bar: Auto) -> Tensor:
        """How far each row is from the bar, ``(num_classes,)``; 0 where it meets it."""
        distances = torch.zeros(self.classes)
        for row, value in self.forget.items():
            distances[row] += max(0.0, value - bar.bar_forget)
        for row, value in self.losses().items():
            distances[row] += max(0.0, value - bar.bar_retain)
        return distances

    def score(self, bar: Auto) -> float:
        """How far the whole is from the bar."""
        return float(self.scores(bar).mean()) + (self.sets.short_by(bar) if self.sets else 0.0)

    def figures(self) -> str:
        """The judgement's figures in one line."""
        retain, forget = self.means()
        worst, base = max(self.forget.values(), default=0.0), _mean(self.original)
        text = (
            f"Acc_r {100 * retain:.1f} (the base model {100 * base:.1f}), Acc_f "
            f"{100 * forget:.2f}, worst class {100 * worst:.1f}"
        )
        if self.changed:
            text += f", {100 * _mean(self.changed):.1f} % of blended images answered otherwise"
        if self.sets is not None:
            text += f", sets {100 * self.sets.retain:.1f} / {100 * self.sets.forget:.1f}"
        return text


def _mean(by_row: dict[int, float]) -> float:
    return sum(by_row.values()) / max(1, len(by_row))


@torch.no_grad()
def judge(answer: Answer, sample: Sample, base: Tensor, classes: int, seed: int) -> Judgement:
    """Ask about the images that rows are judged by: the same questions for a seed.

    Args:
        answer: Gives the logits that are judged.
        sample: The images.
        base: The base model's logits of all of them.
        classes: How many rows there are.
        seed: Draws rows, sets and blends.
    """
    index = sample.judged.nonzero()[:, 0]
    rows = sample.rows[index]
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(index), classes, generator=generator)
    away = scores.scatter(1, rows[:, None], -1.0).argsort(1, descending=True)
    others = away[:, : min(max(OTHERS, ENOUGH // len(index)), classes - 1)]
    images = torch.cat([index, index.repeat_interleave(others.shape[1])])
    forget = torch.cat([rows, others.flatten()])
    logits = answer(images, forget, None)
    if sample.labels is not None:
        return _of_many(logits, base[images], sample.labels[images], forget, classes)
    labels = sample.rows[images]
    own, rest = slice(0, len(index)), slice(len(index), None)
    return Judgement(
        classes,
        retain_accuracy(logits[rest], labels[rest], forget[rest]).by_row,
        forget_accuracy(logits[own], labels[own], forget[own]).by_row,
        retain_accuracy(base[images[rest]], labels[rest], forget[rest]).by_row,
        _changed(answer, index, others, classes, generator),
        _under_sets(answer, sample, base, index, classes, generator) if classes > 2 else None,
    )


def _changed(
    answer: Answer, index: Tensor, others: Tensor, classes: int, generator: torch.Generator
) -> dict[int, float]:
    """Share of blended images that each row answers otherwise than the base model without it."""
    other = index[torch.randperm(len(index), generator=generator)]
    blends = Blend(other, 1 - BLENDED * torch.rand(len(index), generator=generator))
    which = torch.arange(len(index)).repeat_interleave(others.shape[1])
    image, blend, forget = index[which], blends.part(which), others.flatten()
    base = answer(index, torch.full_like(index, -1), blends)[which]
    kept = base.argmax(1) != forget  # an image of the class is to change its answer
    wanted = base.masked_fill(as_sets(forget, classes), -torch.inf).argmax(1)
    differs = (answer(image, forget, blend).argmax(1) != wanted).float()
    asked = {row: kept & (forget == row) for row in torch.unique(forget).tolist()}
    return {row: float(differs[these].mean()) for row, these in asked.items() if bool(these.any())}


def _under_sets(
    answer: Answer,
    sample: Sample,
    base: Tensor,
    index: Tensor,
    classes: int,
    generator: torch.Generator,
) -> Sets:
    """Half of the images under a random set without their class, the other half with it."""
    image = index[torch.randperm(len(index), generator=generator)]
    labels, own = sample.rows[image], torch.arange(len(image)) % 2 == 1
    if len(image) < 2:
        image, labels, own = image.repeat(2), labels.repeat(2), torch.tensor([False, True])
    size = torch.randint(2, min(LARGEST_SET, classes - 1) + 1, (len(image),), generator=generator)
    scores = torch.rand(len(image), classes, generator=generator)
    scores.scatter_(1, labels[:, None], torch.where(own, 2.0, -1.0)[:, None])
    sets = scores.argsort(1, descending=True).argsort(1) < size[:, None]
    right = (answer(image, sets, None).argmax(1) == labels).float()
    before = (base[image].argmax(1) == labels).float()
    means = (right[~own], right[own], before[~own], size[~own].float())
    return Sets(*(float(values.mean()) for values in means))


def _of_many(
    logits: Tensor, base: Tensor, labels: Tensor, forget: Tensor, classes: int
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


def verdict(
    judgement: Judgement, bar: Auto, name: Callable[[int], str], means: str, advice: str
) -> str:
    """One line: every row met the bar, or which classes are still known, how well, what to try.

    Args:
        judgement: What the rows come to on held-out images.
        bar: What was asked for.
        name: Of a class.
        means: What forgets: gates or feature rows.
        advice: What to try where rows fall short.
    """
    lagging, bare = judgement.lagging(bar), judgement.unjudged
    unknown = ""
    if bare:
        listed = f"{', '.join(map(name, bare[:10]))}{', ...' if len(bare) > 10 else ''}"
        unknown = f" Not judged, for want of images: {listed}."
    if judgement.is_met(bar):
        which = "Every row with images" if bare else "Every row"
        return f"{which} met the bar, by {means}: {judgement.figures()}.{unknown}"
    known = sorted((r for r in lagging if judgement.forget.get(r, 0) > bar.bar_forget),
                   key=lambda r: -judgement.forget[r])  # fmt: skip
    losing, losses = [r for r in lagging if r not in known], judgement.losses()
    parts = []
    if known:
        listed = ", ".join(f"{name(r)} ({100 * judgement.forget[r]:.0f} %)" for r in known[:10])
        parts.append(f"still known: {listed}{', ...' if len(known) > 10 else ''}")
    if losing:
        listed = ", ".join(f"{name(r)} ({100 * losses[r]:.1f})" for r in losing[:10])
        parts.append(f"points lost on other classes by the rows of {listed}")
    if judgement.sets is not None and judgement.sets.short_by(bar):
        parts.append("sets of several classes lose more than their rows may together")
    return (
        f"{len(lagging)} of {judgement.classes} rows fall short with {means}: {'; '.join(parts)}. "
        f"{judgement.figures()}. Try {advice}.{unknown}"
    )
