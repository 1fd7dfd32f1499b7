"""Single cells of the paper's tables, and whether the paper's number or ours is better."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paper.numbers import BACKBONES, DATASETS, PAPER, PAPER_CURVES
from paper.runs import RELEARN, Run
from wfilter.metrics.relearn import CAP

# The columns of the two tables, and which way is better.
COLUMNS = {"Acc_r": "↑", "Acc_f": "↓", "ZRF": "↑", RELEARN: "↑"}
CURVES = {"insertion": "↑", "deletion": "↓"}
DIGITS = {"Acc_r": 2, "Acc_f": 2, "ZRF": 1, "insertion": 3, "deletion": 3}


def of(runs: Sequence[Run], *key: str) -> list[Run]:
    return [run for run in runs if run.key == key]


def mean(runs: Sequence[Run], column: str) -> float | None:
    """Over seeds."""
    values = [run.numbers[column] for run in runs if column in run.numbers]
    return statistics.mean(values) if values else None


def shown(runs: Sequence[Run], column: str, digits: int | None = None) -> str:
    """Mean over seeds, with their spread where there are several."""
    if column == RELEARN:
        alphas = relearned([replace(run, epochs=run.by_alphas) for run in runs])
        return relearned(runs) + ("" if alphas == "-" else f", by alphas {alphas}")
    digits = DIGITS[column] if digits is None else digits
    values = [run.numbers[column] for run in runs if column in run.numbers]
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def pooled(runs: Sequence[Run]) -> tuple[float, list[float | None]]:
    """The cap and the epochs of all seeds; those with a lower cap than another are left out."""
    cap = max((run.cap for run in runs if run.epochs), default=CAP)
    return cap, [epoch for run in runs if run.cap == cap for epoch in run.epochs]


def mean_epochs(epochs: Sequence[float | None], cap: float) -> float:
    return statistics.mean(cap if epoch is None else epoch for epoch in epochs)


def relearned(runs: Sequence[Run]) -> str:
    """Epochs as the paper prints them: failures count as the cap, their number in brackets.

    Where it is not ten classes and a cap of 100, both are named.
    """
    cap, epochs = pooled(runs)
    if not epochs:
        return "-"
    failures = epochs.count(None)
    never = failures == len(epochs)
    text = f">{cap:.0f}" if never else f"{mean_epochs(epochs, cap):.1f}"
    notes = f"{failures}" if len(epochs) == 10 else f"{failures} of {len(epochs)}"
    return f"{text} ({notes}{'' if cap == CAP else f'; cap {cap:.0f}'})"


def counts(runs: Sequence[Run]) -> str:
    """Rows, seeds and test images; a range where the seeds differ."""
    if not runs:
        return "-"
    images = [run.test_images for run in runs if run.test_images is not None]
    rows = span([run.rows for run in runs])
    return f"{rows}, {len(runs)}, {span(images) if images else '?'}"


def few_of(runs: Sequence[Run]) -> str:
    """The few images behind ZRF and relearning, in brackets, where they are not all."""
    told = [run for run in runs if "ZRF" in run.numbers or run.epochs]
    few = [run.few for run in told if run.few and run.few < (run.test_images or 0)]
    return f" ({span(few)})" if few else ""


def span(values: Sequence[int]) -> str:
    return " to ".join(f"{value:,}" for value in sorted({min(values), max(values)}))


def why_not(dataset: str, backbone: str, method: str = "") -> str:
    """Why a cell of ours is empty."""
    if dataset == "imagenet" and backbone not in ("vit_tiny", "resnet18"):
        return "no weights among the data; --random-weights tries the path"
    if (dataset, method) == ("imagenet", "paper"):
        return "its steps go over the training set, of which three images a class are at hand"
    if (dataset, backbone) == ("cifar10", "vit_small"):
        return "no original: half an hour of training on a CPU core"
    if method == "retrained":
        return "a training as long as the original's for each class"
    if (dataset, method) in (("mnist", "random_labels"), ("mnist", "negative_gradients")):
        return "the original is no longer at hand"
    return "not run"


# ---- who is better ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A number of the paper's WF-Net and ours of one recipe."""

    dataset: str
    backbone: str
    column: str
    theirs: str
    ours: str
    behind: bool
    decided: bool = True
    again: str = "-"


