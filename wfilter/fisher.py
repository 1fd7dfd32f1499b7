"""What closing gates costs images that are to be kept: to second order, once for all rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from wfilter.model import FilteredModel


def directions(
    wf: FilteredModel, batches: Iterable[Tensor], draws: int, generator: torch.Generator
) -> Tensor:
    """Random roots of the Fisher information of the gates, ``(images * draws, total_units)``.

    Closing gates by ``d = 1 - gate`` moves the base model's answers by a KL of ``d' F d / 2`` on
    average, to second order around all gates open, and ``F`` is the mean of ``r' r`` over these
    rows ``r``. It is the same for every row of the alphas, so with many classes it says more about
    what to keep than the few images of a class.

    Args:
        wf: The filtered model; its alphas play no part.
        batches: Batches of images.
        draws: Rows for each image.
        generator: Of the draws.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="weight")
        >>> directions(wf, [torch.randn(5, 4)], 2, torch.Generator()).shape
        torch.Size([10, 3])
    """
    found = []
    for images in batches:
        if wf._needs_probe(images):
            wf.probe(images)
        gates = torch.ones(len(images), wf.alphas.shape[1]).to(wf.alphas).requires_grad_()
        with torch.enable_grad():
            logits = wf._gated(images, gates)
        chance = logits.detach().softmax(1)
        for draw in range(draws):
            noise = torch.randn(logits.shape, generator=generator).to(chance) * chance.sqrt()
            root = noise - chance * noise.sum(1, keepdim=True)  # covariance diag(p) - p p'
            keep = draw + 1 < draws
            found.append(torch.autograd.grad(logits, gates, root, retain_graph=keep)[0])
    return torch.cat(found)
