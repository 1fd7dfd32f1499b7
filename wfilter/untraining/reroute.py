"""Feature rows in closed form: statistics of one pass over the images, and no steps.

For every class its mean, its spread, the means of its images by their next best class, and a linear
detector: the direction in which the class differs from all others by 1 and images of one class
differ least. `wfilter.core.feature_rows` says what becomes of them.
"""

from __future__ import annotations

import math
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
from wfilter.untraining.history import Ended, History, ProgressBar, Record
from wfilter.untraining.objectives import Reroute
from wfilter.untraining.reading import refuse_several_labels, rows_of

# Shifts between pairs of classes are kept up to so many numbers, 64 MiB in float32.
PAIR_LIMIT = 2**24
# Added to every spread, as a share of the mean one.
FLOOR = 0.02
# Images whose features are kept to tell how the rows do on them.
SHOWN = 512


@dataclass
class FeatureStatistics:
    """Sums over features and classes, in float64, so that data of any size pass once.

    Attributes:
        num_classes: Number of classes.
        width: Number of features.
        counts: Images of each class, ``(num_classes,)``.
        sums: Their features, ``(num_classes, width)``.
        squares: The squares of these, ``(num_classes, width)``.
        products: Sum of ``h h'`` over all images, ``(width, width)``.
        pair_counts: Images of class ``c`` whose best other class is ``j``, or ``None``.
        pair_sums: Their features, or ``None`` where they would take too much memory.

    Example:
        >>> statistics = FeatureStatistics(2, 3)
        >>> statistics.add(torch.ones(4, 3), torch.zeros(4, 2), torch.tensor([0, 0, 1, 1]))
        >>> statistics.counts.tolist()
        [2.0, 2.0]
    """

    num_classes: int
    width: int
    pairs: bool | None = None
    counts: Tensor = field(init=False, repr=False)
    sums: Tensor = field(init=False, repr=False)
    squares: Tensor = field(init=False, repr=False)
    products: Tensor = field(init=False, repr=False)
    pair_counts: Tensor | None = field(init=False, repr=False, default=None)
    pair_sums: Tensor | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        classes, width = self.num_classes, self.width
        self.counts = torch.zeros(classes, dtype=torch.float64)
        self.sums = torch.zeros(classes, width, dtype=torch.float64)
        self.squares = torch.zeros(classes, width, dtype=torch.float64)
        self.products = torch.zeros(width, width, dtype=torch.float64)
        fits = classes * classes * width <= PAIR_LIMIT
        if fits if self.pairs is None else self.pairs:
            self.pair_counts = torch.zeros(classes, classes, dtype=torch.float64)
            self.pair_sums = torch.zeros(classes, classes, width, dtype=torch.float64)

    def add(self, features: Tensor, logits: Tensor, labels: Tensor) -> None:
        """In place: count a batch in; nothing is counted of one that is refused.

        Args:
            features: What the head sees, ``(batch, width)``.
            logits: What it answers, ``(batch, num_classes)``.
            labels: int64 ``(batch,)``.
        """
        h = features.detach().cpu().double()
        if not bool(h.isfinite().all()):
            bad = int((~h.isfinite()).any(1).sum())
            raise ValueError(
                f"the features of {bad} of {len(h)} images contain NaN or infinity, so no mean "
                "exists. Look for bad images, or run the model in float32."
            )
        labels = labels.cpu()
        other = logits.detach().cpu().scatter(1, labels.unsqueeze(1), -math.inf).argmax(1)
        self.counts += torch.bincount(labels, minlength=self.num_classes)
        self.sums.index_add_(0, labels, h)
        self.squares.index_add_(0, labels, h * h)
        self.products += h.T @ h
        if self.pair_counts is not None and self.pair_sums is not None:
            ones = torch.ones(len(h), dtype=torch.float64)
            self.pair_counts.index_put_((labels, other), ones, accumulate=True)
            self.pair_sums.index_put_((labels, other), h, accumulate=True)

    @property
    def means(self) -> Tensor:
        """Of each class, ``(num_classes, width)``."""
        return self.sums / self.counts.unsqueeze(1)

    @property
    def within(self) -> Tensor:
        """Covariance within classes, all of them together, ``(width, width)``."""
        between = self.means.T @ (self.counts.unsqueeze(1) * self.means)
        return (self.products - between) / self.counts.sum()


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
    settings = {"shrinkage": recipe.shrinkage, "prior": recipe.prior}
    rows = fit_rows(
        collected.statistics, **settings, detectors=recipe.detectors, head=collected.name
    )
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
            right.append(float((logits.argmax(1) == labels).float().mean()))
        return Record(1, 0, 0.0, 0.0, right[0], right[1], 0.0)


@torch.no_grad()
def _collect(
    wf: FilteredModel, train: Batches | InMemory, seed: int, progress: bool | None
) -> _Collected:
    """One pass over the images; without labels the base model's answers stand for them."""
    generator = torch.Generator().manual_seed(seed)
    found: _Collected | None = None
    total = len(train) if isinstance(train, Sized) else None
    with ProgressBar(total, progress) as bar:
        for images, labels in _batches(train, seed):
            refuse_several_labels(labels, "recipe 'reroute'")
            if found is None:
                found = _start(wf, images)
            features = _base_features(wf, images).float().cpu()
            logits = found.head(features)
            rows = rows_of(labels, logits, wf.num_classes, generator)
            found.statistics.add(features, logits, rows)
            if sum(map(len, found.labels)) < SHOWN:
                found.features.append(features)
                found.labels.append(rows)
            bar.advance()
    if found is None:
        raise ValueError("train has no batches. Check the data and drop_last.")
    return found


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
    drawn = torch.rand(2, *images.shape[1:], generator=torch.Generator().manual_seed(0))
    found = find_head(wf.base, read_inputs(drawn.to(wf.alphas.device, images.dtype), {}))
    name = found.weights[0]
    if not found.is_plain or name is None:
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


