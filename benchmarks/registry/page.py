"""The Markdown page about the rows of the sweep."""

from __future__ import annotations

import platform
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from registry.checks import TOLERANCE
from registry.models import CLASSES, FLOAT64_PARAMETERS, SAMPLES, architectures

HEADER = """# Every classifier of timm, torchvision and transformers

`python benchmarks/registry`, {date}, torch {torch}, torchvision {torchvision},
timm {timm}, {cpu}. One row per architecture in `registry.jsonl`, with the commit it was checked at.

Each architecture is built without pretrained weights (all parameters random), with {classes}
classes, at the smallest input it takes, wrapped with `targets="auto"` and checked in eval mode on
{samples} samples: `wf(x)` is the base model's output bit for bit; a mixed batch of labels (one of
them -1) and one of random sets equal the one-sample-at-a-time oracle; so do the gradients of the
alphas, which are finite; every target has an effect, or a reason why it cannot; `bake` equals the
filtered model; no parameter or buffer of the base model was touched. Tolerance: {tight:.0e} of the
largest logit in float64, {loose:.0e} in float32 (models that compute in float32 by themselves or
have more than {limit:.0f} million parameters; again in float64 where that fails), or, where only
float32 runs, twice what the base model itself differs between a batch and one sample at a time.
Blocks that only repeat their neighbours are left out, except in one architecture per family, which
has its full depth; of transformers {transformers} each family of its image-classification list is
examined in one small configuration. {same} architectures turned out to be the same network as
another one at that size (same layers, shapes and logits: they differ in pretrained weights or
default image size) and carry its findings.
"""


def summarise(rows: list[dict[str, Any]]) -> str:
    """The Markdown page: totals, families, then all that did not simply pass."""
    newest = max(rows, key=lambda row: row["date"])
    parts = [
        HEADER.format(
            **{k: newest[k] for k in ("date", "torch", "torchvision")},
            timm=_timm_versions(rows),
            transformers=next((r["transformers"] for r in rows if "transformers" in r), "none"),
            cpu=f"{platform.system()} {platform.machine()}, one core",
            same=sum("same_as" in row for row in rows),
            classes=CLASSES,
            samples=SAMPLES,
            tight=TOLERANCE[torch.float64],
            loose=TOLERANCE[torch.float32],
            limit=FLOAT64_PARAMETERS["short"] / 1e6,
        ),
        _coverage(rows),
        by_library(rows),
        _measures(rows),
        "## Families\n",
        _table("family", _group(rows, _family)),
        _not_passed(rows),
        _reasons("## Targets on the exact path", rows, "exact"),
        _silent(rows),
    ]
    return "\n".join(parts)


def by_library(rows: list[dict[str, Any]]) -> str:
    """The table of totals."""
    return _table("library", _group(rows, lambda row: row["key"].split("/")[0]))


def _timm_versions(rows: list[dict[str, Any]]) -> str:
    """The version of timm that its rows were made with; with their numbers if there are several."""
    counts = Counter(row["timm"] for row in rows if row["key"].startswith("timm/"))
    if len(counts) < 2:
        return next(iter(counts), rows[0]["timm"])
    return " and ".join(f"{version} ({count} rows)" for version, count in sorted(counts.items()))


def _coverage(rows: list[dict[str, Any]]) -> str:
    """How much of the registries the rows cover, and which code checked them."""
    total = len(architectures())
    counts = Counter(row.get("commit") or "unknown" for row in rows)
    commits = ", ".join(f"{commit} ({count})" for commit, count in counts.most_common())
    head = f"{len(rows)} of {total} architectures examined"
    if len(rows) < total:
        head = f"**Partial: {head}.** Shares below are of these, not of the registries"
    return f"{head}. Rows by commit: {commits}.\n"


def _family(row: dict[str, Any]) -> str:
    library = row["key"].split("/")[0]
    return row["family"] if library == "timm" else f"{library}: {row['family']}"


