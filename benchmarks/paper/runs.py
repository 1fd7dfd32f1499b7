"""What the stored lines of the paper's tables say, in the units of the tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import wfilter
from common import read_lines
from paper.numbers import FILTERED, PAPER
from wfilter.metrics.relearn import CAP
from wfilter.untraining.recipes import PAPER as PAPER_RECIPE

RELEARN, BY_ALPHAS = "relearn weights", "relearn alphas"
# The default's lines from before 336acca, when a draw was answered as surely as the images of the
# class it comes from. That changed how sure answers are, and none of them: accuracies hold.
TOO_SURE = ("39a91fb", "11bf617")


@dataclass(frozen=True)
class Run:
    """What a stored line says, in the units of the tables.

    Attributes:
        numbers: Column -> mean over rows; accuracies and ZRF in per cent.
        epochs: Of relearning, for each row measured; ``None``: not within the cap.
        by_alphas: The same where only the row's alphas are trained, not the baked weights.
        few: Test images behind everything but the accuracies.
        original: Accuracy of the network it started from, where that is not the table's.
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
    by_alphas: tuple[float | None, ...] = ()
    original: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Its row of the table; seeds share one."""
        return self.dataset, self.backbone, self.method


def key_of(line: Mapping[str, Any]) -> tuple[str, str, str, int]:
    return line["dataset"], line["backbone"], line["method"], line["seed"]


def read_runs(path: Path) -> list[Run]:
    """Of the lines with the same key the last; the files of other scripts have their say.

    Accuracies on more test images come from ``untraining.jsonl``, ImageNet's runs from
    ``imagenet.jsonl``, the default's where ``paper.jsonl`` has none from ``auto.jsonl``. Lines of
    the default may tell the accuracy of a network of their own. Retrained models start from no
    original, so their lines outlive it, but for relearning: that ends where the original's accuracy
    is back. Relearning, which costs most, may come from an earlier line of the same filters.
    """
    stored = read_lines(path)
    lines = {key_of(line): line for line in stored}
    runs = {}
    for key, line in lines.items():
        if is_of_original(line, lines):
            runs[key] = with_relearning(run_of(line), line, stored)
        elif "original" in line:
            runs[key] = replace(run_of(line), original=line["original"])
        elif line["method"] == "retrained":
            runs[key] = replace(run_of(line), epochs=(), by_alphas=())
    for run in untraining_runs(read_lines(path.with_name("untraining.jsonl")), runs):
        key = (*run.key, run.seed)
        if key not in runs:
            runs[key] = run
        elif (runs[key].test_images or 0) < (run.test_images or 0):
            numbers = {**runs[key].numbers, **run.numbers}
            runs[key] = replace(runs[key], numbers=numbers, test_images=run.test_images)
    defaults = read_lines(path.with_name("auto.jsonl"))
    known = {run.key for run in runs.values()}
    runs |= {(*run.key, run.seed): run for run in default_runs(defaults) if run.key not in known}
    original, filtered = imagenet_runs(
        [*default_lines(defaults), *read_lines(path.with_name("imagenet.jsonl"))]
    )
    taken = {run.key for run in filtered}
    kept = [run for run in runs.values() if run.key not in taken]
    known = {run.key for run in kept}
    return [*kept, *(run for run in original if run.key not in known), *filtered]


def read_latest(path: Path) -> list[dict[str, Any]]:
    """Of the lines with the same key the last, if it starts from the weights of the original."""
    lines = {key_of(line): line for line in read_lines(path)}
    return [x for x in lines.values() if "original" in x or is_of_original(x, lines)]


def with_relearning(run: Run, line: Mapping[str, Any], stored: Sequence[Mapping[str, Any]]) -> Run:
    """With the relearn times of an earlier line of the same filters, if the run has none."""
    if run.epochs:
        return run
    earlier = [run_of(old) for old in stored if filters_of(old) == filters_of(line)]
    measured = [old for old in earlier if old.epochs]
    if not measured:
        return run
    last = measured[-1]
    return replace(run, epochs=last.epochs, by_alphas=last.by_alphas, cap=last.cap)


def filters_of(line: Mapping[str, Any]) -> Any:
    """What two lines share only if they had the same filters: base model, verdict, accuracies.

    The fixed recipes have no verdict, and each of their lines counts for itself.
    """
    verdict = line.get("options", {}).get("verdict")
    if not verdict:
        return id(line)
    (rows,) = line["report"]["rows"].values()
    return key_of(line), line.get("base"), verdict, rows["Acc_r"], rows["Acc_f"]


def is_of_original(line: Mapping[str, Any], lines: Mapping[tuple[str, str, str, int], Any]) -> bool:
    """Whether a line starts from the weights of the table's original.

    One from before lines told the weights' fingerprint takes all others at their word.
    """
    base = original_of(key_of(line), lines).get("base")
    return base in (None, line.get("base"))


def original_of(
    key: tuple[str, str, str, int], lines: Mapping[tuple[str, str, str, int], Any]
) -> Mapping[str, Any]:
    """The line of the original that a run of this key starts from: of its seed, else of seed 0."""
    dataset, backbone, _, seed = key
    found = (lines.get((dataset, backbone, "original", of)) for of in (seed, 0))
    return next(filter(None, found), {})


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
    again, alphas = (report.rows[method].get(name) for name in (RELEARN, BY_ALPHAS))
    return Run(
        *key_of(line),
        rows=len(line["rows"]),
        test_images=report.conditions.get("test images", {}).get("in all"),
        numbers=numbers,
        epochs=tuple(again.by_class.values()) if again else (),
        cap=(report.column(RELEARN).cap or CAP) if again else CAP,
        few=report.conditions.get("budget", {}).get("test_images"),
        by_alphas=tuple(alphas.by_class.values()) if alphas else (),
    )


def untraining_runs(
    lines: Sequence[Mapping[str, Any]], known: Mapping[tuple[str, str, str, int], Run]
) -> list[Run]:
    """Accuracies of filters, and of the originals under them, by ``untraining.py``.

    Without those of an original that was another on as many test images.
    """
    runs = []
    for line in lines:
        backbone, _, dataset = line["model"].partition("-")
        dataset = {"cifar": "cifar10"}.get(dataset, dataset)
        if line["name"] not in FILTERED:
            continue
        if line["name"] == "paper" and line["recipe"]["epsilon"] != PAPER_RECIPE.epsilon:
            continue  # from before its reciprocal had a bound
        facts = (line["seed"], 10, line["test_images"])
        stored = known.get((dataset, backbone, "original", 0))
        alike = stored is not None and stored.test_images == line["test_images"]
        if alike and round(stored.numbers["Acc_r"], 1) != round(line["original"], 1):
            continue
        numbers = {"Acc_r": line["acc_r"], "Acc_f": line["acc_f"]}
        runs.append(Run(dataset, backbone, line["name"], *facts, numbers))
        if line["seed"] == 0:
            whole = {"Acc_r": line["original"], "Acc_f": line["original"]}
            runs.append(Run(dataset, backbone, "original", *facts, whole))
    return runs


def imagenet_runs(lines: Sequence[Mapping[str, Any]]) -> tuple[list[Run], list[Run]]:
    """The original and ours, of the last line of ``imagenet.py`` for each part held out.

    Parts take the place of seeds. Runs to choose settings by are not marked for the table, and
    ``k1``, on which most of them were chosen, is left out; so are runs of another recipe than the
    last. Backbones and methods, which old lines do not name, are kept apart.
    """
    original: list[Run] = []
    filtered: list[Run] = []
    kinds = dict.fromkeys(map(kind_of, lines))
    for kind in sorted(kinds, key=lambda kind: kind[1] == "auto"):  # which has the original's ZRF
        known, ours = imagenet_runs_of([line for line in lines if kind_of(line) == kind], *kind)
        fuller = any("ZRF" in run.numbers for run in known)
        if fuller or not {run.key for run in original} & {run.key for run in known}:
            original = [run for run in original if run.key not in {k.key for k in known}] + known
        filtered += ours
    return original, filtered


def default_runs(lines: Sequence[Mapping[str, Any]]) -> list[Run]:
    """Accuracies of the default by ``auto.py``, on networks that it names by their accuracy."""
    latest = {(line["problem"], line["seed"]): line for line in lines}
    runs = []
    for (problem, seed), line in latest.items():
        backbone, _, dataset = problem.partition("-")
        dataset = {"cifar": "cifar10"}.get(dataset, dataset)
        if (dataset, backbone, "original") in PAPER and dataset != "imagenet":
            numbers = {"Acc_r": line["acc_r"], "Acc_f": line["acc_f"]}
            facts = (seed, 10, line["test_images"], numbers)
            runs.append(Run(dataset, backbone, "auto", *facts, original=line["original"]))
    return runs


def default_lines(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """ImageNet's lines of ``auto.py`` as those of ``imagenet.py``, without ZRF: k2 is held out."""
    told = ("original", "acc_r", "acc_f", "test_images", "seed")
    return [
        {name: line[name] for name in told}
        | {"backbone": line["problem"].partition("-")[0], "method": "auto"}
        | {"rows": 1000, "test": "k2", "table": True, "recipe": line["stage"]}
        for line in lines
        if line["problem"].endswith("-imagenet")
    ]


