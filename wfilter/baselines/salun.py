"""SalUn: random labels, but only the weights that the forgotten class's loss reacts to may move."""

import copy
from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wfilter.baselines.batches import Task
from wfilter.baselines.finetune import cross_entropy, finetune, sgd
from wfilter.data.batches import Batches
from wfilter.data.running import seeded


def salun(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    share: float = 0.5,
    epochs: int = 10,
    steps: int | None = None,
    lr: float = 0.013,
    seed: int = 0,
) -> nn.Module:
    """Fine-tune the salient weights: the forget half with random labels, then the retain half.

    Source: Fan et al., arXiv 2310.12508, with the settings of its ResNet-18 on CIFAR-10 (SGD,
    momentum 0.9, weight decay 5e-4). Salient are the weights with the largest gradient of the
    forget half's loss at the original model; the others keep their values bit for bit.

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes.
        share: how many of all weights count as salient; the paper takes the upper half.
        epochs: each a pass over the forget half, then one over the retain half.
        steps: at most so many in each pass.
        lr: of SGD.
        seed: of the labels and of everything random in training.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> batch = (torch.eye(2).repeat(8, 1), torch.arange(2).repeat(8))
        >>> changed = salun(model, 0, [batch], lr=0.5)
        >>> int(changed(torch.eye(2))[0].argmax())
        1
    """
    task = Task.of(model, forget, train)
    student = copy.deepcopy(model).requires_grad_(True)

    def relabelled(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(student(images), task.other_labels(labels))

    def undo() -> None:
        with torch.no_grad():
            for parameter, first, mask in zip(student.parameters(), before, salient, strict=True):
                parameter.copy_(torch.where(mask, parameter, first))

    with seeded(seed):
        before = [parameter.detach().clone() for parameter in student.parameters()]
        salient = saliency(student.eval(), task.forget(), share)
        optimiser = sgd(student.train(), lr)
        for _ in range(epochs):
            finetune(relabelled, optimiser, islice(task.forget(), steps), after=undo)
            retained = islice(task.retain(), steps)
            finetune(cross_entropy(student), optimiser, retained, after=undo)
    return student.eval()


def saliency(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], share: float
) -> list[Tensor]:
    """For each parameter a bool tensor: the ``share`` of all weights with the largest gradient.

    Example:
        >>> masks = saliency(nn.Linear(2, 2), [(torch.eye(2), torch.arange(2))], share=0.5)
        >>> int(sum(mask.sum() for mask in masks))
        3
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share} is outside 0 < share <= 1.")
    parameters = list(model.parameters())
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                total += gradient
    flat = torch.cat([total.flatten() for total in sums]).abs()
    mask = torch.zeros_like(flat, dtype=torch.bool)
    mask[flat.topk(round(share * len(flat))).indices] = True
    parts = torch.split(mask, [total.numel() for total in sums])
    return [part.view_as(total) for part, total in zip(parts, sums, strict=True)]
