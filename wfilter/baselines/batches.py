"""Forget and retain half of the training batches; checks of what a rival is given."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wfilter.data.batches import Batches, labelled
from wfilter.data.running import collect_logits, device_of


@dataclass(frozen=True)
class Task:
    """What to forget of which data, checked: the batches can be read again and again.

    Example:
        >>> model, batch = nn.Linear(2, 3), (torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]))
        >>> task = Task.of(model, 0, [batch])
        >>> task.classes, task.num_classes
        ((0,), 3)
        >>> [labels.tolist() for _, labels in task.retain()]
        [[1, 2]]
    """

    classes: tuple[int, ...]
    num_classes: int
    train: Batches
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module, forget: int | Sequence[int], train: Batches) -> "Task":
        """Check the arguments every baseline takes."""
        if iter(train) is train:
            raise TypeError(
                "train can be read only once. Pass a DataLoader or a list of batches, "
                "not a generator."
            )
        first = next(iter(train), None)
        if first is None:
            raise ValueError("train has no batches.")
        images, labels = labelled(first, "train")
        num_classes = collect_logits(model, [(images[:1], labels[:1])])[0].shape[-1]
        classes = tuple(sorted({forget} if isinstance(forget, int) else {int(c) for c in forget}))
        if not classes or classes[0] < 0 or classes[-1] >= num_classes:
            raise ValueError(
                f"forget={forget} is not a class, or a list of classes, in 0..{num_classes - 1}."
            )
        if len(classes) == num_classes:
            raise ValueError(f"forget={forget} leaves none of the {num_classes} classes to retain.")
        return cls(classes, num_classes, train, device_of(model))

    def all(self, batch_size: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample, on the model's device."""
        return self._cut(lambda labels: torch.ones_like(labels, dtype=torch.bool), batch_size)

    def forget(self, batch_size: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Samples of the forgotten classes only."""
        return self._cut(self.is_forgotten, batch_size)

    def retain(self, batch_size: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Samples of the other classes only."""
        return self._cut(lambda labels: ~self.is_forgotten(labels), batch_size)

    def sample(self, share: float, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Every forgotten sample and a random share of the others."""
        return self._cut(
            lambda y: self.is_forgotten(y) | (torch.rand(len(y)) < share).to(y.device), batch_size
        )

    def is_forgotten(self, labels: Tensor) -> Tensor:
        """Which samples belong to a forgotten class, bool (samples,)."""
        return torch.isin(labels, torch.tensor(self.classes, device=labels.device))

    def other_labels(self, labels: Tensor) -> Tensor:
        """For each sample a random class that is not forgotten."""
        kept = [c for c in range(self.num_classes) if c not in self.classes]
        draw = torch.randint(len(kept), labels.shape)
        return torch.tensor(kept)[draw].to(labels.device)

    def _cut(
        self, keep: Callable[[Tensor], Tensor], batch_size: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The kept samples in batches as large as the first of ``train``, or as asked.

        The last batch may be smaller, or larger by one sample: BatchNorm cannot train on one alone.
        """
        images: list[Tensor] = []
        labels: list[Tensor] = []
        seen: set[int] = set()
        for x, y in (labelled(batch, "train") for batch in self.train):
            batch_size, kept = batch_size or len(y), keep(y)
            images, labels = [*images, x[kept]], [*labels, y[kept]]
            seen |= set(y.tolist())
            while sum(map(len, labels)) > batch_size + 1:
                x, y = torch.cat(images), torch.cat(labels)
                images, labels = [x[batch_size:]], [y[batch_size:]]
                yield x[:batch_size].to(self.device), y[:batch_size].to(self.device)
        if sum(map(len, labels)):
            yield torch.cat(images).to(self.device), torch.cat(labels).to(self.device)
        self.check_seen(seen)

    def check_seen(self, seen: set[int]) -> None:
        """Refuse training images without some of every class to forget and some to retain."""
        missing = sorted(set(self.classes) - seen)
        if missing or not seen - set(self.classes):
            raise ValueError(
                f"train has samples of the classes {sorted(seen)[:20]} only: "
                + (f"none of {missing} to forget." if missing else "none to retain.")
            )
