"""The loop of every rival that trains: a loss and a step per batch; distillation."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor], Tensor]
"""From the images and labels of a batch to the loss."""


def sgd(
    model: nn.Module, lr: float, *, momentum: float = 0.9, weight_decay: float = 5e-4
) -> torch.optim.Optimizer:
    """SGD as the unlearning papers use it.

    Example:
        >>> sgd(nn.Linear(1, 1), lr=0.1).defaults["momentum"]
        0.9
    """
    return torch.optim.SGD(model.parameters(), lr, momentum, weight_decay=weight_decay)


def finetune(
    loss: Loss,
    optimiser: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    after: Callable[[], bool | None] | None = None,
    clip: float | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> None:
    """In place: one optimiser step for each batch, until ``after`` says True.

    Args:
        loss: computes the loss of a batch.
        optimiser: holds what is trained.
        batches: of all epochs, one after the other.
        after: called after each step; True stops.
        clip: the largest norm a step's gradient may have.
        scheduler: stepped after each step.

    Example:
        >>> layer = nn.Linear(1, 2)
        >>> batches = [(torch.ones(4, 1), torch.zeros(4, dtype=torch.long))] * 20
        >>> finetune(cross_entropy(layer), sgd(layer, lr=0.5), batches)
        >>> int(layer(torch.ones(1, 1)).argmax())
        0
    """
    for images, labels in batches:
        value = loss(images, labels)
        optimiser.zero_grad()
        torch.autograd.backward(value)
        if clip is not None:
            parameters = [p for group in optimiser.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, clip)
        optimiser.step()
        if scheduler is not None:
            scheduler.step()
        if after is not None and after():
            break


def repeat(
    make: Callable[[], Iterator[tuple[Tensor, Tensor]]], epochs: int, steps: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ``epochs`` passes, at most ``steps`` of them.

    Example:
        >>> batch = (torch.zeros(1), torch.zeros(1))
        >>> len(list(repeat(lambda: iter([batch] * 3), epochs=4, steps=None)))
        12
        >>> len(list(repeat(lambda: iter([batch] * 3), epochs=4, steps=5)))
        5
    """
    return islice((batch for _ in range(epochs) for batch in make()), steps)


def cross_entropy(model: nn.Module) -> Loss:
    """The plain training loss of a model.

    Example:
        >>> loss = cross_entropy(nn.Linear(1, 2))
        >>> loss(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long)).shape
        torch.Size([])
    """
    return lambda images, labels: F.cross_entropy(model(images), labels)


def distillation(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 * KL(teacher || student) of softened logits, mean over samples (Hinton et al., 2015).

    Example:
        >>> distillation(torch.zeros(2, 3), torch.zeros(2, 3), temperature=4.0)
        tensor(0.)
    """
    q, p = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    return F.kl_div(q, p, log_target=True, reduction="batchmean") * temperature**2
