"""What closing gates costs images that are to be kept: to second order, once for all rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wfilter.core.model import FilteredModel
from wfilter.core.outputs import logits_of

WHOLE = 2**14  # up to so many units the matrix is kept: 1 GiB in float32
DRAWS, DRAWS_OF_ROOTS = 8, 2  # of each image at least; every root is kept, so there are few


@dataclass(frozen=True)
class Information:
    """The Fisher information ``F`` of the gates, the same for every row of the alphas.

    Closing gates by ``d = 1 - gate`` moves the base model's answers by a KL of ``d' F d / 2`` on
    average, to second order around all gates open. With many classes that says more about what to
    keep than the few images of a class.

    Attributes:
        tensor: ``F`` itself, or roots of it, ``(n, total_units)``: ``F = tensor' tensor``.
        whole: Whether it is ``F`` itself.

    Example:
        >>> roots = torch.tensor([[1.0, 2.0]])
        >>> Information(roots, whole=False).times(torch.tensor([[1.0, 0.0]]))
        tensor([[1., 2.]])
    """

    tensor: Tensor
    whole: bool

    def times(self, closed: Tensor) -> Tensor:
        """The product of rows ``(rows, total_units)`` and the matrix."""
        return closed @ self.tensor if self.whole else (closed @ self.tensor.T) @ self.tensor

    def diagonal(self) -> Tensor:
        """The diagonal of ``F``, ``(total_units,)``."""
        return self.tensor.diagonal() if self.whole else self.tensor.square().sum(0)


def information(
    wf: FilteredModel,
    batches: Sequence[Tensor],
    read: Callable[[Tensor], Tensor],
    free: Tensor,
    generator: torch.Generator,
) -> Information:
    """An estimate of the Fisher information from some images.

    Too few draws cost dearly: what they do not see looks as if it cost nothing. There are at least
    twice as many as free units where the matrix is kept; roots fewer than units are warned of.

    Args:
        wf: The filtered model; its alphas play no part.
        batches: Indices of the images, in batches.
        read: Gives the images of some indices.
        free: Bool ``(total_units,)``; for other units the information is 0.
        generator: Of the draws.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="weight")
        >>> images, free = torch.randn(5, 4), torch.tensor([True, True, False])
        >>> batches = [torch.arange(5)]
        >>> fisher = information(wf, batches, images.__getitem__, free, torch.Generator())
        >>> fisher.whole, fisher.tensor.shape
        (True, torch.Size([3, 3]))
    """
    whole, units, count = len(free) <= WHOLE, int(free.sum()), sum(map(len, batches))
    draws = max(DRAWS, math.ceil(2 * units / count)) if whole else DRAWS_OF_ROOTS
    if draws * count < units:
        warnings.warn(
            f"what closing {units} gates costs is estimated from {draws * count} draws of "
            f"{count} images: the rows will cost other images more than they need to. Give more "
            "images (fisher_images) or fewer targets.",
            stacklevel=2,
        )
    weighted = (part * free for part in roots(wf, map(read, batches), draws, generator))
    if not whole:
        kept = torch.cat([*weighted])
        return Information(kept.div_(math.sqrt(len(kept))), whole)
    total = wf.alphas.new_zeros(len(free), len(free))
    for part in weighted:
        total.addmm_(part.T, part)
    return Information(total.div_(draws * count), whole)


def roots(
    wf: FilteredModel, batches: Iterable[Tensor], draws: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """For each batch random roots, ``(images * draws, total_units)``: ``F`` is their mean square.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="weight")
        >>> next(roots(wf, [torch.randn(5, 4)], 2, torch.Generator())).shape
        torch.Size([10, 3])
    """
    for images in batches:
        gates = torch.ones(len(images), wf.alphas.shape[1]).to(wf.alphas).requires_grad_()
        with torch.enable_grad():
            logits = logits_of(wf.run_gated(images, gates))
        chance = logits.detach().softmax(1)
        by_draw = []
        for draw in range(draws):
            noise = torch.randn(logits.shape, generator=generator).to(chance) * chance.sqrt()
            root = noise - chance * noise.sum(1, keepdim=True)  # covariance diag(p) - p p'
            keep = draw + 1 < draws
            by_draw.append(torch.autograd.grad(logits, gates, root, retain_graph=keep)[0])
        yield torch.cat(by_draw)
