"""Bad teaching: learn the forgotten images from a teacher who knows nothing."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from wfilter.baselines.batches import Task
from wfilter.baselines.finetune import distillation, finetune, repeat
from wfilter.data.batches import Batches
from wfilter.data.running import seeded
from wfilter.metrics.reinit import fresh_copy


def bad_teaching(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    factory: Callable[[], nn.Module] | None = None,
    retain_share: float = 0.3,
    temperature: float = 1.0,
    epochs: int = 1,
    steps: int | None = None,
    batch_size: int = 256,
    lr: float = 1e-4,
    seed: int = 0,
) -> nn.Module:
    """Distil the retain half from the original and the forget half from a random model.

    Source: Chundawat et al., arXiv 2205.08096, with the settings of the authors' code. The loss is
    (1 - l) KL(competent || student) + l KL(incompetent || student), l = 1 for forgotten samples.

    Args:
        model: left untouched; the competent teacher.
        forget: class or classes.
        train: batches of all classes.
        factory: makes the incompetent teacher; default `wfilter.metrics.fresh_copy`.
        retain_share: how much of the retain half is used, drawn at random in each epoch.
        temperature: of the distillation.
        epochs: passes over the data.
        steps: at most so many in all.
        batch_size: of the forget half and the drawn share together.
        lr: of Adam.
        seed: of the teacher, the draw and everything random in training.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> batch = (torch.eye(2).repeat(8, 1), torch.arange(2).repeat(8))
        >>> changed = bad_teaching(model, 0, [batch], epochs=50, lr=0.1)
        >>> bool(torch.equal(changed.weight, model.weight))
        False
    """
    task = Task.of(model, forget, train)
    competent = copy.deepcopy(model).eval().requires_grad_(False)
    incompetent = fresh_copy(model, factory=factory, seed=seed).eval().requires_grad_(False)
    student = copy.deepcopy(model).requires_grad_(True).train()

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        forgotten = task.is_forgotten(labels)[:, None]
        taught = torch.where(forgotten, incompetent(images), competent(images))
        return distillation(student(images), taught, temperature)

    with seeded(seed):
        optimiser = torch.optim.Adam(student.parameters(), lr)
        batches = repeat(lambda: task.sample(retain_share, batch_size), epochs, steps)
        finetune(loss, optimiser, batches)
    return student.eval()
