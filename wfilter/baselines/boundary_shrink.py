"""Boundary shrink: give each forgotten image to the class across its nearest boundary."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wfilter.baselines.batches import Task
from wfilter.baselines.finetune import finetune, repeat, sgd
from wfilter.core.mask import Mask
from wfilter.data.batches import Batches
from wfilter.data.running import seeded


def boundary_shrink(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    bound: float = 0.1,
    epochs: int = 10,
    steps: int | None = None,
    lr: float = 1e-3,
    batch_size: int = 64,
    seed: int = 0,
) -> nn.Module:
    """Cross-entropy on the forget half, labelled as the original sees it after one attack step.

    Source: Chen et al., CVPR 2023 (Boundary Unlearning; SGD, momentum 0.9). The label is the
    likeliest class other than the forgotten ones for x + bound * sign(gradient of the loss), under
    the original. The paper's rate is 1e-5, for ten epochs; with it a small network on digits still
    answers 94 % of the forgotten test images right, with our default none. So choose the rate on
    held-out images (`wfilter.baselines.run` with ``held_out``).

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes; only the forget half is used.
        bound: how far a pixel moves in the attack, in units of the images as they are given.
        epochs: passes over the forget half.
        steps: at most so many in all.
        lr: of SGD.
        batch_size: of the forget half.
        seed: of everything random in training.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> batch = (torch.eye(2).repeat(8, 1), torch.arange(2).repeat(8))
        >>> changed = boundary_shrink(model, 0, [batch], epochs=50, lr=0.5)
        >>> int(changed(torch.eye(2))[0].argmax())
        1
    """
    task = Task.of(model, forget, train)
    original = copy.deepcopy(model).eval().requires_grad_(False)
    mask = Mask(task.classes).to(task.device)
    student = copy.deepcopy(model).requires_grad_(True).train()

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        nearest = mask(original(attacked(original, images, labels, bound))).argmax(1)
        return F.cross_entropy(student(images), nearest)

    with seeded(seed):
        optimiser = sgd(student, lr, weight_decay=0.0)
        finetune(loss, optimiser, repeat(lambda: task.forget(batch_size), epochs, steps))
    return student.eval()


def attacked(model: nn.Module, images: Tensor, labels: Tensor, bound: float) -> Tensor:
    """Images after one step (FGSM) that makes their own labels less likely.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> layer.weight.data = torch.eye(2)
        >>> attacked(layer, torch.zeros(1, 2), torch.tensor([0]), 0.1)
        tensor([[-0.1000,  0.1000]])
    """
    moved = images.detach().clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(moved), labels), moved)
    return (moved + bound * gradient.sign()).detach()
