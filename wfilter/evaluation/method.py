"""What an evaluation looks at: labelled data in any form, and methods in one form.

A `Subject` is a method under test. Whether it is a filtered model with a row for every class or a
model for each class, it answers the same two questions: logits of images under rows, and the plain
model in which a class is forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from wfilter import data as datasets
from wfilter.core.model import FilteredModel
from wfilter.data.batches import InMemory, split_batch
from wfilter.data.checks import check_labels, check_logits
from wfilter.data.running import device_of, evaluating

PAIRS = 256
"""Images times rows in one forward."""


# ---- data -------------------------------------------------------------------------------------


def as_batches(
    given: Any, name: str = "data", batch_size: int = 128, *, shuffle: int | None = None
) -> Any:
    """Something that gives batches whenever it is looped over.

    Args:
        given: An `ImageSet`, images and labels as a pair of tensors, an `InMemory`, a dataset with
            length and items, or batches themselves (a DataLoader, a list).
        name: What to call it in errors.
        batch_size: Of batches made here.
        shuffle: Seed of an order for each pass, of batches made here; ``None``: as they lie.

    Example:
        >>> pair = (torch.zeros(5, 1, 2, 2), torch.zeros(5, dtype=torch.long))
        >>> [len(labels) for _, labels in as_batches(pair, batch_size=4)]
        [4, 1]
    """
    if isinstance(given, datasets.ImageSet):
        return datasets.batches(given, batch_size, shuffle=shuffle is not None, seed=shuffle or 0)
    if isinstance(given, InMemory):
        given = (given.images, given.labels)
    if isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], Tensor):
        images, labels = checked(given, name)
        if shuffle is not None:
            return Shuffled(InMemory(images, labels, batch_size), shuffle)
        return list(zip(torch.split(images, batch_size), torch.split(labels, batch_size)))
    if isinstance(given, DataLoader | list | tuple):
        return given
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        generator = torch.Generator().manual_seed(shuffle or 0)
        return DataLoader(given, batch_size, shuffle is not None, generator=generator)
    if not hasattr(given, "__iter__") or iter(given) is given:
        raise TypeError(
            f"{name} is a {type(given).__name__}, which cannot be read twice. Pass a DataLoader, "
            "a list of batches, a dataset or a pair of tensors (images, labels)."
        )
    return given


@dataclass
class Shuffled:
    """Batches of images in memory, in another order for each pass.

    Example:
        >>> data = InMemory(torch.arange(9.0), torch.arange(9), batch_size=6)
        >>> [len(labels) for _, labels in Shuffled(data, seed=0)]
        [6, 3]
    """

    data: InMemory
    seed: int
    passes: int = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.data.labels is not None
        self.passes += 1
        for index in self.data.order(self.seed, self.passes):
            yield self.data.images[index], self.data.labels[index]


@dataclass(frozen=True)
class Pairs:
    """Batches of any form as checked pairs of tensors, which is what rivals take.

    Example:
        >>> given = [{"image": torch.zeros(2, 3), "label": torch.tensor([0, 1])}]
        >>> [labels.tolist() for _, labels in Pairs(given, num_classes=2, name="train")]
        [[0, 1]]
    """

    batches: Any
    num_classes: int
    name: str

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return read(self.batches, self.num_classes, self.name)


def read(batches: Any, num_classes: int, name: str = "data") -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels of every batch, checked.

    Example:
        >>> batch = {"image": torch.zeros(2, 3), "label": torch.tensor([0, 1])}
        >>> [labels.tolist() for _, labels in read([batch], num_classes=2)]
        [[0, 1]]
    """
    empty = True
    for batch in batches:
        images, labels = checked(batch, name)
        if not len(labels):
            continue
        empty = False
        if int(labels.max()) >= num_classes:
            raise ValueError(
                f"{name} has the label {int(labels.max())}, but the model knows the classes "
                f"0..{num_classes - 1}. Give the data the model was made for."
            )
        yield images, labels.cpu()
    if empty:
        raise ValueError(f"{name} has no batches with images in them.")


