"""Random labels: fine-tune with the forgotten images labelled as something else."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wfilter.baselines.batches import Task
from wfilter.baselines.finetune import finetune, repeat, sgd
from wfilter.data.batches import Batches
from wfilter.data.running import seeded


def random_labels(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    retain: bool = True,
    epochs: int = 3,
    steps: int | None = None,
    lr: float = 0.01,
    seed: int = 0,
) -> nn.Module:
    """Cross-entropy with a random other label for each forgotten image, drawn anew each time.

    Source: Hayase et al., arXiv 2012.11849, a baseline whose settings the weight filtering
    paper does not give; these are ours (SGD, momentum 0.9, weight decay 5e-4).

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes.
        retain: train on the other classes too, with their own labels.
        epochs: passes over the data.
        steps: at most so many in all.
        lr: of SGD.
        seed: of the labels and of everything random in training.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> batch = (torch.eye(2).repeat(8, 1), torch.arange(2).repeat(8))
        >>> random_labels(model, 0, [batch], epochs=20, lr=0.5)(torch.eye(2)).argmax(1)
        tensor([1, 1])
    """
    task = Task.of(model, forget, train)
    student = copy.deepcopy(model).requires_grad_(True).train()

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        labels = torch.where(task.is_forgotten(labels), task.other_labels(labels), labels)
        return F.cross_entropy(student(images), labels)

    with seeded(seed):
        make = task.all if retain else task.forget
        finetune(loss, sgd(student, lr), repeat(make, epochs, steps))
    return student.eval()
