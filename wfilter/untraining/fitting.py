"""Feature rows in closed form, from statistics of the features.

For every class its mean, its spread, the means of its images by their next best class, and a linear
detector: the direction in which the class differs from all others by 1 and images of one class
differ least. `wfilter.core.feature_rows` says what becomes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wfilter.core.feature_rows import FeatureRows

# Shifts between pairs of classes are kept up to so many numbers, 64 MiB in float32.
PAIR_LIMIT = 2**24
# Added to every spread, as a share of the mean one.
FLOOR = 0.02


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
