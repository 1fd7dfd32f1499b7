"""Logit mask: never answer with the class. It costs nothing, and the features still know all."""

import copy
from collections.abc import Sequence

from torch import nn

from wfilter.baselines.batches import Task
from wfilter.core.mask import Mask
from wfilter.data.batches import Batches


def logit_mask(model: nn.Module, forget: int | Sequence[int], train: Batches) -> nn.Module:
    """A copy of the model that cannot answer with a forgotten class; its features are unchanged.

    Training it again never brings the class back, since the mask is no parameter: the
    relearn time says nothing about what the model knows; the probe does.

    Example:
        >>> import torch
        >>> model, batch = nn.Linear(2, 3), (torch.zeros(3, 2), torch.arange(3))
        >>> logit_mask(model, 1, [batch])(torch.ones(1, 2)).isinf()
        tensor([[False,  True, False]])
    """
    task = Task.of(model, forget, train)
    return nn.Sequential(copy.deepcopy(model), Mask(task.classes).to(task.device)).eval()
