"""Negative gradients: climb the loss of the forgotten images."""

import copy
from collections.abc import Sequence
from itertools import cycle

from torch import Tensor, nn
from torch.nn import functional as F

from wfilter.baselines.batches import Task
from wfilter.baselines.finetune import finetune, repeat, sgd
from wfilter.data.batches import Batches
from wfilter.data.running import seeded
from wfilter.metrics.accuracy import accuracy


def negative_gradients(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    retain_weight: float = 0.0,
    until: float = 0.0,
    epochs: int = 10,
    steps: int | None = None,
    lr: float = 0.01,
    clip: float = 1.0,
    seed: int = 0,
) -> nn.Module:
    """Gradient ascent on the forget half until a batch of it is no longer recognised.

    The loss is w * CE(retain) - (1 - w) * CE(forget). With w = 0 it is that of Golatkar et al.,
    arXiv 1911.04933, a baseline whose settings the weight filtering paper does not give; with w > 0
    it is the loss of `neggrad_plus`, which trains longer, with its own paper's settings. Ascent
    speeds up as it goes, has no end of its own and ruins the model, so we clip the gradient and
    stop early.
    BatchNorm statistics stay frozen.

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes.
        retain_weight: w.
        until: stop once a forget batch's accuracy is at or below this.
        epochs: passes over the forget half.
        steps: at most so many in all.
        lr: of SGD without momentum or weight decay.
        clip: the largest norm of a step's gradient.
        seed: of everything random in training.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2)
        >>> batch = (torch.eye(2).repeat(8, 1), torch.arange(2).repeat(8))
        >>> changed = negative_gradients(model, 0, [batch], lr=1.0, epochs=50)
        >>> int(changed(torch.eye(2))[0].argmax())
        1
    """
    if not 0 <= retain_weight < 1:
        raise ValueError(f"retain_weight={retain_weight} is outside 0 <= w < 1.")
    task = Task.of(model, forget, train)
    student = copy.deepcopy(model).requires_grad_(True).eval()
    retained = (batch for _ in cycle([0]) for batch in task.retain())
    seen: list[float] = []

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        logits = student(images)
        seen.append(accuracy(logits.detach(), labels))
        ascent = -(1 - retain_weight) * F.cross_entropy(logits, labels)
        if not retain_weight:
            return ascent
        images, labels = next(retained)
        return ascent + retain_weight * F.cross_entropy(student(images), labels)

    with seeded(seed):
        optimiser = sgd(student, lr, momentum=0.0, weight_decay=0.0)
        batches = repeat(task.forget, epochs, steps)
        finetune(loss, optimiser, batches, after=lambda: seen[-1] <= until, clip=clip)
    return student.eval()