def pairs(runs: Sequence[Run], columns: Mapping[str, str], method: str = "distill") -> list[Pair]:
    """Every number that both have."""
    found = []
    for place in [(d, b) for d in DATASETS for b in BACKBONES]:
        mine, again = (of(runs, *place, name) for name in (method, "paper"))
        printed = [*PAPER.get((*place, "paper"), ())]
        known = dict(zip(COLUMNS, map(str, printed)))
        known |= dict(zip(CURVES, (f"{value:.2f}" for value in PAPER_CURVES.get(place, ()))))
        for column in [c for c in columns if c in known and shown(mine, c) != "-"]:
            worse, decided = compared(known[column], mine, column, columns[column])
            cells = (known[column], shown(mine, column), worse, decided, shown(again, column))
            found.append(Pair(*place, column, *cells))
    return found


def compared(theirs: str, runs: Sequence[Run], column: str, arrow: str) -> tuple[bool, bool]:
    """Whether ours is worse at the digits the paper prints, and whether that is certain.

    Relearning that stopped before 100 epochs may have been the slower one.
    """
    number = theirs.lstrip(">").split()[0]
    bar, digits = float(number), len(number.partition(".")[2])
    if column != RELEARN:
        value = mean(runs, column)
        assert value is not None
        gap = round(value, digits) - bar
        return (gap < 0 if arrow == "↑" else gap > 0), True
    cap, epochs = pooled(runs)
    worse = round(mean_epochs(epochs, cap), 1) < bar
    return worse, not worse or round(mean_epochs(epochs, max(cap, CAP)), 1) < bar


# What decides each number, as far as our own lines tell.
REASONS = {
    ("ZRF", "distill"): "how flat the answers on the forgotten class are. `distill` copies the "
    "base model's answers without the class and does nothing to flatten them",
    ("ZRF", "auto"): "how flat the answers on the forgotten class are. Gates copy the base model's "
    "answers without the class, and on ResNet-18 those are no flatter: a logit mask has 63.1 "
    "(classes 1, 3 and 8, `compare_cifar10_resnet18.md`). Draws of feature rows are answered as "
    "unsurely as those. Flatter answers would raise ZRF and tell the forgotten images by their "
    "doubt, so there is no such option",
    ("deletion", ""): "which gates close, and in which order. The paper's recipe, run by us on the "
    "same networks, is ahead of ours",
    (RELEARN, ""): "what is trained, which the paper does not say: here all weights of the baked "
    "model, of which closed gates hold few, or the row's alphas alone, where there are gates. A "
    "class is back when its share of the few images is, 20 or 50, so that one image decides much",
}


def reason(column: str, method: str) -> str:
    """Why the paper's number may be the better one; the accuracies have no reason to be."""
    return REASONS.get((column, method)) or REASONS.get((column, "")) or "unexplained"


def behind(runs: Sequence[Run], columns: Mapping[str, str]) -> list[str]:
    """The list of what the paper still does better, for the default and for our fixed recipe."""
    parts = [behind_of(runs, columns, method) for method in ("auto", "distill")]
    return [*parts[0], "", *parts[1]] if pairs(runs, columns, "auto") else parts[1]


def behind_of(runs: Sequence[Run], columns: Mapping[str, str], method: str) -> list[str]:
    both = pairs(runs, columns, method)
    worse = [pair for pair in both if pair.behind]
    lines = [
        f"## Where the paper's WF-Net is better than our `{method}`",
        "",
        f"In {len(worse)} of the {len(both)} numbers that both have, compared at the digits the "
        "paper prints.",
    ]
    if worse:
        head = "| dataset | backbone | metric | the paper | ours | its recipe, run by us |"
        lines += ["", head, "|---|---|---|---|---|---|"]
    for pair in worse:
        metric = f"{pair.column.removesuffix(' weights')} {columns[pair.column]}"
        ours = pair.ours if pair.decided else f"{pair.ours}, undecided: the cap came first"
        cells = (pair.dataset, pair.backbone, metric, pair.theirs, ours, pair.again)
        lines.append(f"| {' | '.join(cells)} |")
    if worse:
        names = dict.fromkeys(pair.column for pair in worse)
        lines += ["", "What decides them:", ""]
        lines += [f"- {name.removesuffix(' weights')}: {reason(name, method)}." for name in names]
    return lines
