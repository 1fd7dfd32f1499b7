"""The meaning of it all: one sample at a time, weights multiplied by hand.

Slow and obvious on purpose; every fast path is compared with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_map

from wfilter.core.bake import plain_copy
from wfilter.core.gates import check_per_sample
from wfilter.core.targets import is_standardised

if TYPE_CHECKING:
    from wfilter.core.model import FilteredModel


def one_at_a_time(wf: FilteredModel, x: Tensor, forget: Tensor) -> Any:
    """The output for a mixed batch, each sample run alone with its own weights.

    Args:
        wf: The filtered model.
        x: Images ``(batch, ...)``.
        forget: Labels ``(batch,)``, -1 for nothing, or sets ``(batch, num_classes)``.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="*")
        >>> one_at_a_time(wf, torch.ones(2, 4), torch.tensor([2, -1])).shape
        torch.Size([2, 3])
    """
    check_per_sample(forget, len(x), wf.num_classes)
    base = wf.base
    if any(is_standardised(module) for module in base.modules()):
        base = plain_copy(base).eval()
    outputs = []
    for image, wanted in zip(x, forget):
        rows = wanted.nonzero().flatten().tolist() if wanted.ndim else [int(wanted)]
        weights = gated_weights(wf, base, [row for row in rows if row >= 0])
        outputs.append(functional_call(base, weights, (image.unsqueeze(0),), tie_weights=False))
    return tree_map(lambda *parts: torch.cat(parts), *outputs)


def gated_weights(wf: FilteredModel, base: torch.nn.Module, rows: list[int]) -> dict[str, Tensor]:
    """Every target of ``base`` times the gates of each class in ``rows``, by dotted name."""
    weights = {}
    for target in wf.targets:
        path, name = target.owners[0]
        weight = getattr(base.get_submodule(path), name)
        for row in rows:
            alpha = wf.alpha[target.name][row]
            gate = (alpha > 0).to(alpha.dtype) if wf.hard else torch.sigmoid(alpha)
            weight = weight * target.spread(gate).to(weight.dtype)
        for owner in target.owners:
            weights[".".join(part for part in owner if part)] = weight
    return weights
