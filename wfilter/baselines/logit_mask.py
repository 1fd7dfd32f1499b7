"""Logit mask: never answer with the class. Free, perfect at the output, and nothing is lost."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wfilter.baselines.batches import Task
from wfilter.data.running import Batches


class Mask(nn.Module):
    """Logits with those of some classes at minus infinity.

    Example:
        >>> Mask([0])(torch.tensor([[5.0, 1.0]]))
        tensor([[-inf, 1.]])
    """

    classes: Tensor

    def __init__(self, classes: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("classes", torch.tensor(list(classes)))

    def forward(self, logits: Tensor) -> Tensor:
        """Logits (samples, classes), masked."""
        return logits.index_fill(-1, self.classes, -torch.inf)


def logit_mask(model: nn.Module, forget: int | Sequence[int], train: Batches) -> nn.Module:
    """A copy of the model that cannot answer with a forgotten class; its features are unchanged.

    Training it again never brings the class back, since the mask is no parameter: its relearn
    time says nothing about what the model knows; the probe does.

    Example:
        >>> model, batch = nn.Linear(2, 3), (torch.zeros(3, 2), torch.arange(3))
        >>> logit_mask(model, 1, [batch])(torch.ones(1, 2)).isinf()
        tensor([[False,  True, False]])
    """
    task = Task.of(model, forget, train)
    return nn.Sequential(copy.deepcopy(model), Mask(task.classes).to(task.device)).eval()