def _group(
    rows: list[dict[str, Any]], key: Callable[[dict[str, Any]], str]
) -> dict[str, list[dict[str, Any]]]:
    groups = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _table(title: str, groups: dict[str, list[dict[str, Any]]]) -> str:
    names = (title, "architectures", "pass", "refused", "fail", "too large", "targets", "fused")
    lines = ["| " + " | ".join((*names, "x base")) + " |", "|---" + "|--:" * len(names) + "|"]
    for name, rows in groups.items():
        counts = Counter(row["status"] for row in rows)
        passed = [row for row in rows if row["status"] == "pass"]
        targets = sum(row["targets"] for row in passed)
        fused = sum(row["paths"].get("fused", 0) for row in passed)
        ratio = f"{median(row['ratio'] for row in passed):.2f}" if passed else "-"
        cells = [name, len(rows), *(counts[s] for s in ("pass", "refused", "fail", "large"))]
        share = f"{100 * fused / targets:.1f} %" if targets else "-"
        lines.append("| " + " | ".join(map(str, [*cells, targets, share, ratio])) + " |")
    return "\n".join(lines) + "\n"


def _measures(rows: list[dict[str, Any]]) -> str:
    """Largest differences by dtype, and what the columns mean."""
    lines = [
        "Targets and their fused share count architectures that pass; x base is the median time of",
        "a mixed batch over the base model's, on these tiny inputs an upper bound.\n",
        "| dtype | architectures | labels | sets | baked | gradients |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    passed = [row for row in rows if row["status"] == "pass"]
    for dtype, group in sorted(_group(passed, lambda row: row["dtype"]).items(), reverse=True):
        kinds = ("labels", "sets", "baked", "gradients")
        worst = (f"{max(row[kind] for row in group):.1e}" for kind in kinds)
        lines.append(f"| {dtype} | {len(group)} | " + " | ".join(worst) + " |")
    note = "Largest differences from the oracle: logits as a share of the largest logit, gradients"
    return "\n".join([*lines, "", f"{note} of each\ntarget as a share of its largest.\n"])


def _not_passed(rows: list[dict[str, Any]]) -> str:
    lines = ["## Not passed\n"]
    others = [row for row in rows if row["status"] != "pass"]
    reasons = _group(others, lambda row: f"{row['status']}: {_one_line(row['why'])}")
    for why, group in sorted(reasons.items()):
        lines.append(
            f"- {why}\n  " + ", ".join(f"`{row['key']}`" + _stands_for(row, rows) for row in group)
        )
    return "\n".join(lines if others else [*lines, "None."]) + "\n"


def _stands_for(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The smallest sibling of an architecture that is too large to be examined."""
    if row["status"] != "large":
        return ""
    series = re.match(r"\w+/[^_0-9]+", row["key"])[0]  # such as timm/regnety
    passed = [r for r in rows if r["status"] == "pass" and r["key"].startswith(series)]
    smallest = min(passed, key=lambda other: other["parameters"], default=None)
    return f" (represented by `{smallest['key']}`)" if smallest else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _reasons(title: str, rows: list[dict[str, Any]], field: str) -> str:
    """How often each reason for the exact path was given, and by which families."""
    counts: Counter[str] = Counter()
    families = defaultdict(set)
    for row in rows:
        for why, count in row.get(field, {}).items():
            counts[why] += count
            families[why].add(_family(row))
    lines = [
        f"- {count} targets, {why}: {', '.join(sorted(families[why]))}"
        for why, count in counts.most_common()
    ]
    return "\n".join([title + "\n", *(lines or ["None."])]) + "\n"


def _silent(rows: list[dict[str, Any]]) -> str:
    counts: Counter[str] = Counter()
    families = defaultdict(set)
    for row in rows:
        for why in row.get("silent", {}).values():
            counts[why] += 1
            families[why].add(_family(row))
    lines = [
        f"- {count} targets, {why}: {', '.join(sorted(families[why]))}"
        for why, count in counts.most_common()
    ]
    unused = [row for row in rows if row.get("unused")]
    if unused:
        names = ", ".join(sorted({_family(row) for row in unused}))
        total = sum(row["unused"] for row in unused)
        lines.append(f"- {total} parameters left out, no forward uses them in eval mode: {names}")
    return "\n".join(["## Targets without effect\n", *(lines or ["None."])]) + "\n"
