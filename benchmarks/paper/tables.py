"""The paper's tables beside ours, made of stored lines and nothing else."""

from __future__ import annotations

import itertools
import re
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace

import pages
from common import RESULTS
from paper.cells import COLUMNS, CURVES, behind, counts, few_of, of, pairs, shown, why_not
from paper.numbers import BACKBONES, DATASETS, FILTERED, METHODS, NAMES, PAPER, PAPER_CURVES
from paper.runs import Run

OURS = (
    "VGG-16 with `depth=0.45`, ResNet-18 on MNIST with `forget_share=0.5`, ViTs for small images "
    "by `distill-soft`, ViT-T on ImageNet by `linear` on all projections of attention and MLP in "
    "its last three blocks, with three images of each class; in place of seeds it has two sets of "
    "1,000 validation images, each held out in turn."
)
BEYOND = {
    "untraining.md": "sets of classes, on the whole test set",
    "ablations.md": "what each choice of `distill` is worth",
    "without_training_set.md": "without the training set",
    "feature_rows.md": "forgetting in the features",
    "one_round.md": "one round against ten: time and storage",
    "compare_*.md": "beside ten other methods, with probe and membership inference",
}


def table1(runs: Sequence[Run]) -> str:
    """Acc_r / Acc_f / ZRF / relearn epochs, the paper's and ours."""
    rows = [
        "# Acc_r, Acc_f, ZRF and relearn time: the paper's and ours",
        "",
        "Rebuilt by `python benchmarks/paper --tables` from `paper.jsonl`, `untraining.jsonl` "
        "(accuracies on more test images), `imagenet.jsonl` and `auto.jsonl`, which have the "
        "command, seed, commit and environment of every line.",
        "",
        "- `paper`: the paper's WF-Net, on our side its recipe as we read it. `auto`: the default "
        "recipe, with no setting for any backbone; it ends with gates or with feature rows. "
        f"`distill`: our fixed recipe for gates, the backbones' settings chosen by us: {OURS}",
        "- Acc_r, Acc_f and ZRF in per cent, ± the standard deviation over seeds. Rows, seeds and "
        "test images are those of the accuracies; ZRF and relearning may be of fewer seeds and "
        "are of the few images in brackets, ImageNet's ZRF of all.",
        "- Relearn: epochs until the class's accuracy is back, training all weights of the baked "
        "model (Adam, 1e-4). By alphas: training the row's alphas alone (0.1, straight-through "
        "where gates are exact); feature rows have none. An epoch has 500 training images, or as "
        "many as the few if these are fewer. In brackets the classes that never came back, of "
        "ten unless it says of how many, in 100 epochs unless it names the cap.",
        "- `from`: a row that starts from another network than the backbone's other rows, of that "
        "accuracy. ImageNet's ResNet-18 was compressed and fine-tuned by others; in place of "
        "seeds, `auto` on ImageNet has two sets of validation images, held out in turn, and ZRF "
        "of those that today's code was run on. Models "
        "retrained beside an earlier original are kept, but for relearning, which ends at the "
        "original's accuracy.",
        "- A dash in the paper's column: not in the paper; in ours: not measured, with the reason.",
        "",
        "| dataset | backbone | method | the paper: Acc_r / Acc_f / ZRF / relearn "
        "| ours: Acc_r / Acc_f / ZRF / relearn | rows, seeds, test images (few) |",
        "|---|---|---|---|---|---|",
    ]
    order = (DATASETS, BACKBONES, METHODS)
    keys = {*PAPER, *(run.key for run in runs)}
    for key in sorted(keys, key=lambda key: [names.index(k) for names, k in zip(order, key)]):
        found = of(runs, *key)
        theirs = " / ".join(map(str, PAPER.get(key, ()))) or "-"
        ours = " / ".join(shown(found, column) for column in COLUMNS)
        before = [run.original for run in found if run.original is not None]
        ours += f" (from {statistics.mean(before):.2f})" if before else ""
        mine = ours if found else f"- ({why_not(*key)})"
        images = f"{counts(found)}{few_of(found)}"
        rows.append(f"| {' | '.join(key)} | {theirs} | {mine} | {images} |")
    return "\n".join([*rows, "", *behind(runs, COLUMNS), "", *beyond(), ""])


def table2(runs: Sequence[Run]) -> str:
    """Insertion and deletion, the paper's and ours with the random control."""
    rows = [
        "# Insertion and deletion: the paper's and ours",
        "",
        "Rebuilt by `python benchmarks/paper --tables`. In brackets the random-order control. "
        f"Few: the test images behind the curves. Ours under `distill`: {OURS}",
        "",
        "| dataset | backbone | the paper: insertion / deletion | method "
        "| ours: insertion / deletion | rows, seeds, few |",
        "|---|---|---|---|---|---|",
    ]
    for place, printed in PAPER_CURVES.items():
        theirs = " / ".join(f"{value:.2f}" for value in printed)
        curved = [replace(r, test_images=r.few) for r in runs if "insertion" in r.numbers]
        default = "auto" if of(runs, *place, "auto") else None
        for method in [m for m in FILTERED if m == default or of(curved, *place, m)] or ["-"]:
            found = of(curved, *place, method)
            cells = [f"{shown(found, n)} ({shown(found, 'random ' + n, 3)})" for n in CURVES]
            ungated = "it ended with feature rows, which have no gates to order"
            why = ungated if of(runs, *place, method) else why_not(*place)
            mine = " / ".join(cells) if found else f"- ({why})"
            rows.append(f"| {' | '.join(place)} | {theirs} | {method} | {mine} | {counts(found)} |")
    return "\n".join([*rows, "", *behind(runs, CURVES), ""])


