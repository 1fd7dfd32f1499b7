"""The columns of a report: what is measured, what may be spent on it, and what it means."""

from __future__ import annotations

from dataclasses import dataclass, field

from wfilter.evaluation.cells import Better, Column

GAP = ("Acc_r", "Acc_f", "MIA confidence", "probe f")
"""The columns over which the gap to the retrained model is taken."""


@dataclass(frozen=True)
class Budget:
    """How much is spent on each metric; part of every report.

    Attributes:
        test_images: In memory for all metrics but the accuracies, the same number of each class.
        train_images: Likewise, for probe, membership inference and relearning.
        retain_rows: Rows besides its own under which an image is tried; ``None``: all of them for
            up to 20 rows, else 4.
        zrf_draws: Random networks that ZRF is averaged over.
        set_sizes: Sizes of the random sets.
        relearn_samples: Images of an epoch of relearning.
        relearn_epochs: The cap; the paper's is 100.
        relearn_rate: Adam's learning rate on weights. Too large a rate ruins any model and looks
            like lasting forgetting: at 1e-3 a ResNet-18 on CIFAR-10 that forgot nothing falls
            from 93 to 33 % in three steps, at 1e-4 it does not. The original is the control.
        relearn_alpha_rate: On alphas.
        shots: Images of each class to relearn from.
        shot_steps: Full-batch steps on them.
        curve_images: Of each class, for insertion and deletion.
        curve_steps: Points of a curve, less one.
    """

    test_images: int = 1000
    train_images: int = 2000
    retain_rows: int | None = None
    zrf_draws: int = 3
    set_sizes: tuple[int, ...] = (2, 3, 5)
    relearn_samples: int = 500
    relearn_epochs: int = 100
    relearn_rate: float = 1e-4
    relearn_alpha_rate: float = 0.1
    shots: tuple[int, ...] = (1, 5, 10)
    shot_steps: int = 20
    curve_images: int = 20
    curve_steps: int = 20


@dataclass(frozen=True)
class Problem:
    """What the definitions mention: the budget, how many rows are tried, how many classes exist.

    Example:
        >>> Problem(rows=1000, num_classes=1000).retain_rows
        4
    """

    budget: Budget = field(default_factory=Budget)
    rows: int = 10
    num_classes: int = 10

    @property
    def retain_rows(self) -> int | None:
        """Rows besides its own under which an image is tried; ``None``: all."""
        if self.budget.retain_rows is not None:
            return self.budget.retain_rows
        return None if self.rows <= 20 else 4

    @property
    def set_sizes(self) -> list[int]:
        """Those that leave a class to retain."""
        return [size for size in self.budget.set_sizes if size < self.num_classes]


def accuracy(problem: Problem) -> list[Column]:
    """Accuracies, and what is worked out from them and the retrained model."""
    limit, group, bar = problem.retain_rows, "accuracy", "against the retrained model"
    tried = (
        "all rows"
        if limit is None
        else f"{limit} random rows for each image, dealt evenly out of {problem.rows}"
    )
    retain = f"Accuracy on the other classes, {tried}; mean of rows."
    aus = "(1 - (Acc_r of the original - Acc_r)) / (1 + Acc_f); 1 is ideal (arXiv 2312.02052)."
    routing = (
        "Share of the forgotten class's images sent elsewhere than the retrained model sends them "
        "(total variation)."
    )
    gap = f"Mean absolute difference over {', '.join(GAP)}, those the retrained model has."
    return [
        Column("Acc_r", group, "higher", retain),
        Column("Acc_f", group, "lower", "Accuracy on the forgotten class; mean of rows."),
        _worst("Acc_r", "higher", "lowest"),
        _worst("Acc_f", "lower", "highest"),
        Column("AUS", group, "higher", aus, "number"),
        Column("routing", bar, "lower", routing, derived="routing"),
        Column("gap", bar, "lower", gap, derived="gap", source=", ".join(GAP)),
    ]


def _worst(source: str, better: Better, word: str) -> Column:
    text = f"The row with the {word} {source}."
    return Column(f"worst {source}", "accuracy", better, text, derived="worst", source=source)


def sets(problem: Problem) -> list[Column]:
    """Two accuracies for each size."""
    group, found = "sets of classes", []
    for size in problem.set_sizes:
        what = f"each image forgets a random set of {size} classes, its own in it every other time"
        found.append(Column(f"{size} Acc_r", group, "higher", f"Outside the set, {what}."))
        found.append(Column(f"{size} Acc_f", group, "lower", f"Inside the set, {what}."))
    return found


