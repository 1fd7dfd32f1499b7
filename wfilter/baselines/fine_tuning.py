"""Fine-tuning: go on training without the forgotten classes and hope that they fade."""

import copy
from collections.abc import Sequence

from torch import nn

from wfilter.baselines.batches import Task
from wfilter.baselines.finetune import cross_entropy, finetune, repeat, sgd
from wfilter.data.batches import Batches
from wfilter.data.running import seeded


def fine_tuning(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    epochs: int = 10,
    steps: int | None = None,
    lr: float = 0.01,
    seed: int = 0,
) -> nn.Module:
    """Cross-entropy on the retain half only; nothing speaks against the forgotten classes.

    Source: the baseline of Golatkar et al., arXiv 1911.04933, with the settings that Jia et al.,
    arXiv 2304.04934, use for it (SGD, momentum 0.9, weight decay 5e-4). A class fades as fast as
    the head's weights of it do, so the learning rate decides.

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes.
        epochs: passes over the retain half.
        steps: at most so many in all.
        lr: of SGD.
        seed: of everything random in training.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2)
        >>> batch = (torch.eye(2).repeat(8, 1), torch.arange(2).repeat(8))
        >>> fine_tuning(model, 0, [batch], epochs=50, lr=0.5)(torch.eye(2)).argmax(1)
        tensor([1, 1])
    """
    task = Task.of(model, forget, train)
    student = copy.deepcopy(model).requires_grad_(True).train()
    with seeded(seed):
        batches = repeat(task.retain, epochs, steps)
        finetune(cross_entropy(student), sgd(student, lr), batches)
    return student.eval()