def fit_rows(
    statistics: FeatureStatistics,
    *,
    shrinkage: float = 0.01,
    prior: float = 5.0,
    detectors: str = "auto",
    head: str = "",
) -> FeatureRows:
    """Feature rows of all classes from statistics, float32 on the CPU.

    Args:
        statistics: Sums over the images.
        shrinkage: What is added to the covariance within classes, as a share of its mean variance;
            it counts where images are few.
        prior: How many images the general value weighs where the spread of a class, or the mean of
            a pair of classes, is estimated from few.
        detectors: ``"exact"`` (1 on the mean of its class, 0 on all other means), ``"ridge"``
            (by least squares, for more classes than features), ``"none"``, or ``"auto"``: exact
            where the means allow it and there are images enough, else none.
        head: Name of the head's weight in the base model.

    Raises:
        ValueError: A class has no image, or there is only one class.

    Example:
        >>> statistics = FeatureStatistics(2, 3)
        >>> features = torch.randn(40, 3) + torch.arange(40).fmod(2).unsqueeze(1)
        >>> statistics.add(features, torch.zeros(40, 2), torch.arange(40) % 2)
        >>> fit_rows(statistics)
        FeatureRows(num_classes=2, width=3, pair shifts, detectors)
    """
    _refuse_missing(statistics)
    within = statistics.within
    within.diagonal().add_(shrinkage * within.diagonal().mean().clamp_min(1e-12))
    kind = _kind(statistics) if detectors == "auto" else detectors
    found = _DETECTORS[kind](statistics.means, within)
    return FeatureRows(
        statistics.means.float(),
        _spreads(statistics, prior).float(),
        _shifts(statistics, prior),
        *(None if part is None else part.float() for part in found),
        head=head,
    )


def _refuse_missing(statistics: FeatureStatistics) -> None:
    if statistics.num_classes < 2:
        raise ValueError(
            "features of a forgotten class are moved to another one, but there is only one class."
        )
    missing = (statistics.counts == 0).nonzero().flatten().tolist()
    if missing:
        raise ValueError(
            f"{len(missing)} of {statistics.num_classes} classes have no image, the first is "
            f"{missing[0]}: its mean is not known. Pass images of every class."
        )


def _kind(statistics: FeatureStatistics) -> str:
    """Exact detectors need means that no other means explain, and images to know the spread by."""
    means = statistics.means
    spread = torch.linalg.matrix_rank(means - means.mean(0), rtol=1e-6)
    independent = int(spread) == statistics.num_classes - 1
    enough = float(statistics.counts.sum()) >= 2 * statistics.num_classes + statistics.width
    return "exact" if independent and enough else "none"


def _exact(means: Tensor, within: Tensor) -> tuple[Tensor, Tensor]:
    """Of all ``p`` with ``p . (mean_c - mean_k) = 1`` for every k, that of least variance.

    They lie in the span of ``within^-1`` times the differences of means. In coordinates where the
    covariance is 1 this is the shortest solution, which the pseudo-inverse of the centred means
    gives for all classes at once.
    """
    root = torch.linalg.cholesky(within)
    centred = means - means.mean(0)
    white = torch.linalg.solve_triangular(root, centred.T, upper=False)  # (width, classes)
    dual = torch.linalg.pinv(white, rtol=1e-9)  # row c: 1 - 1/classes on c, -1/classes elsewhere
    detectors = torch.linalg.solve_triangular(root.T, dual.T, upper=True).T
    inner = (detectors @ means.T).fill_diagonal_(0)
    return detectors, inner.sum(1) / (len(means) - 1)


def _ridge(means: Tensor, within: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares of "is this class" on the features, scaled to rise by 1 at its class's mean."""
    centre = means.mean(0)
    centred = means - centre
    total = within + centred.T @ centred / len(means)
    detectors = torch.linalg.solve(total, centred.T).T
    height = (detectors * centred).sum(1, keepdim=True)
    detectors = detectors / height.clamp_min(1e-12)
    return detectors, detectors @ centre


def _none(means: Tensor, within: Tensor) -> tuple[None, None]:
    return None, None


_DETECTORS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]] = {
    "exact": _exact,
    "ridge": _ridge,
    "none": _none,
}


def _spreads(statistics: FeatureStatistics, prior: float) -> Tensor:
    """Standard deviations by class, drawn to those of all classes where images are few.

    A floor keeps features that are constant within a class from being stretched without bound.
    """
    counts = statistics.counts.unsqueeze(1)
    scatter = (statistics.squares - counts * statistics.means**2).clamp_min(0)
    general = scatter.sum(0) / counts.sum()
    variance = (scatter + prior * general) / (counts + prior)
    floor = FLOOR * general.sqrt().mean() + 1e-6
    return variance.sqrt() + floor


def _shifts(statistics: FeatureStatistics, prior: float) -> Tensor | None:
    """From the mean of a class to that of its images with one next best class, float32."""
    counts, sums = statistics.pair_counts, statistics.pair_sums
    if counts is None or sums is None:
        return None
    counts = counts.unsqueeze(-1)
    own = statistics.means.unsqueeze(1)  # (classes, 1, width)
    return ((sums - counts * own) / (counts + prior)).float()
