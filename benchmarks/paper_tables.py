"""The paper's tables beside ours, from stored lines."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import wfilter
from paper_numbers import BACKBONES, DATASETS, FILTERED, METHODS, PAPER, PAPER_CURVES
from wfilter.metrics.relearn import CAP

RELEARN = "relearn weights"


def key_of(line: dict[str, Any]) -> tuple[str, str, str, int]:
    return line["dataset"], line["backbone"], line["method"], line["seed"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a file; none if there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def latest(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of lines with the same key the last."""
    return list({key_of(line): line for line in lines}.values())


def mean_of(lines: list[dict[str, Any]], column: str) -> float | None:
    """Mean over seeds of a report's column, itself a mean over rows."""
    values = []
    for line in lines:
        report = wfilter.Report.from_json(json.dumps(line["report"]))
        if column in [c.name for c in report.columns]:
            values.append(report.value(report.methods[0], column))
    return statistics.mean(values) if values else None


def relearned(lines: list[dict[str, Any]]) -> str:
    """Epochs as the paper prints them: failures count as the cap, their number in brackets.

    Where it is not ten classes and a cap of 100, both are named. Seeds are pooled; those with a
    lower cap than another are left out.
    """
    found: dict[float, list[float | None]] = {}
    for line in lines:
        report = wfilter.Report.from_json(json.dumps(line["report"]))
        cell = report.rows[report.methods[0]].get(RELEARN)
        if cell is not None:
            cap = report.column(RELEARN).cap
            assert cap is not None
            found.setdefault(cap, []).extend(cell.by_class.values())
    if not found:
        return "-"
    cap, epochs = max(found.items())
    failures = epochs.count(None)
    mean = statistics.mean(cap if epoch is None else epoch for epoch in epochs)
    text = f">{cap:.0f}" if failures == len(epochs) else f"{mean:.1f}"
    notes = f"{failures}" if len(epochs) == 10 else f"{failures} of {len(epochs)}"
    return f"{text} ({notes}{'' if cap == CAP else f'; cap {cap:.0f}'})"


def shown(value: float | None, digits: int = 1, scale: float = 1.0) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"


def table1(lines: list[dict[str, Any]]) -> str:
    """Acc_r / Acc_f / ZRF / relearn epochs, the paper's and ours."""
    rows = [
        "# Acc_r, Acc_f, ZRF and relearn time: the paper's and ours",
        "",
        "Rebuilt by `python benchmarks/paper.py --tables` from `paper.jsonl`, which has the "
        "command, seed, commit and environment of every line. Accuracies and ZRF in per cent; "
        "relearn epochs of the baked model's weights, classes that never came back in brackets, "
        "of ten unless it says of how many, and at most 100 epochs unless it names the cap. "
        "`paper` is the paper's WF-Net, on our side its recipe as we read it; `distill` is our "
        "recipe. A dash in the paper's column: not in the paper; in ours: not measured, with the "
        "reason.",
        "",
        "| dataset | backbone | method | the paper: Acc_r / Acc_f / ZRF / relearn "
        "| ours: Acc_r / Acc_f / ZRF / relearn | rows, seeds, test images |",
        "|---|---|---|---|---|---|",
    ]
    for dataset, backbone, method in keys(lines):
        found = of(lines, dataset, backbone, method)
        printed = PAPER.get((dataset, backbone, method), ())
        theirs = " / ".join(f"{v}" for v in printed) or "-"
        cells = [mean_of(found, "Acc_r"), mean_of(found, "Acc_f"), mean_of(found, "ZRF")]
        ours = [shown(value, digits, 100.0) for value, digits in zip(cells, (2, 2, 1))]
        ours.append(relearned(found))
        count = "-"
        if found:
            images = found[0]["report"]["facts"]["test images"]["in all"]
            count = f"{len(found[0]['rows'])}, {len(found)}, {images:,}"
        mine = " / ".join(ours) if found else f"- ({why_not(dataset, backbone)})"
        rows.append(f"| {dataset} | {backbone} | {method} | {theirs} | {mine} | {count} |")
    return "\n".join([*rows, ""])


def table2(lines: list[dict[str, Any]]) -> str:
    """Insertion and deletion, the paper's and ours with the random control."""
    rows = [
        "# Insertion and deletion: the paper's and ours",
        "",
        "Rebuilt by `python benchmarks/paper.py --tables`. In brackets the random-order control.",
        "",
        "| dataset | backbone | the paper: insertion / deletion | method "
        "| ours: insertion / deletion |",
        "|---|---|---|---|---|",
    ]
    for dataset, backbone in PAPER_CURVES:
        theirs = " / ".join(f"{v:.2f}" for v in PAPER_CURVES[dataset, backbone])
        methods = [m for m in FILTERED if of(lines, dataset, backbone, m)] or ["-"]
        for method in methods:
            found = of(lines, dataset, backbone, method)
            cells = [
                f"{shown(mean_of(found, name), 3)} ({shown(mean_of(found, 'random ' + name), 3)})"
                for name in ("insertion", "deletion")
            ]
            mine = " / ".join(cells) if found else f"- ({why_not(dataset, backbone)})"
            rows.append(f"| {dataset} | {backbone} | {theirs} | {method} | {mine} |")
    return "\n".join([*rows, ""])


def why_not(dataset: str, backbone: str) -> str:
    """Why a cell of ours is empty."""
    if dataset == "imagenet" and backbone != "vit_tiny":
        return "no weights among the data; --random-weights tries the path"
    return "not run"


def keys(lines: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Every cell of the paper and every line of ours, in the paper's order."""
    every = {*PAPER, *(key_of(line)[:3] for line in lines)}
    order = (DATASETS, BACKBONES, METHODS)
    return sorted(every, key=lambda key: [names.index(k) for names, k in zip(order, key)])


def of(lines: list[dict[str, Any]], dataset: str, backbone: str, method: str) -> list[dict]:
    return [line for line in lines if key_of(line)[:3] == (dataset, backbone, method)]
