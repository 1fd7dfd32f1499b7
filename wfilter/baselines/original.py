"""The model as it is: the upper bound of retaining, the lower bound of forgetting."""

import copy
from collections.abc import Sequence

from torch import nn

from wfilter.baselines.batches import Task
from wfilter.data.batches import Batches


def original(model: nn.Module, forget: int | Sequence[int], train: Batches) -> nn.Module:
    """A copy of the model in eval mode, nothing forgotten.

    Example:
        >>> import torch
        >>> model, batch = nn.Linear(2, 3), (torch.zeros(3, 2), torch.arange(3))
        >>> original(model, 0, [batch]) is model
        False
    """
    Task.of(model, forget, train)
    return copy.deepcopy(model).eval()
