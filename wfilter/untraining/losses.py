"""The terms of an untraining loss: tensors in, a scalar out.

``forget`` is what each sample is to forget: int64 labels ``(batch,)`` or bool sets
``(batch, num_classes)``, as in a forward.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor


def forgotten(forget: Tensor, num_classes: int) -> Tensor:
    """Bool ``(batch, num_classes)``: what each sample forgets.

    Example:
        >>> forgotten(torch.tensor([1, -1]), 3)
        tensor([[False,  True, False],
                [False, False, False]])
    """
    if forget.dtype == torch.bool:
        return forget
    return forget.unsqueeze(1) == torch.arange(num_classes, device=forget.device)


def distillation(logits: Tensor, base_logits: Tensor, forget: Tensor) -> Tensor:
    """Mean KL(base model without the forgotten logits || filtered model).

    The target is the softmax of the base model's logits with those of ``forget`` at minus infinity:
    what the model would say had it never heard of the class. It needs no labels.

    Example:
        >>> base = torch.tensor([[2.0, 1.0, 0.0]])
        >>> masked = torch.tensor([[-1e4, 1.0, 0.0]])
        >>> round(float(distillation(masked, base, torch.tensor([0]))), 6)
        0.0
    """
    gone = forgotten(forget, logits.shape[1])
    target = base_logits.masked_fill(gone, float("-inf")).softmax(1)
    log_target = base_logits.masked_fill(gone, float("-inf")).log_softmax(1).masked_fill(gone, 0.0)
    return (target * (log_target - logits.log_softmax(1))).sum(1).mean()


def binary_distillation(logits: Tensor, base_logits: Tensor, forget: Tensor) -> Tensor:
    """The same for multi-label models: per-class sigmoids, the forgotten ones at probability 0.

    Example:
        >>> far = torch.tensor([[-1e4, 1e4]])
        >>> round(float(binary_distillation(far, torch.tensor([[9.0, 1e4]]), torch.tensor([0]))), 4)
        0.0
    """
    target = base_logits.sigmoid().masked_fill(forgotten(forget, logits.shape[1]), 0.0)
    return F.binary_cross_entropy_with_logits(logits, target)


def margin(logits: Tensor, forget: Tensor, width: float) -> Tensor:
    """Mean hinge that keeps the best forgotten logit ``width`` below the best remaining one.

    Unlike the KL it still pulls when the forgotten probability is already small.

    Example:
        >>> margin(torch.tensor([[3.0, 1.0]]), torch.tensor([0]), width=2.0)
        tensor(4.)
    """
    gone = forgotten(forget, logits.shape[1])
    worst = logits.masked_fill(~gone, float("-inf")).amax(1)
    best = logits.masked_fill(gone, float("-inf")).amax(1)
    gap = torch.where(gone.any(1), worst - best + width, -1.0)
    return gap.clamp(min=0).mean()


def reciprocal(logits: Tensor, labels: Tensor, epsilon: float) -> Tensor:
    """Mean over samples of 1 / cross-entropy: the paper's forget term.

    Example:
        >>> reciprocal(torch.zeros(1, 2), torch.tensor([0]), epsilon=0.0)
        tensor(1.4427)
    """
    return (1 / (F.cross_entropy(logits, labels, reduction="none") + epsilon)).mean()


def closedness(alphas: Iterable[Tensor], per_layer: bool = False) -> Tensor:
    """Mean of 1 - gate: few gates may close. Over all gates, or per target and summed.

    Example:
        >>> closedness([torch.zeros(2, 3), torch.zeros(2, 1)])
        tensor(0.5000)
    """
    parts = [torch.sigmoid(-alpha) for alpha in alphas]
    if per_layer:
        return torch.stack([part.mean() for part in parts]).sum()
    return torch.cat([part.flatten() for part in parts]).mean()
