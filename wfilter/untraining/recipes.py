"""Named, frozen settings of untraining, every constant with its source.

Derive your own in one line: ``dataclasses.replace(RECIPES["paper"], lambda_forget=100)``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what untraining does to the alphas, given data and a seed.

    Attributes:
        name: Shown in histories and reports.
        objective: ``"paper"`` (cross-entropy and its reciprocal), ``"distill"`` (KL to the base
            model without the forgotten logits) or ``"linear"`` (solved to first order without
            steps, see ``wfilter.linear``; beside ``depth`` only settings that name it matter).
        optimiser: ``"sgd"``, ``"adam"``, or ``"row_adam"``: Adam whose second moment is shared by
            the units of a row, so that units with large gradients move further than others;
            ``"solver"`` for the linear objective.
        learning_rate: Of the optimiser, on raw alphas.
        schedule: ``"constant"`` or ``"cosine"`` (to zero at the last step).
        expansion: Replicas of a sample with different rows (the paper's chi).
        lambda_retain: Weight of the retain term.
        lambda_forget: Weight of the forget term (the margin, in ``distill``).
        lambda_alpha: Weight of the regulariser, the mean of 1 - gate (``linear``: half the sum of
            its squares).
        lambda_deep: Weight of a term on the features that the head sees: how well a ridge
            regression on the images of a step tells the forgotten class from its look-alikes
            (``distill``, ``pairs="row"``). Steps need more images than there are features, four
            times as many in `benchmarks/deep.py`; a last, smaller batch goes without the term.
            For one label per image, and one process.
        lambda_fisher: Weight of what closed gates cost other images, to second order, estimated
            once for all rows (``linear``; see ``wfilter.fisher``).
        fisher_images: Images of that estimate.
        alike: Images of other classes from which a row learns, too: those that the base model gives
            the highest chance of its class (``linear``).
        regulariser: ``"global"`` mean over all gates, or ``"layer"``: means per target, summed.
        epsilon: Added to the cross-entropy under the paper's reciprocal, which has no bound of its
            own: on a network that is sure of its images a tiny one lets the first step throw the
            alphas so far that no gradient brings them back.
        margin: How far below the best remaining logit (``distill``), or all of them together
            (``linear``), a forgotten one is pushed.
        pairs: ``"mixed"`` gives each image of a step rows or sets of its own, ``"row"`` gives all
            of them one row, that of a class in the batch (``distill``). Each image then counts
            once, whatever ``expansion`` and ``forget_share`` say.
        forget_share: Share of pairs in which a sample forgets its own class (``distill``).
        set_share: Share of pairs with a set of 2 or more classes (``distill``).
        max_set: Largest set drawn in training.
        blend: Share of images blended with another one of the batch, which takes at most half
            (``distill``). The base model's answer then chooses the row, or, of a multi-label
            sample, one of its labels as ever. Images the base model is sure of, as of those it
            was trained on, say little about its other classes.
        gates: ``"soft"`` sigmoids, or ``"hard"``: exactly 0 or 1 in every forward, straight-through
            gradients, and exact gates at the end.
        start: Alpha to start from when the filters are fresh; ``None`` keeps what apply set.
        depth: Share of the targets that are untrained, counted from the output; the others are
            pinned open.
        evaluations: Validations per epoch.
        patience: Validations without improvement before stopping; 0 never stops early.
    """

    name: str
    objective: str
    optimiser: str
    learning_rate: float
    schedule: str = "constant"
    expansion: int = 3
    lambda_retain: float = 1.0
    lambda_forget: float = 1.0
    lambda_alpha: float = 1.0
    lambda_deep: float = 0.0
    lambda_fisher: float = 0.0
    fisher_images: int = 1500
    alike: int = 0
    regulariser: str = "global"
    epsilon: float = 1e-6
    margin: float = 5.0
    pairs: str = "mixed"
    forget_share: float = 0.5
    set_share: float = 0.0
    max_set: int = 5
    blend: float = 0.0
    gates: str = "soft"
    start: float | None = None
    depth: float = 1.0
    evaluations: int = 5
    patience: int = 10

    def __post_init__(self) -> None:
        _one_of(self, "objective", "paper", "distill", "linear")
        _one_of(
            self, "optimiser", *(("solver",) if self.is_solved else ("sgd", "adam", "row_adam"))
        )
        _one_of(self, "schedule", "constant", "cosine")
        _one_of(self, "regulariser", "global", "layer")
        _one_of(self, "pairs", "mixed", "row")
        _one_of(self, "gates", "soft", "hard")
        for name in ("blend", "forget_share", "set_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is a share: it must be in 0..1.")
        if self.blend and self.objective == "paper":
            raise ValueError(
                f"blend={self.blend} has no meaning for the paper's objective: a blended image has "
                "no label. Use objective='distill', or blend=0."
            )
        if self.pairs == "row" and (self.objective == "paper" or self.set_share):
            raise ValueError(
                f"pairs='row' has one class for all images of a step, but objective="
                f"{self.objective!r} and set_share={self.set_share}. Use objective='distill' and "
                "set_share=0, or pairs='mixed'."
            )
        if self.lambda_deep and (self.pairs != "row" or self.patience or self.lambda_deep < 0):
            raise ValueError(
                f"lambda_deep={self.lambda_deep} compares the images of a step under one row, and "
                f"has no place in a validation; pairs={self.pairs!r}, patience={self.patience}. "
                "Use lambda_deep > 0 with pairs='row' and patience=0, or lambda_deep=0."
            )
        if bool(self.lambda_fisher) != self.is_solved or self.lambda_fisher < 0:
            raise ValueError(
                f"lambda_fisher={self.lambda_fisher} does not go with objective="
                f"{self.objective!r}: the linear objective needs a positive one, others have no "
                "use for it."
            )
        for name, idle in (
            ("blend", 0.0),
            ("gates", "soft"),
            ("lambda_deep", 0.0),
            ("patience", 0),
        ):
            if self.is_solved and getattr(self, name) != idle:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no meaning for the linear objective, "
                    f"which takes no steps. Use {name}={idle!r}."
                )
        if self.is_solved and not (
            self.lambda_alpha > 0 and self.fisher_images > 0 and self.alike >= 0
        ):
            raise ValueError(
                f"lambda_alpha={self.lambda_alpha} and fisher_images={self.fisher_images} must be "
                f"positive for the linear objective, and alike={self.alike} not negative."
            )
        if (
            self.expansion < 1
            or not 0 < self.depth <= 1
            or not (self.learning_rate > 0 or self.is_solved)
        ):
            raise ValueError(
                f"expansion={self.expansion} must be at least 1, depth={self.depth} in (0, 1] and "
                f"learning_rate={self.learning_rate} positive."
            )

    @property
    def is_solved(self) -> bool:
        """Whether there are no steps: the linear objective is solved."""
        return self.objective == "linear"

    def __str__(self) -> str:
        return "\n".join(f"{f.name} = {getattr(self, f.name)!r}" for f in fields(self))

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON and TOML."""
        return asdict(self)


def _one_of(recipe: Recipe, name: str, *allowed: str) -> None:
    value = getattr(recipe, name)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(allowed)}.")


# Sections "Training" and "Implementation details" of the paper: SGD with learning rate 100, chi 3,
# lambda 1 / 10 / 1 (100 for ViT), validation five times an epoch, patience 10. The paper tells no
# epsilon. At 1e-6 the first step on digits sends alphas to -40,000 and nothing is kept (Acc_r 11);
# at 0.1 Acc_r is 75 after 200 steps and at 1 it is 91, each with Acc_f 0.
PAPER = Recipe("paper", "paper", "sgd", 100.0, lambda_forget=10.0, expansion=3, epsilon=1.0)
PAPER_VIT = Recipe(
    "paper-vit", "paper", "sgd", 100.0, lambda_forget=100.0, expansion=3, epsilon=1.0
)
# Ours; `benchmarks/untraining.py --ablations` shows what each choice is worth.
DISTILL = Recipe(
    "distill",
    "distill",
    "row_adam",
    0.1,
    schedule="cosine",
    expansion=4,
    lambda_alpha=0.0,
    forget_share=0.3,
    set_share=0.75,
    blend=0.6,
    gates="hard",
    start=1.0,
    depth=0.25,
    patience=0,
)

# For small or narrow models, where exact gates on the deepest quarter leave too few units to choose
# from: soft gates on every target, one class at a time.
DISTILL_SOFT = Recipe(
    "distill-soft",
    "distill",
    "adam",
    0.2,
    schedule="cosine",
    expansion=4,
    lambda_alpha=0.0,
    margin=4.0,
    forget_share=0.3,
    blend=0.5,
    patience=0,
)

# For very many classes with a few images of each: what a row's images and those most like them ask
# for, at the least cost to all others, solved instead of learned. Measured by
# `benchmarks/imagenet.py` on 10,368 units.
LINEAR = Recipe(
    "linear",
    "linear",
    "solver",
    0.0,
    lambda_alpha=0.0003,
    lambda_fisher=3.0,
    fisher_images=4000,
    margin=9.0,
    alike=16,
    patience=0,
)

RECIPES = {recipe.name: recipe for recipe in (PAPER, PAPER_VIT, DISTILL, DISTILL_SOFT, LINEAR)}


def get_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe by name, or the recipe itself.

    Example:
        >>> get_recipe("paper").learning_rate
        100.0
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is unknown. Use one of {', '.join(RECIPES)}.")
    return RECIPES[recipe]