def beyond() -> list[str]:
    """Links to what the paper does not have, as far as it has been run."""
    found = [
        f"- [{path.name}]({path.name}): {what}"
        for name, what in BEYOND.items()
        for path in sorted(RESULTS.glob(name))
    ]
    return ["## Beyond the paper", "", *found]


# ---- the README ---------------------------------------------------------------------------------


SHORT = {"mnist": "MNIST", "cifar10": "CIFAR-10", "imagenet": "ImageNet-1k"}


def pages_tables(runs: Sequence[Run]) -> dict[str, str]:
    """The tables of README and docs by the name in their markers: WF-Net and ours in short."""
    return {"accuracies": accuracies(runs), "curves": curves(runs), "sizes": sizes(runs)}


def beside(ours: str, cells: Callable[[str, str], list[str]]) -> str:
    """A table with the paper's cell and ours for each backbone and dataset."""
    head = " | ".join(f"{name}, paper | {name}, {ours}" for name in SHORT.values())
    lines = [f"| backbone | {head} |", "|---|" + "---|---|" * len(SHORT)]
    for backbone, name in NAMES.items():
        row = [cell for dataset in SHORT for cell in cells(dataset, backbone)]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def accuracies(runs: Sequence[Run]) -> str:
    return beside("ours", lambda dataset, backbone: accuracy_cells(runs, dataset, backbone))


def curves(runs: Sequence[Run]) -> str:
    """Insertion and deletion."""

    def cells(dataset: str, backbone: str) -> list[str]:
        theirs = " / ".join(f"{value:.2f}" for value in PAPER_CURVES[dataset, backbone])
        mine = of(runs, dataset, backbone, "distill")
        return [theirs, slashed(*(shown(mine, column, 2) for column in CURVES))]

    return beside("`distill`", cells)


def default_or_fixed(runs: Sequence[Run], dataset: str, backbone: str) -> list[Run]:
    """Of the default recipe; of `distill` where the default was not run."""
    found = (of(runs, dataset, backbone, method) for method in ("auto", "distill"))
    return next(filter(None, found), [])


def sizes(runs: Sequence[Run]) -> str:
    """What ours was measured on, and in how many numbers the paper is ahead."""
    measured = []
    for backbone, dataset in itertools.product(NAMES, SHORT):
        if mine := default_or_fixed(runs, dataset, backbone):
            measured.append(f"{NAMES[backbone]} on {SHORT[dataset]} {counts(mine)}")
    columns = {**COLUMNS, **CURVES}
    told = []
    for method, name in (("auto", "the default"), ("distill", "`distill`")):
        if both := pairs(runs, columns, method):
            worse = sum(pair.behind for pair in both)
            told.append(f"in {worse} of the {len(both)} that {name} has, too")
    text = (
        f"Rows, seeds and test images of ours: {'; '.join(measured) or 'nothing run'}. A dash "
        "is not run. Of the paper's numbers, ZRF, relearn time and curves included, the paper's "
        f"are better {' and '.join(told) or 'in none'}: `benchmarks/results/table1.md` and "
        "`table2.md` have every cell, and end with the list of those and their reasons."
    )
    return "\n".join(textwrap.wrap(text, width=100, break_on_hyphens=False))


def accuracy_cells(runs: Sequence[Run], dataset: str, backbone: str) -> list[str]:
    """Acc_r / Acc_f (original), the paper's and ours: the default, else `distill` by its name."""
    theirs, before = (PAPER[dataset, backbone, method] for method in ("paper", "original"))
    mine = default_or_fixed(runs, dataset, backbone)
    ours = slashed(shown(mine, "Acc_r", 1), shown(mine, "Acc_f", 2))
    name = "`distill` " if mine and mine[0].method == "distill" else ""
    started = shown(started_from(runs, mine), "Acc_r", 1)
    bracket = f" ({started})" if mine and started != "-" else ""
    return [f"{theirs[0]} / {theirs[1]} ({before[0]})", f"{name}{ours}{bracket}"]


def started_from(runs: Sequence[Run], mine: Sequence[Run]) -> list[Run]:
    """The originals of these runs: their own where they tell one, else the table's."""
    own = [replace(run, numbers={"Acc_r": run.original}) for run in mine if run.original]
    if own or not mine:
        return own
    original = of(runs, mine[0].dataset, mine[0].backbone, "original")
    return [run for run in original if run.seed in {run.seed for run in mine}] or original


def slashed(*cells: str) -> str:
    return "-" if set(cells) == {"-"} else " / ".join(cells)


MARKED = re.compile(r"(<!-- table: ([\w-]+) -->)\n.*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str, runs: Sequence[Run]) -> str:
    """A page's text with the tables between its markers made anew."""
    made = {**pages_tables(runs), **pages.tables(RESULTS)}
    names = [match[2] for match in MARKED.finditer(page)]
    if not names or not set(names) <= set(made):
        raise ValueError(
            f"a page needs <!-- table: NAME --> with an <!-- end --> after it, NAME one of "
            f"{', '.join(made)}; found {', '.join(names) or 'none'}."
        )
    return MARKED.sub(lambda match: f"{match[1]}\n{made[match[2]]}\n{match[3]}", page)
