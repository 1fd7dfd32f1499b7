"""Training from scratch without the forgotten classes: the bar that every method is held to."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from wfilter.baselines.batches import Task
from wfilter.baselines.finetune import cross_entropy, finetune, repeat, sgd
from wfilter.data.batches import Batches
from wfilter.data.running import seeded
from wfilter.metrics.reinit import fresh_copy


def retrained(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    factory: Callable[[], nn.Module] | None = None,
    epochs: int = 30,
    steps: int | None = None,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    seed: int = 0,
) -> nn.Module:
    """A new model trained on the retain half only: SGD, one-cycle learning rate.

    Args:
        model: only its architecture counts.
        forget: class or classes left out.
        train: batches of all classes; the head keeps its width.
        factory: makes a new model; default: `wfilter.metrics.fresh_copy` resets a copy and
            refuses a model that it cannot reset in full.
        epochs: passes over the retain half.
        steps: at most so many in all.
        lr: the highest of the cycle.
        momentum: of SGD.
        weight_decay: of SGD.
        seed: of the new parameters and of everything random in training.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> batch = (torch.eye(2).repeat(8, 1), torch.arange(2).repeat(8))
        >>> retrained(model, 0, [batch], epochs=20)(torch.eye(2)).argmax(1)
        tensor([1, 1])
    """
    task = Task.of(model, forget, train)
    fresh = fresh_copy(model, factory=factory, seed=seed).requires_grad_(True).train()
    with seeded(seed):
        total = sum(1 for _ in repeat(task.retain, 1, None)) * epochs
        optimiser = sgd(fresh, lr, momentum=momentum, weight_decay=weight_decay)
        cycle = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, lr, total_steps=min(total, steps or total) + 1
        )
        batches = repeat(task.retain, epochs, steps)
        finetune(cross_entropy(fresh), optimiser, batches, scheduler=cycle)
    return fresh.eval()
