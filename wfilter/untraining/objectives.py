"""What untraining may aim at: one frozen class per objective, with its settings, pairs and loss.

``recipes.py`` has settings of each by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from wfilter.untraining import losses
from wfilter.untraining.pairs import Pairs, distill_pairs, paper_pairs


@dataclass(frozen=True)
class Seen:
    """What a loss is made of: the images of a step, their pairs, and both models' answers.

    Attributes:
        pairs: Which image forgets what.
        logits: The filtered model's, one line for each pair.
        base: The base model's, one line for each image; empty for a recipe that has no use for it.
        rows: The class of each image, on the CPU.
        multi_label: Whether an image may have several classes.
    """

    pairs: Pairs
    logits: Tensor
    base: Tensor
    rows: Tensor
    multi_label: bool = False


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what untraining does to the alphas, given data and a seed.

    The base of `Paper`, `Distill` and `Linear`, one for each objective, and of `Auto`, which
    chooses among them.

    Attributes:
        name: Shown in histories and reports.
    """

    objective: ClassVar[str]

    name: str

    def __str__(self) -> str:
        return "\n".join(f"{name} = {value!r}" for name, value in self.to_dict().items())

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON and TOML; ``stored.recipe_from`` gives the recipe back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": values.pop("name"), "objective": self.objective, **values}


@dataclass(frozen=True)
class Stepwise(Recipe):
    """A recipe that takes steps: what `Paper` and `Distill` share.

    Attributes:
        lambda_alpha: Weight of the regulariser, the mean of 1 - gate.
        depth: Share of the targets that are untrained, counted from the output; the others are
            pinned open.
        optimiser: ``"sgd"``, ``"adam"``, or ``"row_adam"``: Adam whose second moment is shared by
            the units of a row, so that units with large gradients move further than others.
        learning_rate: Of the optimiser, on raw alphas.
        schedule: ``"constant"`` or ``"cosine"`` (to zero at the last step).
        expansion: Replicas of a sample with different rows (the paper's chi).
        lambda_retain: Weight of the retain term.
        lambda_forget: Weight of the forget term.
        regulariser: ``"global"`` mean over all gates, or ``"layer"``: means per target, summed.
        gates: ``"soft"`` sigmoids, or ``"hard"``: exactly 0 or 1 in every forward, straight-through
            gradients, and exact gates at the end.
        start: Alpha to start from when the filters are fresh; ``None`` keeps what apply set.
        groups: One gate for all layers that make the same channel, as those that add to a residual
            stream do, so that ``bake(prune=True)`` can take more out; see
            `wfilter.untraining.groups`.
        evaluations: Validations per epoch.
        patience: Validations without improvement before stopping; 0 never stops early.
    """

    needs_base: ClassVar[bool]  # whether the loss compares with the base model's answers

    lambda_alpha: float = 1.0
    depth: float = 1.0
    optimiser: str = "sgd"
    learning_rate: float = 100.0
    schedule: str = "constant"
    expansion: int = 3
    lambda_retain: float = 1.0
    lambda_forget: float = 1.0
    regulariser: str = "global"
    gates: str = "soft"
    start: float | None = None
    groups: bool = False
    evaluations: int = 5
    patience: int = 10

    def __post_init__(self) -> None:
        _refuse_bad_depth(self.depth)
        _one_of(self, "optimiser", "sgd", "adam", "row_adam")
        _one_of(self, "schedule", "constant", "cosine")
        _one_of(self, "regulariser", "global", "layer")
        _one_of(self, "gates", "soft", "hard")
        if self.expansion < 1 or self.learning_rate <= 0:
            raise ValueError(
                f"expansion={self.expansion} must be at least 1 and learning_rate="
                f"{self.learning_rate} positive."
            )

    def make_pairs(self, rows: Tensor, num_classes: int, generator: torch.Generator) -> Pairs:
        """The pairs of one step, for images of these classes."""
        raise NotImplementedError

    def loss(self, seen: Seen) -> Tensor:
        """The objective over the pairs of a step."""
        raise NotImplementedError

    def closing(self, alphas: Iterable[Tensor]) -> Tensor:
        """The regulariser: few gates may close."""
        return self.lambda_alpha * losses.closedness(alphas, self.regulariser == "layer")


