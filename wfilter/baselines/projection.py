"""Head-vector projection: remove the class's direction from the features, in closed form."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wfilter.baselines.batches import Task
from wfilter.baselines.edits import edited, linear_head
from wfilter.data.batches import Batches


class Projection(nn.Module):
    """Features without their component in the span of some vectors.

    Example:
        >>> Projection(torch.tensor([[2.0, 0.0]]))(torch.tensor([[3.0, 4.0]]))
        tensor([[0., 4.]])
    """

    basis: Tensor

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        basis = torch.linalg.qr(vectors.T.detach().double())[0]
        self.register_buffer("basis", basis.to(vectors))

    def forward(self, features: Tensor) -> Tensor:
        """Z - (Z Q) Q^T; for one vector, z - w (w.z) / |w|^2."""
        return features - features @ self.basis @ self.basis.T


def projection(
    model: nn.Module, forget: int | Sequence[int], train: Batches, *, mask: bool = True
) -> nn.Module:
    """A copy with the forgotten classes' head vectors projected out before the head.

    Source: the closed-form POUR-P of Le et al., arXiv 2511.19339; under neural collapse a class's
    head vector is its feature mean. A forgotten class's logit becomes its bias, whatever the image.
    That bias loses to another class's logit where classes are well separated (for a ResNet-18 on
    CIFAR-10 always), but not on a weak model, so the logit is masked as well.

    Args:
        model: left untouched.
        forget: class or classes.
        train: only tells the number of classes.
        mask: mask the forgotten classes' logits too.

    Example:
        >>> model, batch = nn.Linear(2, 3), (torch.zeros(3, 2), torch.arange(3))
        >>> projection(model, 1, [batch], mask=False)
        Sequential(
          (0): Projection()
          (1): Linear(in_features=2, out_features=3, bias=True)
        )
    """
    task = Task.of(model, forget, train)
    vectors = linear_head(model, task).weight[list(task.classes)]
    return edited(model, task, Projection(vectors), mask=mask)
