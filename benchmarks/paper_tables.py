"""The paper's tables beside ours, made of stored lines and nothing else."""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import wfilter
from paper_numbers import (
    BACKBONES,
    DATASETS,
    FILTERED,
    METHODS,
    NAMES,
    PAPER,
    PAPER_CURVES,
)
from wfilter.metrics.relearn import CAP

RESULTS = Path(__file__).parent / "results"
RELEARN = "relearn weights"
# The columns of the two tables, and which way is better.
COLUMNS = {"Acc_r": "↑", "Acc_f": "↓", "ZRF": "↑", RELEARN: "↑"}
OURS = (
    "VGG-16 with `depth=0.45`, ViT-T on ImageNet by `distill-few` on its last three blocks with "
    "three images of each class."
)
CURVES = {"insertion": "↑", "deletion": "↓"}
DIGITS = {"Acc_r": 2, "Acc_f": 2, "ZRF": 1, "insertion": 3, "deletion": 3}
BEYOND = {
    "untraining.md": "sets of classes, on the whole test set",
    "ablations.md": "what each choice of `distill` is worth",
    "without_training_set.md": "without the training set",
    "deep.md": "forgetting in the features",
    "one_round.md": "one round against ten: time and storage",
    "compare_*.md": "beside ten other methods, with probe and membership inference",
}


# ---- from lines to runs -------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a stored line says, in the units of the tables.

    Attributes:
        numbers: Column -> mean over rows; accuracies and ZRF in per cent.
        epochs: Of relearning, for each row measured; ``None``: not within the cap.
        few: Test images behind everything but the accuracies.
    """

    dataset: str
    backbone: str
    method: str
    seed: int
    rows: int
    test_images: int | None
    numbers: Mapping[str, float]
    epochs: tuple[float | None, ...] = ()
    cap: float = CAP
    few: int | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Its row of the table; seeds share one."""
        return self.dataset, self.backbone, self.method


