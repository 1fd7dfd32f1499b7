"""Tables of README and docs that are made from the lines of audits and feature rows."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from audit import joined
from common import read_lines
from wfilter import Report

DATASETS = {"cifar10": "CIFAR-10", "mnist": "MNIST"}
AUDITED = {
    "retrained": "retrained",
    "logit_mask": "logit mask",
    "wfilter": "the default",
    "feature rows": "feature rows",
}
AUDIT = ("Acc_r", "Acc_f", "probe f", "NCM f", "k-NN f", "MLP f", "MIA entropy", "1-shot Acc_f")
NETWORKS = {
    "wfilter:resnet18-cifar": "ResNet-18, CIFAR-10",
    "wfilter:cnn_small-cifar": "small CNN, CIFAR-10",
    "wfilter:cnn-mnist": "small CNN, MNIST",
}
ROWS = {
    "retrained": "retrained without the class",
    "mask": "logit mask",
    "row": "feature row",
    "folded": "row folded into a baked model",
}
FIGURES = ("acc_r", "acc_f", "linear_probe", "nearest_mean", "20_nn", "mlp_probe", "inverter")


def tables(results: Path) -> dict[str, str]:
    """Each by its name between the markers of a page."""
    audits = {name: audited(results / f"audit_{name}.jsonl") for name in DATASETS}
    lines = [x for x in read_lines(results / "feature_rows.jsonl") if "forget" in x]
    return {
        "audit": audit_table(audits),
        "audit-short": short_table(audits),
        "feature-rows": rows_table(lines),
    }


def audited(file: Path) -> Report:
    """One report of the methods shown, on the classes that all of them have."""
    lines = [x for x in read_lines(file) if x["seed"] == 0 and x["method"] in AUDITED]
    classes = [{x["class"] for x in lines if x["method"] == method} for method in AUDITED]
    common = set.intersection(*(found for found in classes if found))
    return joined([x for x in lines if x["class"] in common])


def shown(report: Report, method: str, column: str, digits: int = 1) -> str:
    value = report.value(method, column) if method in report.rows else None
    return "-" if value is None else f"{100 * value:.{digits}f}"


def audit_table(audits: dict[str, Report]) -> str:
    rows = [
        "| | Acc_r | Acc_f | linear probe | nearest mean | 20-NN | MLP | taken for members "
        "| after 1 image each |",
        "|---|" + "--:|" * len(AUDIT),
    ]
    for name, report in audits.items():
        rows.append(heading(f"{DATASETS[name]}, {classes_of(report.classes)}", len(AUDIT)))
        rows += [
            f"| {words} | " + " | ".join(shown(report, method, c) for c in AUDIT) + " |"
            for method, words in AUDITED.items()
            if method in report.rows
        ]
    return "\n".join(rows)


def heading(words: str, columns: int) -> str:
    """A row that says what the rows below it are of: names in each would be tall and narrow."""
    return f"| **{words}** |" + " |" * columns


def short_table(audits: dict[str, Report]) -> str:
    heads = [
        f"{DATASETS[name]}, {classes_of(report.classes)}: Acc_r / Acc_f | probe | after 1 image"
        for name, report in audits.items()
    ]
    rows = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * 3 * len(heads)]
    for method in ("retrained", "logit_mask", "feature rows"):
        cells = [
            f"{shown(r, method, 'Acc_r')} / {shown(r, method, 'Acc_f')} | "
            f"{shown(r, method, 'probe f', 0)} | {shown(r, method, '1-shot Acc_f', 0)}"
            for r in audits.values()
        ]
        rows.append(f"| {AUDITED[method]} | {' | '.join(cells)} |")
    return "\n".join(rows)


def classes_of(classes: Any) -> str:
    """Which classes a mean is of: all ten, or their numbers."""
    if len(classes) == 10:
        return "all classes"
    return f"class{'' if len(classes) == 1 else 'es'} {listed(classes)}"


def listed(classes: Any) -> str:
    return ", ".join(map(str, sorted(classes)))


def rows_table(lines: list[dict[str, Any]]) -> str:
    """Means over the classes each method was measured on; sets have rows of their own."""
    head = ["", "Acc_r", "Acc_f", "linear probe", "nearest mean", "20-NN", "MLP", "knows the rows"]
    head += ["relearned from 10 / 500 images", "members"]
    rows = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for model, network in NETWORKS.items():
        own = [x for x in lines if x["model"] == model]
        for together in sorted({tuple(x.get("together", ())) for x in own}):
            same = [x for x in own if tuple(x.get("together", ())) == together]
            by = {method: [x for x in same if x["method"] == method] for method in ROWS}
            classes = max(({x["forget"] for x in mine} for mine in by.values()), key=len)
            of = f"{classes_of(classes)}{' forgotten together' if together else ''}"
            rows.append(heading(f"{network}, {of}", len(head) - 1))
            for method, mine in by.items():
                if mine:
                    fewer = {x["forget"] for x in mine} != classes
                    told = f", {classes_of({x['forget'] for x in mine})}" if fewer else ""
                    rows.append(one_row(f"{ROWS[method]}{told}", mine))
    return "\n".join(rows)


def one_row(words: str, lines: list[dict[str, Any]]) -> str:
    def mean(key: str, digits: int = 1) -> str:
        if not all(key in line for line in lines):
            return "-"
        return f"{statistics.mean(line[key] for line in lines):.{digits}f}"

    cells = [mean(key) for key in FIGURES]
    cells += [f"{mean('relearn_10', 0)} / {mean('relearn_500', 0)}", mean("mia_entropy", 0)]
    return f"| {words} | {' | '.join(cells)} |"
