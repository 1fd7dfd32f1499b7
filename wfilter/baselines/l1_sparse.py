"""l1-sparse: fine-tune without the forgotten classes, and let unused weights shrink to zero."""

import copy
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wfilter.baselines.batches import Task
from wfilter.baselines.finetune import finetune, sgd
from wfilter.data.batches import Batches
from wfilter.data.running import seeded


def l1_sparse(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    gamma: float = 5e-4,
    epochs: int = 10,
    steps: int | None = None,
    lr: float = 0.01,
    seed: int = 0,
) -> nn.Module:
    """Cross-entropy on the retain half plus g * sum |weight|; g falls to zero, epoch by epoch.

    Source: Jia et al., arXiv 2304.04934 (SGD, momentum 0.9, weight decay 5e-4; ten
    epochs at 0.01 as in the authors' commands, which leave gamma open); in epoch t of T, counted
    from 0, g is gamma (1 - t / T).

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes.
        gamma: g at the start.
        epochs: passes over the retain half.
        steps: at most so many in each pass.
        lr: of SGD.
        seed: of everything random in training.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> batch = (torch.eye(2).repeat(8, 1), torch.arange(2).repeat(8))
        >>> changed = l1_sparse(model, 0, [batch], gamma=0.1, epochs=50, lr=0.5)
        >>> changed(torch.eye(2)).argmax(1)
        tensor([1, 1])
    """
    task = Task.of(model, forget, train)
    student = copy.deepcopy(model).requires_grad_(True).train()

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        size = torch.stack([parameter.abs().sum() for parameter in student.parameters()]).sum()
        return F.cross_entropy(student(images), labels) + weights[-1] * size

    weights: list[float] = []
    with seeded(seed):
        optimiser = sgd(student, lr)
        for epoch in range(epochs):
            weights.append(gamma * (1 - epoch / epochs))
            finetune(loss, optimiser, islice(task.retain(), steps))
    return student.eval()
