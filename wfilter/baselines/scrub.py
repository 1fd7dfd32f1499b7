"""SCRUB: a student that disobeys its teacher on the forgotten images and obeys it on the others."""

import copy
from collections.abc import Sequence
from itertools import islice

from torch import Tensor, nn
from torch.nn import functional as F

from wfilter.baselines.batches import Task
from wfilter.baselines.finetune import distillation, finetune, sgd
from wfilter.data.batches import Batches
from wfilter.data.running import seeded


def scrub(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    epochs: int = 3,
    max_epochs: int = 2,
    steps: int | None = None,
    alpha: float = 0.001,
    gamma: float = 0.99,
    temperature: float = 4.0,
    forget_batch_size: int = 512,
    lr: float = 5e-4,
    seed: int = 0,
) -> nn.Module:
    """Alternate: maximise KL(teacher || student) on forget, minimise alpha KL + gamma CE on retain.

    Source: Kurmanji et al., arXiv 2302.09880, with the settings their code has for a class of
    CIFAR-10 (SGD, momentum 0.9, weight decay 5e-4). The original model is the teacher.

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes.
        epochs: passes over the retain half.
        max_epochs: how many of them, from the first, begin with a pass over the forget half.
        steps: at most so many in each pass.
        alpha: weight of the teacher on the retain half.
        gamma: weight of the labels on the retain half.
        temperature: of the distillation.
        forget_batch_size: small batches mean many ascent steps, which ruin the model.
        lr: of SGD.
        seed: of everything random in training.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2)
        >>> batch = (torch.eye(2).repeat(8, 1), torch.arange(2).repeat(8))
        >>> changed = scrub(model, 0, [batch], epochs=30, max_epochs=30, lr=0.1)
        >>> int(changed(torch.eye(2))[0].argmax())
        1
    """
    task = Task.of(model, forget, train)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    student = copy.deepcopy(model).requires_grad_(True).train()

    def disobey(images: Tensor, labels: Tensor) -> Tensor:
        return -distillation(student(images), teacher(images), temperature)

    def obey(images: Tensor, labels: Tensor) -> Tensor:
        logits = student(images)
        teaching = distillation(logits, teacher(images), temperature)
        return alpha * teaching + gamma * F.cross_entropy(logits, labels)

    with seeded(seed):
        optimiser = sgd(student, lr)
        for epoch in range(epochs):
            if epoch < max_epochs:
                finetune(disobey, optimiser, islice(task.forget(forget_batch_size), steps))
            finetune(obey, optimiser, islice(task.retain(), steps))
    return student.eval()
