"""What one step trains on: which samples, and what each of them is to forget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wfilter.metrics.accuracy import both_accuracies


@dataclass(frozen=True)
class Pairs:
    """What one step trains on: samples of the batch, and what each of them is to forget.

    Attributes:
        sample: Index into the batch, ``(pairs,)``.
        forget: Labels ``(pairs,)`` or sets ``(pairs, num_classes)``.
        own: Whether a sample forgets its own class.
        replicas: Pairs per sample when the pairs of all samples lie together, else 1.
    """

    sample: Tensor
    forget: Tensor
    own: Tensor
    replicas: int = 1

    def accuracies(self, logits: Tensor, rows: Tensor, blended: Tensor) -> tuple[float, float]:
        """Acc_r and Acc_f of a step; blended images have no right answer and do not count.

        Args:
            logits: The filtered model's, one line for each pair.
            rows: The class of each image, on the CPU.
            blended: Bool, one for each image.
        """
        whole = ~blended[self.sample]
        labels, own = rows[self.sample][whole], self.own[whole]
        return both_accuracies(logits.detach().cpu()[whole], labels, own)

    def share(self, rank: int, world: int) -> Pairs:
        """Every ``world``-th pair of each kind, for one of several processes."""
        if world == 1:
            return self
        parts = [kind.nonzero().flatten()[rank::world] for kind in (self.own, ~self.own)]
        keep = torch.cat(parts)
        return Pairs(self.sample[keep], self.forget[keep], self.own[keep])


def paper_pairs(
    labels: Tensor, num_classes: int, expansion: int, generator: torch.Generator
) -> Pairs:
    """The paper's batch: one half forgets its own class, the other retains under other rows.

    Each retain sample appears ``expansion`` times, with rows drawn from the other classes without
    replacement while there are enough.

    Example:
        >>> pairs = paper_pairs(torch.tensor([0, 1, 2, 0]), 3, 3, torch.Generator())
        >>> pairs.sample.tolist(), pairs.own.tolist()[:3]
        ([0, 1, 2, 2, 2, 3, 3, 3], [True, True, False])
    """
    half = len(labels) // 2
    if half == 0:
        raise ValueError(
            f"a batch of {len(labels)} cannot be split into a forget and a retain half. Use a "
            "batch size of at least 2."
        )
    retain = torch.arange(half, len(labels)).repeat_interleave(expansion)
    scores = torch.rand(len(labels) - half, num_classes, generator=generator)
    scores.scatter_(1, labels[half:, None], -1.0)
    rows = scores.argsort(1, descending=True)[:, : num_classes - 1]
    rows = rows[:, torch.arange(expansion) % (num_classes - 1)].flatten()
    own = torch.arange(half + len(retain)) < half
    return Pairs(torch.cat([torch.arange(half), retain]), torch.cat([labels[:half], rows]), own)


def distill_pairs(
    labels: Tensor,
    num_classes: int,
    generator: torch.Generator,
    *,
    expansion: int = 4,
    forget_share: float = 0.3,
    set_share: float = 0.0,
    max_set: int = 5,
) -> Pairs:
    """Each sample ``expansion`` times, with a random class or set that may hold its own class.

    Example:
        >>> pairs = distill_pairs(torch.tensor([0, 1]), 3, torch.Generator(), set_share=0.75)
        >>> pairs.sample.tolist(), tuple(pairs.forget.shape)
        ([0, 0, 0, 0, 1, 1, 1, 1], (8, 3))
    """
    sample = torch.arange(len(labels)).repeat_interleave(expansion)
    number, label = len(sample), labels.repeat_interleave(expansion)
    own = torch.rand(number, generator=generator) < forget_share
    scores = torch.rand(number, num_classes, generator=generator)
    scores.scatter_(1, label[:, None], torch.where(own, 2.0, -1.0)[:, None])
    largest = min(max_set, num_classes - 1)
    if set_share == 0 or largest < 2:
        return Pairs(sample, scores.argmax(1), own, expansion)
    size = torch.randint(2, largest + 1, (number,), generator=generator)
    size[torch.rand(number, generator=generator) >= set_share] = 1
    rank = scores.argsort(1, descending=True).argsort(1)
    return Pairs(sample, rank < size[:, None], own, expansion)


def blend(images: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """About ``share`` of the images blended with another one, and which they are.

    Example:
        >>> images, which = blend(torch.rand(8, 3, 4, 4), 0.5, torch.Generator().manual_seed(0))
        >>> images.shape, which.tolist()[:4]
        (torch.Size([8, 3, 4, 4]), [False, True, False, False])
    """
    if not images.is_floating_point():
        raise TypeError(f"images of {images.dtype} cannot be blended. Give floats, or blend=0.")
    count = len(images)
    other = torch.randperm(count, generator=generator)
    chosen = torch.rand(count, generator=generator) < share
    chosen &= other != torch.arange(count)
    weight = (0.5 + 0.5 * torch.rand(count, generator=generator))[chosen].to(images)
    weight = weight.view(-1, *[1] * (images.ndim - 1))
    result, here = images.clone(), chosen.to(images.device)
    result[here] = weight * images[here] + (1 - weight) * images[other[chosen].to(images.device)]
    return result, chosen


def refuse_one_class(num_classes: int) -> None:
    """Stop where nothing would be left to retain."""
    if num_classes < 2:
        raise ValueError("untraining needs at least 2 classes: with 1 there is nothing to retain.")