def kind_of(line: Mapping[str, Any]) -> tuple[str, str]:
    return line.get("backbone", "vit_tiny"), line.get("method", "distill")


def imagenet_runs_of(
    lines: Sequence[Mapping[str, Any]], backbone: str, method: str
) -> tuple[list[Run], list[Run]]:
    """The original and ours, of one backbone and one method."""
    original, filtered = [], []
    named = [{"test": "k2", **line} for line in lines if line.get("table")]  # once the only part
    marked = [line for line in named if line["test"] != "k1"]
    latest = {line["test"]: line for line in marked}
    for part, line in sorted(latest.items()):
        if line.get("recipe") != marked[-1].get("recipe"):
            continue
        facts = (int(part.removeprefix("k")), line["rows"], line["test_images"])
        whole = {"Acc_r": line["original"], "Acc_f": line["original"]}
        if "original_zrf" in line:
            whole["ZRF"] = 100 * line["original_zrf"]
        original.append(Run("imagenet", backbone, "original", *facts, whole))
        numbers = {"Acc_r": line["acc_r"], "Acc_f": line["acc_f"]}
        if "zrf" in line and line.get("commit") not in TOO_SURE:
            numbers["ZRF"] = 100 * line["zrf"]
        curves = ("insertion", "deletion", "random_insertion", "random_deletion")
        for name in [name for name in curves if name in line]:
            numbers[name.replace("_", " ")] = line[name]
        few = line.get("curve_images")
        filtered.append(Run("imagenet", backbone, method, *facts, numbers, few=few))
    return original, filtered