def take(batches: Any, num_classes: int, size: int, name: str) -> tuple[Tensor, Tensor]:
    """About ``size`` images and their labels: the first few of every class, in memory.

    Example:
        >>> batch = (torch.arange(6.0)[:, None], torch.tensor([0, 0, 0, 1, 1, 0]))
        >>> take([batch], 2, size=4, name="data")[1]
        tensor([0, 0, 1, 1])
    """
    each = max(1, math.ceil(size / num_classes))
    counts = torch.zeros(num_classes, dtype=torch.long)
    parts = []
    for images, labels in read(batches, num_classes, name):
        seen = F.one_hot(labels, num_classes).cumsum(0).gather(1, labels[:, None])[:, 0]
        kept = seen + counts[labels] <= each
        parts.append((images[kept.to(images.device)], labels[kept]))
        counts += torch.bincount(labels, minlength=num_classes)
        if bool((counts >= each).all()):
            break
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def checked(batch: Any, name: str) -> tuple[Tensor, Tensor]:
    """Images and labels of one batch; one without labels is refused.

    Example:
        >>> checked((torch.zeros(2, 3), torch.tensor([0, 1])), "data")[1]
        tensor([0, 1])
    """
    images, labels = split_batch(batch)
    if not isinstance(labels, Tensor):
        raise TypeError(
            f"{name} has no labels: a batch is {type(batch).__name__}. An evaluation needs batches "
            "(images, labels)."
        )
    return images, check_labels(labels, len(images))