def key_of(line: Mapping[str, Any]) -> tuple[str, str, str, int]:
    return line["dataset"], line["backbone"], line["method"], line["seed"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a file; none if there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_runs(path: Path) -> list[Run]:
    """Of the lines with the same key the last; the files of other scripts have their say.

    Accuracies on more test images come from ``untraining.jsonl``, ImageNet's runs from
    ``imagenet.jsonl``.
    """
    runs = {key_of(line): run_of(line) for line in read_lines(path)}
    for run in untraining_runs(read_lines(path.with_name("untraining.jsonl"))):
        key = (*run.key, run.seed)
        if key not in runs:
            runs[key] = run
        elif (runs[key].test_images or 0) < (run.test_images or 0):
            numbers = {**runs[key].numbers, **run.numbers}
            runs[key] = replace(runs[key], numbers=numbers, test_images=run.test_images)
    original, filtered = imagenet_runs(read_lines(path.with_name("imagenet.jsonl")))
    taken = {run.key for run in filtered}
    kept = [run for run in runs.values() if run.key not in taken]
    known = {run.key for run in kept}
    return [*kept, *(run for run in original if run.key not in known), *filtered]


def run_of(line: Mapping[str, Any]) -> Run:
    """A line of ``paper.jsonl``."""
    report = wfilter.Report.from_json(json.dumps(line["report"]))
    method = report.methods[0]
    values = {c.name: (report.value(method, c.name), c.kind) for c in report.columns}
    numbers = {
        name: 100 * value if kind == "percent" else value
        for name, (value, kind) in values.items()
        if value is not None
    }
    again = report.rows[method].get(RELEARN)
    return Run(
        *key_of(line),
        rows=len(line["rows"]),
        test_images=report.facts.get("test images", {}).get("in all"),
        numbers=numbers,
        epochs=tuple(again.by_class.values()) if again else (),
        cap=(report.column(RELEARN).cap or CAP) if again else CAP,
        few=report.facts.get("budget", {}).get("test_images"),
    )


def untraining_runs(lines: Sequence[Mapping[str, Any]]) -> list[Run]:
    """Accuracies of filters, and of the originals under them, by ``untraining.py``."""
    runs = []
    for line in lines:
        backbone, _, dataset = line["model"].partition("-")
        dataset = {"cifar": "cifar10"}.get(dataset, dataset)
        if line["name"] not in FILTERED:
            continue
        facts = (line["seed"], 10, line["test_images"])
        numbers = {"Acc_r": line["acc_r"], "Acc_f": line["acc_f"]}
        runs.append(Run(dataset, backbone, line["name"], *facts, numbers))
        if line["seed"] == 0:
            whole = {"Acc_r": line["original"], "Acc_f": line["original"]}
            runs.append(Run(dataset, backbone, "original", *facts, whole))
    return runs


def imagenet_runs(lines: Sequence[Mapping[str, Any]]) -> tuple[list[Run], list[Run]]:
    """The original and ours, of the lines of ``imagenet.py`` marked for the table or the last."""
    original, filtered = [], []
    marked = [line for line in lines if line.get("table")]
    marked = marked or [line for line in lines if "table" not in line][-1:]
    for line in {line.get("seed", 0): line for line in marked}.values():
        facts = (line.get("seed", 0), line.get("rows", 1000), line.get("test_images"))
        whole = {"Acc_r": line["original"], "Acc_f": line["original"]}
        original.append(Run("imagenet", "vit_tiny", "original", *facts, whole))
        numbers = {"Acc_r": line["acc_r"], "Acc_f": line["acc_f"]}
        if "zrf" in line:  # a share there
            numbers["ZRF"] = 100 * line["zrf"] if line["zrf"] <= 1 else line["zrf"]
        for name in ("insertion", "deletion", "random_insertion", "random_deletion"):
            if name in line:
                numbers[name.replace("_", " ")] = line[name]
        few = line.get("curve_images")
        filtered.append(Run("imagenet", "vit_tiny", "distill", *facts, numbers, few=few))
    return original, filtered


# ---- cells --------------------------------------------------------------------------------------


def of(runs: Sequence[Run], *key: str) -> list[Run]:
    return [run for run in runs if run.key == key]


def mean(runs: Sequence[Run], column: str) -> float | None:
    """Over seeds."""
    values = [run.numbers[column] for run in runs if column in run.numbers]
    return statistics.mean(values) if values else None


def shown(runs: Sequence[Run], column: str, digits: int | None = None) -> str:
    """Mean over seeds, with their spread where there are several."""
    if column == RELEARN:
        return relearned(runs)
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


def span(values: Sequence[int]) -> str:
    return " to ".join(f"{value:,}" for value in sorted({min(values), max(values)}))


def why_not(dataset: str, backbone: str) -> str:
    """Why a cell of ours is empty."""
    if dataset == "imagenet" and backbone != "vit_tiny":
        return "no weights among the data; --random-weights tries the path"
    return "not run"


# ---- tables -------------------------------------------------------------------------------------


def table1(runs: Sequence[Run]) -> str:
    """Acc_r / Acc_f / ZRF / relearn epochs, the paper's and ours."""
    rows = [
        "# Acc_r, Acc_f, ZRF and relearn time: the paper's and ours",
        "",
        "Rebuilt by `python benchmarks/paper.py --tables` from `paper.jsonl`, `untraining.jsonl` "
        "(accuracies on more test images) and `imagenet.jsonl`, which have the command, seed, "
        "commit and environment of every line. Rows, seeds and test images are those of the "
        "accuracies; ZRF and relearning are of seed 0 and fewer images (`few` in table2.md). Ours "
        f"under `distill`: {OURS} Accuracies and ZRF in "
        "per cent, ± the standard deviation over seeds; relearn epochs of the baked model's "
        "weights, classes that never came back in brackets, of ten unless it says of how many, and "
        "at most 100 epochs unless it names the cap. `paper` is the paper's WF-Net, on our side "
        "its recipe as we read it; `distill` is our recipe. A dash in the paper's column: not in "
        "the paper; in ours: not measured, with the reason.",
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
        mine = ours if found else f"- ({why_not(*key[:2])})"
        rows.append(f"| {' | '.join(key)} | {theirs} | {mine} | {counts(found)} |")
    return "\n".join([*rows, "", *behind(runs, COLUMNS), "", *beyond(), ""])


def table2(runs: Sequence[Run]) -> str:
    """Insertion and deletion, the paper's and ours with the random control."""
    rows = [
        "# Insertion and deletion: the paper's and ours",
        "",
        "Rebuilt by `python benchmarks/paper.py --tables`. In brackets the random-order control. "
        f"Few: the test images behind curves and ZRF. Ours under `distill`: {OURS}",
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


# ---- who is better ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A number of the paper's WF-Net and ours of `distill`."""

    dataset: str
    backbone: str
    column: str
    theirs: str
    ours: str
    behind: bool
    decided: bool = True


def pairs(runs: Sequence[Run], columns: Mapping[str, str]) -> list[Pair]:
    """Every number that both have."""
    found = []
    for place in [(d, b) for d in DATASETS for b in BACKBONES]:
        mine = of(runs, *place, "distill")
        printed = [*PAPER.get((*place, "paper"), ())]
        known = dict(zip(COLUMNS, map(str, printed)))
        known |= dict(zip(CURVES, (f"{value:.2f}" for value in PAPER_CURVES.get(place, ()))))
        for column in [c for c in columns if c in known and shown(mine, c) != "-"]:
            worse, decided = compared(known[column], mine, column, columns[column])
            pair = Pair(*place, column, known[column], shown(mine, column), worse, decided)
            found.append(pair)
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


def behind(runs: Sequence[Run], columns: Mapping[str, str]) -> list[str]:
    """The list of what the paper still does better."""
    both = pairs(runs, columns)
    worse = [pair for pair in both if pair.behind]
    lines = [
        "## Where the paper's WF-Net is better than our `distill`",
        "",
        f"In {len(worse)} of the {len(both)} numbers that both have, compared at the digits the "
        "paper prints.",
    ]
    if worse:
        lines += ["", "| dataset | backbone | metric | the paper | ours |", "|---|---|---|---|---|"]
    for pair in worse:
        metric = f"{pair.column.removesuffix(' weights')} {columns[pair.column]}"
        ours = pair.ours if pair.decided else f"{pair.ours}, undecided: the cap came first"
        lines.append(f"| {pair.dataset} | {pair.backbone} | {metric} | {pair.theirs} | {ours} |")
    return lines


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
