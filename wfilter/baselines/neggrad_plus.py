"""NegGrad+: climb the loss of the forgotten images while going down that of the others."""

import copy
from collections.abc import Sequence
from itertools import chain
from itertools import repeat as endless

from torch import Tensor, nn
from torch.nn import functional as F

from wfilter.baselines.batches import Task
from wfilter.baselines.finetune import finetune, repeat, sgd
from wfilter.data.batches import Batches
from wfilter.data.running import seeded


def neggrad_plus(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    retain_weight: float = 0.95,
    epochs: int = 10,
    steps: int | None = None,
    lr: float = 0.01,
    seed: int = 0,
) -> nn.Module:
    """Descend w * CE(retain) - (1 - w) * CE(forget), a batch of each half in every step.

    Source: Kurmanji et al., arXiv 2302.09880 (SGD, momentum 0.9, weight decay 5e-4; their w is
    0.95 to 0.9999). The forget half starts again whenever it is used up.

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes.
        retain_weight: w.
        epochs: passes over the retain half.
        steps: at most so many in all.
        lr: of SGD.
        seed: of everything random in training.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2)
        >>> batch = (torch.eye(2).repeat(8, 1), torch.arange(2).repeat(8))
        >>> changed = neggrad_plus(model, 0, [batch], epochs=50, lr=0.5)
        >>> int(changed(torch.eye(2))[0].argmax())
        1
    """
    if not 0 < retain_weight < 1:
        raise ValueError(f"retain_weight={retain_weight} is outside 0 < w < 1.")
    task = Task.of(model, forget, train)
    student = copy.deepcopy(model).requires_grad_(True).train()
    forgotten = chain.from_iterable(task.forget() for _ in endless(None))

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        down = F.cross_entropy(student(images), labels)
        images, labels = next(forgotten)
        up = F.cross_entropy(student(images), labels)
        return retain_weight * down - (1 - retain_weight) * up

    with seeded(seed):
        finetune(loss, sgd(student, lr), repeat(task.retain, epochs, steps))
    return student.eval()
