"""The paper's tables beside ours, made of stored lines and nothing else."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from common import RESULTS
from paper.cells import COLUMNS, CURVES, behind, counts, of, pairs, shown, why_not
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
    "deep.md": "forgetting in the features",
    "one_round.md": "one round against ten: time and storage",
    "compare_*.md": "beside ten other methods, with probe and membership inference",
}


def table1(runs: Sequence[Run]) -> str:
    """Acc_r / Acc_f / ZRF / relearn epochs, the paper's and ours."""
    rows = [
        "# Acc_r, Acc_f, ZRF and relearn time: the paper's and ours",
        "",
        "Rebuilt by `python benchmarks/paper --tables` from `paper.jsonl`, `untraining.jsonl` "
        "(accuracies on more test images) and `imagenet.jsonl`, which have the command, seed, "
        "commit and environment of every line. Rows, seeds and test images are those of the "
        "accuracies; ZRF and relearning are of seed 0 and fewer images (`few` in table2.md), "
        "ImageNet's ZRF of all. Ours "
        f"under `distill`: {OURS} Accuracies and ZRF in "
        "per cent, ± the standard deviation over seeds; relearn epochs of the baked model's "
        "weights, classes that never came back in brackets, of ten unless it says of how many, and "
        "at most 100 epochs unless it names the cap. `paper` is the paper's WF-Net, on our side "
        "its recipe as we read it; `distill` is our recipe. Models retrained beside an earlier "
        "original are kept, but for relearning, which ends at the original's accuracy. A dash in "
        "the paper's column: not in the paper; in ours: not measured, with the reason.",
        "",
        "| dataset | backbone | method | the paper: Acc_r / Acc_f / ZRF / relearn "
        "| ours: Acc_r / Acc_f / ZRF / relearn | rows, seeds, test images |",
        "|---|---|---|---|---|---|",
    ]
    order = (DATASETS, BACKBONES, METHODS)
    keys = {*PAPER, *(run.key for run in runs)}
    for key in sorted(keys, key=lambda key: [names.index(k) for names, k in zip(order, key)]):
        found = of(runs, *key)
        theirs = " / ".join(map(str, PAPER.get(key, ()))) or "-"
        ours = " / ".join(shown(found, column) for column in COLUMNS)
        mine = ours if found else f"- ({why_not(*key)})"
        rows.append(f"| {' | '.join(key)} | {theirs} | {mine} | {counts(found)} |")
    return "\n".join([*rows, "", *behind(runs, COLUMNS), "", *beyond(), ""])


def table2(runs: Sequence[Run]) -> str:
    """Insertion and deletion, the paper's and ours with the random control."""
    rows = [
        "# Insertion and deletion: the paper's and ours",
        "",
        "Rebuilt by `python benchmarks/paper --tables`. In brackets the random-order control. "
        "Few: the test images behind curves and, but for ImageNet, ZRF. Ours "
        f"under `distill`: {OURS}",
        "",
        "| dataset | backbone | the paper: insertion / deletion | method "
        "| ours: insertion / deletion | rows, seeds, few |",
        "|---|---|---|---|---|---|",
    ]
    for place, printed in PAPER_CURVES.items():
        theirs = " / ".join(f"{value:.2f}" for value in printed)
        curved = [replace(r, test_images=r.few) for r in runs if "insertion" in r.numbers]
        for method in [m for m in FILTERED if of(curved, *place, m)] or ["-"]:
            found = of(curved, *place, method)
            cells = [f"{shown(found, n)} ({shown(found, 'random ' + n, 3)})" for n in CURVES]
            mine = " / ".join(cells) if found else f"- ({why_not(*place)})"
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


def readme_tables(runs: Sequence[Run]) -> str:
    """WF-Net and ours in short, with what ours was measured on."""
    short = {"mnist": "MNIST", "cifar10": "CIFAR-10", "imagenet": "ImageNet-1k"}
    head = " | ".join(f"{name}, paper | {name}, ours" for name in short.values())
    heading = [f"| backbone | {head} |", "|---|" + "---|---|" * len(short)]
    accuracies, curves, sizes = [*heading], [*heading], []
    for backbone in NAMES:
        first, second = [], []
        for dataset, name in short.items():
            first += accuracy_cells(runs, dataset, backbone)
            theirs = " / ".join(f"{value:.2f}" for value in PAPER_CURVES[dataset, backbone])
            mine = of(runs, dataset, backbone, "distill")
            second += [theirs, slashed(*(shown(mine, column, 2) for column in CURVES))]
            if mine:
                sizes.append(f"{NAMES[backbone]} on {name} {counts(mine)}")
        accuracies.append(f"| {NAMES[backbone]} | {' | '.join(first)} |")
        curves.append(f"| {NAMES[backbone]} | {' | '.join(second)} |")
    both = pairs(runs, {**COLUMNS, **CURVES})
    worse = sum(pair.behind for pair in both)
    return "\n".join(
        [
            "Acc_r / Acc_f in %, the original model's accuracy in brackets:",
            "",
            *accuracies,
            "",
            "Insertion / deletion:",
            "",
            *curves,
            "",
            *textwrap.wrap(
                f"Ours, rows, seeds and test images: {'; '.join(sizes) or 'nothing run'}. A dash "
                f"is not run. Of the {len(both)} numbers that both have, ZRF and relearn time "
                f"included, the paper's is better in {worse}: `benchmarks/results/table1.md` and "
                "`table2.md` have every cell, and end with the list of those.",
                width=105,
                break_on_hyphens=False,
            ),
        ]
    )


def accuracy_cells(runs: Sequence[Run], dataset: str, backbone: str) -> list[str]:
    """Acc_r / Acc_f (original), the paper's and ours."""
    theirs, before = (PAPER[dataset, backbone, method] for method in ("paper", "original"))
    mine, original = (of(runs, dataset, backbone, method) for method in ("distill", "original"))
    ours = slashed(shown(mine, "Acc_r", 1), shown(mine, "Acc_f", 2))
    bracket = f" ({shown(original, 'Acc_r', 1)})" if mine and original else ""
    return [f"{theirs[0]} / {theirs[1]} ({before[0]})", f"{ours}{bracket}"]


def slashed(*cells: str) -> str:
    return "-" if set(cells) == {"-"} else " / ".join(cells)


def with_tables(readme: str, runs: Sequence[Run]) -> str:
    """The README's text with its tables of the paper made anew."""
    start, end = "<!-- table: paper -->", "<!-- end -->"
    pattern = re.compile(f"{re.escape(start)}\n.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise ValueError(f"the README needs one {start} with an {end} after it.")
    return pattern.sub(lambda _: f"{start}\n{readme_tables(runs)}\n{end}", readme)