# ---- methods ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A method under test.

    Attributes:
        name: Its line in the report.
        rows: The classes it can forget.
        model: From a class to a plain model in eval mode that has forgotten it.
        filtered: The filtered model, if it is one.
        shared: Whether all rows have the same model: the original, a random network.
        sets: From images and sets ``(images, num_classes)`` to logits, if it can forget sets.
        seconds: What it cost to forget, by class.
    """

    name: str
    rows: tuple[int, ...]
    model: Callable[[int], nn.Module]
    filtered: FilteredModel | None = None
    shared: bool = False
    sets: Callable[[Tensor, Tensor], Tensor] | None = None
    seconds: Mapping[int, float] = field(default_factory=dict)

    @staticmethod
    def of_filtered(
        wf: FilteredModel, rows: Sequence[int], name: str = "wfilter", seconds: float | None = None
    ) -> Subject:
        """A filtered model; ``seconds`` were spent on all its rows together.

        Example:
            >>> import wfilter
            >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
            >>> subject = Subject.of_filtered(wf, [0, 2])
            >>> subject.logits(torch.ones(5, 4), torch.zeros(5, 2).long()).shape
            torch.Size([10, 3])
        """
        each = {} if seconds is None else dict.fromkeys(rows, seconds / wf.num_classes)
        return Subject(
            name, tuple(rows), lambda row: wf.bake(row).eval(), wf, sets=wf, seconds=each
        )

    @staticmethod
    def of_models(
        name: str, models: Mapping[int, nn.Module], seconds: Mapping[int, float] | None = None
    ) -> Subject:
        """A model for each class it has forgotten.

        Example:
            >>> Subject.of_models("ssd", {3: nn.Linear(4, 3)}).rows
            (3,)
        """
        for row, model in models.items():
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"{name} has a {type(model).__name__} for class {row}; expected a model. Pass "
                    "{class: model}."
                )
        return Subject(name, tuple(models), models.__getitem__, seconds=seconds or {})

    @staticmethod
    def of_one(name: str, model: nn.Module, rows: Sequence[int]) -> Subject:
        """The same model whatever is to be forgotten.

        Example:
            >>> Subject.of_one("original", nn.Linear(4, 3), [0, 1]).shared
            True
        """
        return Subject(name, tuple(rows), lambda row: model, shared=True)

    @torch.no_grad()
    def logits(self, images: Tensor, rows: Tensor) -> Tensor:
        """Logits ``(images * replicas, classes)``, on the CPU, grouped by image.

        Args:
            images: One batch.
            rows: int64 ``(images, replicas)``.

        Raises:
            ValueError: They contain NaN, which would count as some class.
        """
        return check_logits(self._logits(images, rows), f"the output of {self.name}")

    def _logits(self, images: Tensor, rows: Tensor) -> Tensor:
        if self.filtered is not None:
            return self._mixed(self.filtered, images, rows)
        if self.shared:
            logits = run(self.model(self.rows[0]), images)
            return logits.repeat_interleave(rows.shape[1], 0)
        index = torch.arange(len(images)).repeat_interleave(rows.shape[1])
        flat = rows.flatten()
        parts = {row: (flat == row).nonzero()[:, 0] for row in sorted(set(flat.tolist()))}
        found = [run(self.model(row), images[index[at]]) for row, at in parts.items()]
        order = torch.cat(list(parts.values()))
        return torch.cat(found)[order.argsort()]

    def own_logits(self, images: Tensor, labels: Tensor) -> Tensor:
        """Logits of images that each forget their own class."""
        return self.logits(images, labels[:, None])

    @staticmethod
    def _mixed(wf: FilteredModel, images: Tensor, rows: Tensor) -> Tensor:
        """All pairs in mixed batches; the replicas of an image share what lies before the gates."""
        device, replicas = wf.alphas.device, rows.shape[1]
        parts = []
        with evaluating(wf):
            size = max(1, PAIRS // replicas)
            for some, wanted in zip(torch.split(images, size), torch.split(rows, size)):
                some, chunks = some.to(device), torch.split(wanted, PAIRS, 1)
                found = [wf.replicated(some, part.flatten().to(device)) for part in chunks]
                shaped = [f.unflatten(0, (len(some), -1)) for f in found]
                parts.append(torch.cat(shaped, 1).flatten(0, 1).cpu())
        return torch.cat(parts)


@torch.no_grad()
def run(model: nn.Module, images: Tensor) -> Tensor:
    """Logits of one batch in eval mode, on the CPU, however large the batch.

    Example:
        >>> run(nn.Linear(4, 3), torch.ones(2, 4)).shape
        torch.Size([2, 3])
    """
    device = device_of(model)
    with evaluating(model):
        parts = [model(part.to(device)).float().cpu() for part in torch.split(images, PAIRS)]
    return torch.cat(parts)


class RowDraw:
    """The rows under which images are tried: an image's own and some of the others.

    The others are dealt like cards, so that none comes up again before all have; every row is
    tried about equally often, and the size of the batches makes no difference.

    Args:
        rows: The rows under test.
        retain: How many rows besides the image's own; ``None``: all.
        seed: Of the shuffling.

    Example:
        >>> RowDraw([0, 1, 2], None, seed=0)(torch.tensor([1, 2]))
        tensor([[0, 1, 2],
                [0, 1, 2]])
        >>> RowDraw([0, 1, 2], 0, seed=0)(torch.tensor([1, 2]))
        tensor([[1],
                [2]])
    """

    def __init__(self, rows: Sequence[int], retain: int | None, seed: int) -> None:
        self.rows, self.offered = torch.tensor(list(rows)), set(rows)
        self.size = len(rows) if retain is None else min(retain + 1, len(rows))
        self.generator = torch.Generator().manual_seed(seed)
        self.deck: list[int] = []

    def __call__(self, labels: Tensor) -> Tensor:
        """Rows for the next images, ``(images, replicas)``."""
        if self.size == len(self.rows):
            return self.rows.expand(len(labels), -1)
        return torch.tensor([self._hand(label) for label in labels.tolist()])

    def _hand(self, label: int) -> list[int]:
        hand = [label] if label in self.offered else []
        while len(hand) < self.size:
            place = next((i for i, row in enumerate(self.deck) if row not in hand), None)
            if place is None:
                order = torch.randperm(len(self.rows), generator=self.generator)
                self.deck += self.rows[order].tolist()
            else:
                hand.append(self.deck.pop(place))
        return hand