def zrf(problem: Problem) -> list[Column]:
    """ZRF."""
    text = (
        "1 - mean JS divergence (nats) between the outputs on the forgotten class's images and "
        f"those of a random network, {problem.budget.zrf_draws} draws; from 30.7 to 100."
    )
    return [Column("ZRF", "likeness to a random network", "higher", text)]


def probe(problem: Problem) -> list[Column]:
    """Two classifiers on features, two halves."""
    group, found = "what the features still know", []
    for name, text in (("probe", "logistic regression"), ("NCM", "the nearest class mean")):
        own = f"Accuracy of {text} on penultimate features, forgotten class."
        found.append(Column(f"{name} f", group, "retrained", own))
        found.append(Column(f"{name} r", group, "higher", "The same, mean of the other classes."))
    return found


def membership(problem: Problem) -> list[Column]:
    """Two attacks."""
    group, fitted = "membership inference", "fitted on the retained classes"
    confidence = (
        "Share of the forgotten class's training images that an SVC on the confidence in their "
        f"label takes for unseen (SalUn); {fitted}."
    )
    entropy = f"Share that logistic regression on the entropy takes for seen (SSD); {fitted}."
    return [
        Column("MIA confidence", group, "retrained", confidence),
        Column("MIA entropy", group, "retrained", entropy),
    ]


def relearn(problem: Problem) -> list[Column]:
    """Epochs, for alphas and for weights."""
    cap, samples = problem.budget.relearn_epochs, problem.budget.relearn_samples
    text = (
        f"Epochs of {samples} training images until the class's original accuracy is back, at most "
        f"{cap}; in brackets the classes that never came back. Adam on the"
    )
    ways = {
        "alphas": "row's alphas, straight-through where gates are exact, "
        f"learning rate {problem.budget.relearn_alpha_rate:g}.",
        "weights": "weights of the baked or unlearned model, logit masks taken off first, "
        f"learning rate {problem.budget.relearn_rate:g}.",
    }
    return [
        Column(f"relearn {name}", "relearning", "higher", f"{text} {what}", "epochs", cap)
        for name, what in ways.items()
    ]


def few_shot(problem: Problem) -> list[Column]:
    """Two accuracies for each number of shots."""
    found, group = [], "relearning from few images"
    for k in problem.budget.shots:
        shown = "1 image" if k == 1 else f"{k} images"
        rate = problem.budget.relearn_rate
        text = (
            f"after {problem.budget.shot_steps} Adam steps, learning rate {rate:g}, on {shown} of "
            "each class; where the original's line falls too, training did damage."
        )
        found.append(Column(f"{k}-shot Acc_f", group, "lower", f"Acc_f {text}"))
        found.append(Column(f"{k}-shot Acc_r", group, "higher", f"Acc_r {text}"))
    return found


def curves(problem: Problem) -> list[Column]:
    """Two curves and their controls."""
    group, budget = "insertion and deletion", problem.budget
    text = f"in {budget.curve_steps} steps, {budget.curve_images} images a class"
    insertion = f"Area under the relative confidence while gates open, most closed first, {text}."
    deletion = f"The same while gates close from all open, {text}."
    return [
        Column("insertion", group, "higher", insertion, "number"),
        Column("deletion", group, "lower", deletion, "number"),
        Column("random insertion", group, "none", "The control, in a random order.", "number"),
        Column("random deletion", group, "none", "The control, in a random order.", "number"),
    ]


def cost(problem: Problem) -> list[Column]:
    """Seconds, numbers stored, time to switch."""
    number = problem.num_classes
    every = f"Seconds for all {number} classes; for methods of one class the mean times {number}."
    stored = (
        f"Numbers stored beside the original to serve all {number} classes: alphas, or every "
        "changed tensor."
    )
    switch = "Milliseconds to change the class: new gates, or a copy of the changed tensors."
    return [
        Column("s/class", "cost", "lower", "Seconds of forgetting for one class.", "seconds"),
        Column("s, all", "cost", "lower", every, "seconds"),
        Column("stored", "cost", "lower", stored, "count"),
        Column("MB", "cost", "lower", "The same in megabytes.", "seconds"),
        Column("switch ms", "cost", "lower", switch, "seconds"),
    ]
