"""A layer behind a model that sets the logits of some classes to minus infinity."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


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
