"""One way to forget in a form that every metric can measure, filters or a model for each class.

Whether it is a filtered model with a row for every class or a model for each class, a `Method`
answers the same two questions: the logits of images while given classes are forgotten, and the
plain model in which one class is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn

from wfilter.core.model import FilteredModel
from wfilter.core.outputs import logits_of
from wfilter.data.checks import check_logits
from wfilter.data.running import device_of, evaluating

PAIRS = 256
"""How many pairs of an image and a class to forget go into one forward."""

T = TypeVar("T")
UNFOLD = "(n rows) classes -> n rows classes"  # the answers to one image, side by side


@dataclass(frozen=True)
class Method:
    """A method under test.

    Attributes:
        name: Its line in the report.
        classes: Those it can forget.
        model: From a class to a plain model in eval mode that has forgotten it.
        filtered: The filtered model, if the method is one.
        shared: Whether all classes have the same model: the original, a random network.
        sets: From images and sets ``(images, num_classes)`` to logits, if it can forget sets.
        seconds: What it cost to forget, by class.
    """

    name: str
    classes: tuple[int, ...]
    model: Callable[[int], nn.Module]
    filtered: FilteredModel | None = None
    shared: bool = False
    sets: Callable[[Tensor, Tensor], Tensor] | None = None
    seconds: Mapping[int, float] = field(default_factory=dict)

    @staticmethod
    def of_filtered(
        wf: FilteredModel,
        classes: Sequence[int],
        name: str = "wfilter",
        seconds: float | None = None,
    ) -> Method:
        """A filtered model; ``seconds`` were spent on all its rows together.

        Example:
            >>> import wfilter
            >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
            >>> method = Method.of_filtered(wf, [0, 2])
            >>> method.logits(torch.ones(5, 4), torch.zeros(5, 2).long()).shape
            torch.Size([10, 3])
        """
        each = {} if seconds is None else dict.fromkeys(classes, seconds / wf.num_classes)
        return Method(
            name, tuple(classes), lambda row: wf.bake(row).eval(), wf, sets=wf, seconds=each
        )

    @staticmethod
    def of_models(
        name: str, models: Mapping[int, nn.Module], seconds: Mapping[int, float] | None = None
    ) -> Method:
        """A model for each class it has forgotten.

        Example:
            >>> Method.of_models("ssd", {3: nn.Linear(4, 3)}).classes
            (3,)
        """
        for row, model in models.items():
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"{name} has a {type(model).__name__} for class {row}; expected a model. Pass "
                    "{class: model}."
                )
        return Method(name, tuple(models), models.__getitem__, seconds=seconds or {})

    @staticmethod
    def of_one(name: str, model: nn.Module, classes: Sequence[int]) -> Method:
        """The same model whatever is to be forgotten.

        Example:
            >>> Method.of_one("original", nn.Linear(4, 3), [0, 1]).shared
            True
        """
        return Method(name, tuple(classes), lambda row: model, shared=True)

    def once_if_shared(self, measure: Callable[[int], T]) -> Callable[[int], T]:
        """``measure`` of each row; where all rows share one model it runs once, for all of them.

        Example:
            >>> method = Method.of_one("original", nn.Linear(4, 3), [0, 1])
            >>> measure = method.once_if_shared(lambda row: row + 10)
            >>> measure(0), measure(1)
            (10, 10)
        """
        if not self.shared:
            return measure
        first = cache(lambda: measure(self.classes[0]))
        return lambda row: first()

    @torch.no_grad()
    def logits(self, images: Tensor, forget: Tensor) -> Tensor:
        """Logits ``(images * replicas, classes)``, on the CPU, grouped by image.

        Args:
            images: One batch.
            forget: int64 ``(images, replicas)``: the classes each of them forgets, one at a time.

        Raises:
            ValueError: The logits contain NaN, which would count as a prediction of some class.
        """
        return check_logits(self._logits(images, forget), f"the output of {self.name}")

    def _logits(self, images: Tensor, forget: Tensor) -> Tensor:
        if self.filtered is not None:
            return self._mixed(self.filtered, images, forget)
        if self.shared:
            logits = run(self.model(self.classes[0]), images)
            return logits.repeat_interleave(forget.shape[1], 0)
        index = torch.arange(len(images)).repeat_interleave(forget.shape[1])
        flat = forget.flatten()
        parts = {row: (flat == row).nonzero()[:, 0] for row in sorted(set(flat.tolist()))}
        answers = [run(self.model(row), images[index[at]]) for row, at in parts.items()]
        order = torch.cat(list(parts.values()))
        return torch.cat(answers)[order.argsort()]

    def own_logits(self, images: Tensor, labels: Tensor) -> Tensor:
        """Logits of images that each forget their own class."""
        return self.logits(images, labels[:, None])

    @staticmethod
    def _mixed(wf: FilteredModel, images: Tensor, forget: Tensor) -> Tensor:
        """All pairs in mixed batches; the replicas of an image share what lies before the gates."""
        device, replicas = wf.alphas.device, forget.shape[1]
        parts = []
        with evaluating(wf):
            size = max(1, PAIRS // replicas)
            for some, wanted in zip(torch.split(images, size), torch.split(forget, size)):
                some, chunks = some.to(device), torch.split(wanted, PAIRS, 1)
                outputs = [wf.replicated(some, part.flatten().to(device)) for part in chunks]
                by_image = [rearrange(logits_of(o), UNFOLD, n=len(some)) for o in outputs]
                logits = rearrange(torch.cat(by_image, 1), "n rows classes -> (n rows) classes")
                parts.append(logits.cpu())
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
        outputs = (model(part.to(device)) for part in torch.split(images, PAIRS))
        parts = [logits_of(output).float().cpu() for output in outputs]
    return torch.cat(parts)


class Draw:
    """The classes that images are made to forget: an image's own and some of the others.

    The others are dealt like cards, so that none comes up again before all have; every class is
    tried about equally often, and the size of the batches makes no difference.

    Args:
        classes: Those under test.
        retain: How many besides the image's own; ``None``: all.
        seed: Of the shuffling.

    Example:
        >>> Draw([0, 1, 2], None, seed=0)(torch.tensor([1, 2]))
        tensor([[0, 1, 2],
                [0, 1, 2]])
        >>> Draw([0, 1, 2], 0, seed=0)(torch.tensor([1, 2]))
        tensor([[1],
                [2]])
    """

    def __init__(self, classes: Sequence[int], retain: int | None, seed: int) -> None:
        self.classes, self.offered = torch.tensor(list(classes)), set(classes)
        self.size = len(classes) if retain is None else min(retain + 1, len(classes))
        self.generator = torch.Generator().manual_seed(seed)
        self.deck: list[int] = []

    def __call__(self, labels: Tensor) -> Tensor:
        """Classes for the next images to forget, ``(images, replicas)``."""
        if self.size == len(self.classes):
            return self.classes.expand(len(labels), -1)
        return torch.tensor([self._hand(label) for label in labels.tolist()])

    def _hand(self, label: int) -> list[int]:
        hand = [label] if label in self.offered else []
        while len(hand) < self.size:
            place = next((i for i, row in enumerate(self.deck) if row not in hand), None)
            if place is None:  # the deck holds only classes already in this hand: add another
                order = torch.randperm(len(self.classes), generator=self.generator)
                self.deck += self.classes[order].tolist()
            else:
                hand.append(self.deck.pop(place))
        return hand
