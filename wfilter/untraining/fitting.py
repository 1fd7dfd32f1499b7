"""Feature rows in closed form, from statistics of the features.

For every class its mean and its covariance, of which the largest factors are kept; and one noise
for all of them. `wfilter.core.feature_rows` says what becomes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wfilter.core.feature_rows import FeatureRows

# Covariances of single classes are summed up to so many numbers, 256 MiB in float64.
BY_CLASS_LIMIT = 2**25
# A class has a covariance of its own from so many images for each factor.
IMAGES_PER_FACTOR = 2
# Standard deviation of a phase within a class, in radians: more than a whole turn.
TURNS = 8.0
# Draws of each class by which it is told how sure their answers are, and halvings of the interval
# in which the factor for them is looked for.
DRAWS, HALVINGS = 32, 12
# Logits are computed for so many draws at once.
AT_ONCE = 2**24


@dataclass
class FeatureStatistics:
    """Sums over features and classes, in float64, so that data of any size pass once.

    Attributes:
        num_classes: Number of classes.
        width: Number of features.
        counts: Images of each class, ``(num_classes,)``.
        sums: Their features, ``(num_classes, width)``.
        squares: The squares of these, ``(num_classes, width)``.
        products: Sum of ``h h'``, ``(num_classes, width, width)``; with very many classes over all
            images together, ``(1, width, width)``.
        doubts: Sum of the entropy of the answers without the best class, over the images whose
            next best class is this one, ``(num_classes,)``.
        routed: How many images these are, ``(num_classes,)``.

    Example:
        >>> statistics = FeatureStatistics(2, 3)
        >>> statistics.add(torch.ones(4, 3), torch.tensor([0, 0, 1, 1]))
        >>> statistics.counts.tolist()
        [2.0, 2.0]
    """

    num_classes: int
    width: int
    counts: Tensor = field(init=False, repr=False)
    sums: Tensor = field(init=False, repr=False)
    squares: Tensor = field(init=False, repr=False)
    products: Tensor = field(init=False, repr=False)
    doubts: Tensor = field(init=False, repr=False)
    routed: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        classes, width = self.num_classes, self.width
        self.counts = torch.zeros(classes, dtype=torch.float64)
        self.sums = torch.zeros(classes, width, dtype=torch.float64)
        self.squares = torch.zeros(classes, width, dtype=torch.float64)
        owners = classes if classes * width * width <= BY_CLASS_LIMIT else 1
        self.products = torch.zeros(owners, width, width, dtype=torch.float64)
        self.doubts = torch.zeros(classes, dtype=torch.float64)
        self.routed = torch.zeros(classes, dtype=torch.float64)

    def add(self, features: Tensor, labels: Tensor, logits: Tensor | None = None) -> None:
        """In place: count a batch in; nothing is counted of one that is refused.

        Args:
            features: What the head sees, ``(batch, width)``.
            labels: int64 ``(batch,)``.
            logits: What the head makes of them. Without them draws are answered as surely as the
                images of the class they are drawn from.
        """
        h = features.detach().cpu().double()
        if not bool(h.isfinite().all()):
            bad = int((~h.isfinite()).any(1).sum())
            raise ValueError(
                f"the features of {bad} of {len(h)} images contain NaN or infinity, so no mean "
                "exists. Look for bad images, or run the model in float32."
            )
        labels = labels.cpu()
        if logits is not None:
            self._doubt(logits.detach().cpu().double())
        self.counts += torch.bincount(labels, minlength=self.num_classes)
        self.sums.index_add_(0, labels, h)
        self.squares.index_add_(0, labels, h * h)
        if len(self.products) == 1:
            self.products[0] += h.T @ h
            return
        for label in set(labels.tolist()):
            own = h[labels == label]
            self.products[label] += own.T @ own

    def _doubt(self, logits: Tensor) -> None:
        """In place: how unsure the model is of each image once its best class is left out."""
        others = logits.scatter(1, logits.argmax(1, keepdim=True), -math.inf)
        route = others.argmax(1)
        self.doubts.index_add_(0, route, _entropy(others))
        self.routed += torch.bincount(route, minlength=self.num_classes)

    @property
    def means(self) -> Tensor:
        """Of each class, ``(num_classes, width)``."""
        return self.sums / self.counts.unsqueeze(1)

    @property
    def within(self) -> Tensor:
        """Covariance within classes, all of them together, ``(width, width)``."""
        between = self.means.T @ (self.counts.unsqueeze(1) * self.means)
        return (self.products.sum(0) - between) / self.counts.sum()

    @property
    def variances(self) -> Tensor:
        """Of each class, ``(num_classes, width)``."""
        counts = self.counts.unsqueeze(1)
        return (self.squares / counts - self.means**2).clamp_min(0)


def fit_rows(
    statistics: FeatureStatistics,
    *,
    rank: int = 32,
    prior: float = 5.0,
    seed: int = 0,
    head: str = "",
    logits_of: Callable[[Tensor], Tensor] | None = None,
) -> FeatureRows:
    """Feature rows of all classes from statistics, float32 on the CPU.

    Args:
        statistics: Sums over the images.
        rank: How many factors of a covariance are kept. A class with at least twice as many images
            has a covariance of its own; if one has fewer, all classes share one.
        prior: How many images the covariance of all classes weighs beside that of a class.
        seed: Of the noise.
        head: Name of the head's weight in the base model.
        logits_of: The head, from features to logits, float32 on the CPU. With it, and logits in
            the statistics, draws are answered as unsurely as images without their best class.

    Raises:
        ValueError: A class has no image, all have one, or there is only one class.

    Example:
        >>> statistics = FeatureStatistics(2, 3)
        >>> features = torch.randn(40, 3) + torch.arange(40).fmod(2).unsqueeze(1)
        >>> statistics.add(features, torch.arange(40) % 2)
        >>> fit_rows(statistics)
        FeatureRows(num_classes=2, width=3, factors=3)
    """
    _refuse_too_few(statistics)
    within, rank = statistics.within, min(rank, statistics.width)
    factors = torch.stack([_factors(c, rank) for c in _covariances(statistics, rank, prior)])
    counts = statistics.counts.unsqueeze(1)
    general = within.diagonal().clamp_min(0)
    variances = (counts * statistics.variances + prior * general) / (counts + prior)
    rests = (variances - (factors**2).sum(1)).clamp_min(0).sqrt()
    waves = _noise(within, rank, seed)
    made = (statistics.means, factors, rests, *waves)
    rows = FeatureRows(*(tensor.float() for tensor in made), head=head)
    # Of two classes one is left, whose answer is sure whatever multiplies it.
    if logits_of is not None and bool(statistics.routed.any()) and rows.num_classes > 2:
        rows.sureness.copy_(_sureness(rows, statistics, logits_of, prior))
    return rows


@torch.no_grad()
def _sureness(
    rows: FeatureRows,
    statistics: FeatureStatistics,
    logits_of: Callable[[Tensor], Tensor],
    prior: float,
) -> Tensor:
    """What multiplies the logits of each class's draws: their mean entropy is then the wanted one.

    Wanted is that of the images that would go to the class if the model had never known theirs.
    A class to which few would go is drawn to the mean of all.
    """
    general = statistics.doubts.sum() / statistics.routed.sum()
    wanted = (statistics.doubts + prior * general) / (statistics.routed + prior)
    per_class = DRAWS * rows.num_classes
    parts = torch.split(torch.arange(rows.num_classes), max(1, AT_ONCE // per_class))
    return torch.cat([_tempered(rows, part, wanted[part], logits_of) for part in parts])


def _tempered(
    rows: FeatureRows, classes: Tensor, wanted: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """For some classes: the factor, found by bisection, since entropy falls as it grows."""
    generator = torch.Generator().manual_seed(0)
    spread = rows.rests + rows.factors.pow(2).sum(1).sqrt()
    route = classes.repeat_interleave(DRAWS)
    noise = torch.randn(len(route), rows.width, generator=generator)
    logits = logits_of(rows.drawn(rows.means[route] + spread[route] * noise, route))
    low = torch.zeros(len(classes), dtype=torch.float64)
    high = torch.ones_like(low)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        answers = logits * middle.float().repeat_interleave(DRAWS).unsqueeze(1)
        too_unsure = _doubt_without_another(answers).view(-1, DRAWS).mean(1) > wanted
        low, high = torch.where(too_unsure, middle, low), torch.where(too_unsure, high, middle)
    return high.float()


def _doubt_without_another(logits: Tensor) -> Tensor:
    """The entropy of each answer when a class other than the best is left out, the forgotten one.

    Which one is not known: the mean over all, weighed by how likely the draw is taken for it.
    """
    p = logits.softmax(-1)
    rest = (1 - p).clamp_min(1e-12)
    without = (
        torch.special.entr(p).sum(-1, keepdim=True) - torch.special.entr(p)
    ) / rest + rest.log()
    weight = p.scatter(-1, p.argmax(-1, keepdim=True), 0.0)
    doubt: Tensor = (weight * without).sum(-1) / weight.sum(-1).clamp_min(1e-12)
    return doubt


def _entropy(logits: Tensor) -> Tensor:
    """Of each answer's probabilities, in nats; a logit of -inf is a probability of 0."""
    entropy: Tensor = torch.special.entr(logits.softmax(-1)).sum(-1)
    return entropy


