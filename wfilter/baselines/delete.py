"""DELETE: learn from one's former self with the forgotten class struck out of its answers."""

import copy
from collections.abc import Sequence

from torch import Tensor, nn

from wfilter.baselines.batches import Task
from wfilter.baselines.finetune import finetune, repeat, sgd
from wfilter.core.mask import Mask
from wfilter.data.batches import Batches
from wfilter.data.running import seeded


def delete(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    epochs: int = 20,
    steps: int | None = None,
    lr: float = 1e-3,
    batch_size: int = 128,
    seed: int = 0,
) -> nn.Module:
    """Distil the forget half from the original whose logits of forgotten classes are -infinity.

    Source: Zhou et al., arXiv 2503.23751, with the settings of the authors' code for ResNet-18 on
    CIFAR-10 (SGD, momentum 0.9). The loss is KL(masked teacher || student); the retain half is not
    needed, since the teacher's answers beside the class are to stay as they are. Where several
    classes are forgotten, all of them are struck out.

    Args:
        model: left untouched; the teacher.
        forget: class or classes.
        train: batches of all classes; only the forget half is used.
        epochs: passes over the forget half.
        steps: at most so many in all.
        lr: of SGD.
        batch_size: of the forget half.
        seed: of everything random in training.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2)
        >>> batch = (torch.eye(2).repeat(8, 1), torch.arange(2).repeat(8))
        >>> changed = delete(model, 0, [batch], epochs=50, lr=0.5)
        >>> int(changed(torch.eye(2))[0].argmax())
        1
    """
    task = Task.of(model, forget, train)
    original = copy.deepcopy(model).eval().requires_grad_(False)
    mask = Mask(task.classes).to(task.device)
    student = copy.deepcopy(model).requires_grad_(True).train()

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        taught: Tensor = mask(original(images)).softmax(1)
        told: Tensor = student(images).log_softmax(1)
        return (taught.xlogy(taught) - taught * told).sum(1).mean()

    with seeded(seed):
        optimiser = sgd(student, lr, weight_decay=0.0)
        finetune(loss, optimiser, repeat(lambda: task.forget(batch_size), epochs, steps))
    return student.eval()