@dataclass(frozen=True)
class Paper(Stepwise):
    """The paper's objective: cross-entropy on retain samples, its reciprocal on forget samples.

    Attributes:
        epsilon: Added to the cross-entropy under the reciprocal, which has no bound of its own: on
            a network that is sure of its images a tiny one lets the first step throw the alphas so
            far that no gradient brings them back.

    Example:
        >>> Paper("mine", epsilon=0.1).learning_rate
        100.0
    """

    objective: ClassVar[str] = "paper"
    needs_base: ClassVar[bool] = False

    epsilon: float = 1e-6

    def make_pairs(self, rows: Tensor, num_classes: int, generator: torch.Generator) -> Pairs:
        """One half of the images forgets its own class, the other retains under other rows."""
        return paper_pairs(rows, num_classes, self.expansion, generator)

    def loss(self, seen: Seen) -> Tensor:
        """Section "Training" of the paper, without its regulariser."""
        device = seen.logits.device
        truth, own = seen.rows[seen.pairs.sample].to(device), seen.pairs.own.to(device)
        loss = seen.logits.new_zeros(())
        if bool((~own).any()):
            loss = loss + self.lambda_retain * F.cross_entropy(seen.logits[~own], truth[~own])
        if bool(own.any()):
            away = losses.reciprocal(seen.logits[own], truth[own], self.epsilon)
            loss = loss + self.lambda_forget * away
        return loss


@dataclass(frozen=True)
class Distill(Stepwise):
    """KL to the base model without the forgotten logits, and a margin below which these must be.

    Attributes:
        margin: How far below the best remaining logit a forgotten one is pushed, with the weight
            ``lambda_forget``.
        forget_share: Share of pairs in which a sample forgets its own class.
        set_share: Share of pairs with a set of 2 or more classes.
        max_set: Largest set drawn in training.
        blend: Share of images blended with another one of the batch, which takes at most half. The
            base model's answer then chooses the row, or, of a multi-label sample, one of its labels
            as ever. Images the base model is sure of, as of those it was trained on, say little
            about its other classes.

    Example:
        >>> Distill("mine", blend=0.5).make_pairs(torch.tensor([0, 1]), 3, torch.Generator()).sample
        tensor([0, 0, 0, 0, 1, 1, 1, 1])
    """

    objective: ClassVar[str] = "distill"
    needs_base: ClassVar[bool] = True

    optimiser: str = "adam"
    learning_rate: float = 0.2
    schedule: str = "cosine"
    expansion: int = 4
    lambda_alpha: float = 0.0
    margin: float = 5.0
    forget_share: float = 0.3
    set_share: float = 0.0
    max_set: int = 5
    blend: float = 0.0
    patience: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_no_shares(self, "blend", "forget_share", "set_share")

    def make_pairs(self, rows: Tensor, num_classes: int, generator: torch.Generator) -> Pairs:
        """Pair each image with several classes or sets to forget."""
        return distill_pairs(
            rows,
            num_classes,
            generator,
            expansion=self.expansion,
            forget_share=self.forget_share,
            set_share=self.set_share,
            max_set=self.max_set,
        )

    def loss(self, seen: Seen) -> Tensor:
        """How far the answers are from the base model's without what is forgotten."""
        device = seen.logits.device
        forget = seen.pairs.forget.to(device)
        base = seen.base[seen.pairs.sample.to(device)]
        match = losses.binary_distillation if seen.multi_label else losses.distillation
        loss = self.lambda_retain * match(seen.logits, base, forget)
        if self.lambda_forget and not seen.multi_label:
            loss = loss + self.lambda_forget * losses.margin(seen.logits, forget, self.margin)
        return loss