def _refuse_too_few(statistics: FeatureStatistics) -> None:
    if statistics.num_classes < 2:
        raise ValueError(
            "features of a forgotten class are drawn from another one, but there is only one class."
        )
    missing = (statistics.counts == 0).nonzero().flatten().tolist()
    if missing:
        raise ValueError(
            f"{len(missing)} of {statistics.num_classes} classes have no image, the first is "
            f"{missing[0]}: its mean is not known. Pass images of every class."
        )
    if not bool((statistics.counts > 1).any()):
        raise ValueError(
            "there is one image of each class, which does not tell how a class spreads: every draw "
            "would be the same point. Pass two or more images of a class."
        )


def _covariances(statistics: FeatureStatistics, rank: int, prior: float) -> list[Tensor]:
    """One of each class, drawn to that of all where images are few; or that of all alone."""
    within, fewest = statistics.within, float(statistics.counts.min())
    if len(statistics.products) == 1 or fewest < IMAGES_PER_FACTOR * rank:
        return [within]
    covariances = []
    for count, mean, product in zip(statistics.counts, statistics.means, statistics.products):
        own = product - count * torch.outer(mean, mean)
        covariances.append((own + prior * within) / (count + prior))
    return covariances


def _factors(covariance: Tensor, rank: int) -> Tensor:
    """``(rank, width)``: the largest axes of a covariance, each as long as its deviation."""
    values, axes = torch.linalg.eigh(covariance)
    longest: Tensor = axes[:, -rank:] * values[-rank:].clamp_min(0).sqrt()
    return longest.T


def _noise(within: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Phases, which turn several times within a class, and what mixes their cosines.

    What is mixed has variance 1 and no correlation. There are twice as many waves as numbers made
    of them: whoever knows the mixing cannot solve for the cosines.
    """
    generator = torch.Generator().manual_seed(seed)
    width, deviations = len(within), within.diagonal().clamp_min(0).sqrt()
    waves = 2 * (rank + width)
    phases = torch.randn(waves, width, generator=generator).double()
    phases = phases / (deviations + 0.02 * deviations.mean() + 1e-6)
    turns = (phases @ within * phases).sum(1, keepdim=True).clamp_min(0).sqrt()
    phases = TURNS * phases / turns.clamp_min(1e-6)
    mixing, _ = torch.linalg.qr(torch.randn(waves, rank + width, generator=generator))
    return phases, math.sqrt(2) * mixing  # a cosine has variance 1/2
