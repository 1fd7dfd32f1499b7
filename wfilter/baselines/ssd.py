"""Selective synaptic dampening: shrink the weights that matter to the forgotten class alone."""

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wfilter.baselines.batches import Task
from wfilter.data.batches import Batches
from wfilter.data.running import seeded


def ssd(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    selection: float = 10.0,
    dampening: float = 1.0,
    batch_size: int = 64,
    seed: int = 0,
) -> nn.Module:
    """Multiply by min(lambda I_D / I_f, 1) every weight with I_f > alpha I_D; no training.

    Source: Foster et al., arXiv 2308.07707, with the settings of its ResNet-18 (a ViT: alpha 5;
    faces: alpha 50, lambda 0.1). I is the diagonal Fisher information, of the whole training set
    (I_D) and of the forget half (I_f), as in the authors' code the mean over batches of the squared
    gradient of the batch's loss; so the batch size is a setting too.

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes.
        selection: alpha.
        dampening: lambda.
        batch_size: of the importances.
        seed: of everything random in reading the data.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> batch = (torch.eye(2).repeat(8, 1), torch.arange(2).repeat(8))
        >>> changed = ssd(model, 0, [batch], selection=1.0)
        >>> bool((changed.weight.abs() <= model.weight.abs()).all())
        True
    """
    task = Task.of(model, forget, train)
    student = copy.deepcopy(model).requires_grad_(True).eval()
    with seeded(seed):
        whole = importances(student, task.all(batch_size))
        forgotten = importances(student, task.forget(batch_size))
    with torch.no_grad():
        for parameter, mine, theirs in zip(student.parameters(), forgotten, whole, strict=True):
            factor = (dampening * theirs / mine).clamp(max=1)
            parameter.mul_(torch.where(mine > selection * theirs, factor, torch.ones_like(factor)))
    return student


def importances(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """For each parameter the mean over batches of the squared gradient of the batch's loss.

    Example:
        >>> batch = (torch.eye(2), torch.arange(2))
        >>> [importance.shape for importance in importances(nn.Linear(2, 2), [batch])]
        [torch.Size([2, 2]), torch.Size([2])]
    """
    parameters = list(model.parameters())
    sums, count = [torch.zeros_like(parameter) for parameter in parameters], 0
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                total += gradient.square()
        count += 1
    return [total / count for total in sums]