@dataclass(frozen=True)
class Linear(Recipe):
    """No steps: which gates to close is solved to first order, see ``wfilter.untraining.solve``.

    Attributes:
        lambda_alpha: Weight of half the sum of squares of 1 - gate.
        depth: Share of the targets that are untrained, counted from the output.
        margin: How far below all remaining logits together a forgotten one is pushed.
        alike: Images of other classes from which a row learns, too: those that the base model gives
            the highest chance of its class.
        lambda_fisher: Weight of what closed gates cost other images, to second order, estimated
            once for all rows (see ``wfilter.untraining.fisher``).
        fisher_images: Images of that estimate.

    Example:
        >>> Linear("mine", alike=0).margin
        9.0
    """

    objective: ClassVar[str] = "linear"

    lambda_alpha: float = 0.0003
    depth: float = 1.0
    margin: float = 9.0
    alike: int = 16
    lambda_fisher: float = 3.0
    fisher_images: int = 4000

    def __post_init__(self) -> None:
        _refuse_bad_depth(self.depth)
        if min(self.lambda_alpha, self.lambda_fisher, self.fisher_images) <= 0 or self.alike < 0:
            raise ValueError(
                f"lambda_alpha={self.lambda_alpha}, lambda_fisher={self.lambda_fisher} and "
                f"fisher_images={self.fisher_images} must be positive for the linear objective, "
                f"and alike={self.alike} not negative."
            )


@dataclass(frozen=True)
class Reroute(Recipe):
    """No steps and no gates: feature rows in closed form, see ``wfilter.untraining.reroute``.

    Attributes:
        rank: How many factors of the covariance within a class are kept. Classes with fewer than
            twice as many images share one covariance.
        prior: How many images the covariance of all classes weighs beside that of one class.

    Example:
        >>> Reroute("mine", rank=16).prior
        5.0
    """

    objective: ClassVar[str] = "reroute"

    rank: int = 32
    prior: float = 5.0

    def __post_init__(self) -> None:
        if self.rank < 1 or self.prior <= 0:
            raise ValueError(f"rank={self.rank} and prior={self.prior} must be positive.")


@dataclass(frozen=True)
class Auto(Recipe):
    """Chooses by looking: how many layers, which gates, how long; see `wfilter.untraining.auto`.

    Attributes:
        stages: What to try, in this order, until one meets the bar: ``"hard 0.2, soft 1.0"`` is
            exact gates on the last fifth of the filtered layers, then soft ones on all;
            ``"linear"`` solves the rows, ``"reroute"`` makes feature rows. Empty: decided by the
            layers, their units, the classes, and whether feature rows have a place in the model.
        images: Images of each class to look at, those held out included; 0: decided by the number
            of classes.
        held_out: Share of these that no step sees, on which rows are judged.
        steps: Steps of a stage before rows are judged for good; 0: by the number of classes.
        bar_forget: Most that may be known of the forgotten class, mean over the rows.
        bar_worst: Most that may be known of any one class.
        bar_retain: Most that the rows may lose on the other classes, mean over the rows; sets may
            lose what their rows may together.

    Example:
        >>> Auto("mine", stages="soft 1.0").bar_worst
        0.03
    """

    objective: ClassVar[str] = "auto"

    stages: str = ""
    images: int = 0
    held_out: float = 0.2
    steps: int = 0
    bar_forget: float = 0.005
    bar_worst: float = 0.03
    bar_retain: float = 0.005

    def __post_init__(self) -> None:
        _refuse_no_shares(self, "held_out", "bar_forget", "bar_worst", "bar_retain", below_one=True)
        if self.images < 0 or self.steps < 0:
            raise ValueError(f"images={self.images} and steps={self.steps} must not be negative.")


def _refuse_bad_depth(depth: float) -> None:
    if not 0 < depth <= 1:
        raise ValueError(f"depth={depth} is a share of the targets: it must be in (0, 1].")


def _refuse_no_shares(recipe: Recipe, *names: str, below_one: bool = False) -> None:
    """Stop at a setting outside 0..1; ``below_one`` where a share of all would leave nothing."""
    for name in names:
        value = getattr(recipe, name)
        if not 0 <= value <= 1 or (below_one and value == 1):
            end = " and below 1" if below_one else ""
            raise ValueError(f"{name}={value} is a share: it must be in 0..1{end}.")


def _one_of(recipe: Recipe, name: str, *allowed: str) -> None:
    value = getattr(recipe, name)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(allowed)}.")
