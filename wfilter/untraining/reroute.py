"""Feature rows from one pass over the images, and no steps; `fitting` has the closed forms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from wfilter.core.feature_rows import FeatureRows
from wfilter.core.forget import as_sets
from wfilter.core.head import find_head
from wfilter.core.model import FilteredModel
from wfilter.core.outputs import read_inputs
from wfilter.data.batches import Batches, InMemory, read_batches, split_batch
from wfilter.metrics.accuracy import accuracy
from wfilter.untraining.fitting import FeatureStatistics, fit_rows
from wfilter.untraining.history import Ended, History, ProgressBar, Record
from wfilter.untraining.objectives import Reroute
from wfilter.untraining.reading import refuse_several_labels, rows_of

# Images whose features are kept to tell how the rows do on them.
SHOWN = 512


def untrain_reroute(
    wf: FilteredModel,
    train: Batches | InMemory,
    recipe: Reroute,
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool | None = None,
) -> History:
    """In place: feature rows of all classes from one pass over ``train``; no gate is used.

    Every target is pinned open. Nothing of ``wf`` changes before the rows are made, so that a
    refusal leaves it as it was.

    Example:
        >>> import wfilter
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> wf = wfilter.apply_weight_filtering(net, targets="0.*")
        >>> data = [(torch.randn(60, 4), torch.arange(60) % 3)]
        >>> untrain_reroute(wf, data, Reroute("mine")).stopped
        'solved'
        >>> wf.feature_rows.head
        '2.weight'
    """
    began = time.perf_counter()
    _refuse_trained(wf)
    if device is not None:
        wf.to(device)
    collected = _collect(wf, train, seed, progress)
    rows = fit_rows(
        collected.statistics, rank=recipe.rank, prior=recipe.prior, seed=seed,
        head=collected.name, logits_of=collected.head,
    )  # fmt: skip
    wf.feature_rows = rows.to(wf.alphas.device)
    wf.hard = False
    wf.pin_open([target.name for target in wf.targets])
    history = History(recipe.to_dict(), seed, [collected.record(rows)])
    history.seconds = history.records[0].seconds = time.perf_counter() - began
    history.end(Ended.SOLVED, "solved")
    return history


def _refuse_trained(wf: FilteredModel) -> None:
    """Gates change the features; rows made without them would not fit."""
    fresh = bool((wf.alphas == wf.alphas.flatten()[0]).all())
    if not fresh and len(wf.pinned) < len(wf.targets):
        raise ValueError(
            "these filters have trained gates, under which the features are others than those that "
            "recipe 'reroute' looks at. Apply fresh filters to the model for feature rows alone."
        )


@dataclass
class _Collected:
    """What one pass leaves: statistics, the head, and the first images' features for figures."""

    statistics: FeatureStatistics
    name: str
    head: Callable[[Tensor], Tensor]
    features: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def record(self, rows: FeatureRows) -> Record:
        """Accuracies on the first images: each forgets its own class, and the next one."""
        features, labels = torch.cat(self.features), torch.cat(self.labels)
        right = []
        for forget in ((labels + 1) % rows.num_classes, labels):
            sets = as_sets(forget, rows.num_classes)
            _, logits = rows(features, sets, self.head)
            right.append(accuracy(logits, labels))
        return Record(1, 0, 0.0, 0.0, right[0], right[1], 0.0)


@torch.no_grad()
def _collect(
    wf: FilteredModel, train: Batches | InMemory, seed: int, progress: bool | None
) -> _Collected:
    """One pass over the images; without labels the base model's answers stand for them."""
    generator = torch.Generator().manual_seed(seed)
    collected: _Collected | None = None
    total = len(train) if isinstance(train, Sized) else None
    with ProgressBar(total, progress) as bar:
        for images, labels in _batches(train, seed):
            refuse_several_labels(labels, "recipe 'reroute'")
            if collected is None:
                collected = _start(wf, images)
            features = _base_features(wf, images).float().cpu()
            logits = collected.head(features)
            rows = rows_of(labels, logits, wf.num_classes, generator)
            collected.statistics.add(features, rows, logits)
            if sum(map(len, collected.labels)) < SHOWN:
                collected.features.append(features)
                collected.labels.append(rows)
            bar.advance()
    if collected is None:
        raise ValueError("train has no batches. Check the data and drop_last.")
    return collected


def _batches(train: Batches | InMemory, seed: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    if isinstance(train, InMemory):
        for index in train.order(seed, 0):
            yield train.images[index], None if train.labels is None else train.labels[index]
        return
    torch.manual_seed(seed * 1_000_003)  # loaders shuffle by the global RNG
    for batch in read_batches(train):
        yield split_batch(batch)


def _start(wf: FilteredModel, images: Tensor) -> _Collected:
    head = plain_head(wf, images)
    statistics = FeatureStatistics(wf.num_classes, head.width)
    return _Collected(statistics, head.name, head)


@dataclass(frozen=True)
class PlainHead:
    """One linear layer that makes the logits of ``(batch, width)`` features, float32 on the CPU.

    Attributes:
        name: Of its weight in the base model.
        weight: ``(num_classes, width)``.
        bias: ``(num_classes,)``, or ``None``.
    """

    name: str
    weight: Tensor
    bias: Tensor | None

    @property
    def width(self) -> int:
        """How many features it sees."""
        return self.weight.shape[1]

    def __call__(self, features: Tensor) -> Tensor:
        """The logits of features."""
        return F.linear(features, self.weight, self.bias)


def plain_head(wf: FilteredModel, images: Tensor) -> PlainHead:
    """The head of the model, refused where its features are not all that makes the logits.

    Example:
        >>> import wfilter
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> plain_head(wfilter.apply_weight_filtering(net, targets="0.*"), torch.ones(1, 4)).name
        '2.weight'
    """
    head = find_head(wf.base, read_inputs(images.to(wf.alphas.device), {}).drawn(2))
    name = head.weights[0]
    if not head.is_plain or name is None:
        raise ValueError(
            f"the logits of this {type(wf.base).__name__} are not what one linear layer makes of "
            "(batch, features): feature rows have no place in it. Use gates (recipe 'distill')."
        )
    layer = wf.base.get_submodule(name.rpartition(".")[0])
    weight = wf.base.get_parameter(name).detach().float().cpu()
    bias = getattr(layer, "bias", None)
    if len(weight) != wf.num_classes:
        raise ValueError(
            f"the head gives {len(weight)} logits\nfor {wf.num_classes} classes of the filters."
        )
    return PlainHead(name, weight, None if bias is None else bias.detach().float().cpu())


def _base_features(wf: FilteredModel, images: Tensor) -> Tensor:
    return wf.features(images.to(wf.alphas.device))
