"""Remarks that a report makes about itself: what to keep in mind when reading its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wfilter.core.messages import first_few

if TYPE_CHECKING:
    from wfilter.evaluation.report import Report

WEAK = 0.05
"""How far below the original a retrained model's Acc_r may be before a report warns of it."""


def partly_measured(report: Report) -> list[str]:
    """A remark for each group of methods that were measured on the same few of the classes."""
    by_rows: dict[tuple[int, ...], list[str]] = {}
    for method in report.methods:
        cells = report.rows[method].values()
        measured = tuple(sorted({row for cell in cells for row in cell.by_class}))
        if measured and set(measured) != set(report.classes):
            by_rows.setdefault(measured, []).append(method)
    return [
        f"measured on {listed(rows, report.class_names)} only, so not to be compared with means "
        f"over all classes: {', '.join(methods)}"
        for rows, methods in by_rows.items()
    ]


def weak_bar(report: Report) -> list[str]:
    """A warning where the retrained model was trained too little to be a bar."""
    known = [report.rows.get(method, {}).get("Acc_r") for method in ("original", "retrained")]
    if any(cell is None for cell in known):
        return []
    original, retrained = (cell.mean() for cell in known if cell is not None)
    if original - retrained <= WEAK:
        return []
    return [
        f"the retrained model has Acc_r {100 * retrained:.1f}, the original "
        f"{100 * original:.1f}: it was trained too little to be a bar, and what is compared "
        "with it says little."
    ]


ONLY_FOR = {
    "zrf_": "zrf",
    "set_": "sets",
    "relearn_": "relearn",
    "shot": "few_shot",
    "curve_": "curves",
}
"""How names of a budget's settings begin -> the one metric that reads those settings."""


def conditions_to_show(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Conditions without what is empty, and without budgets of metrics that were not measured.

    Example:
        >>> conditions_to_show({"metrics": ["zrf"], "budget": {"zrf_draws": 3, "curve_steps": 20}})
        {'metrics': ['zrf'], 'budget': {'zrf_draws': 3}}
    """
    shown = {name: value for name, value in conditions.items() if value != []}
    if "metrics" in conditions and isinstance(conditions.get("budget"), Mapping):
        unused = tuple(
            name for name, metric in ONLY_FOR.items() if metric not in conditions["metrics"]
        )
        spent = {k: v for k, v in conditions["budget"].items() if not k.startswith(unused)}
        shown["budget"] = spent
    return shown


def routing_lines(report: Report) -> list[str]:
    """Where the images of each class go, for up to ten classes of the evaluated model."""
    routings = report.details.get("routing", {})
    lines = []
    for method in [m for m in report.methods if m in routings and m != "original"][:2]:
        shown = [
            f"{report.name_of(row)} to {_destinations(report, shares)}"
            for row, shares in list(routings[method].items())[:10]
        ]
        lines.append(f"routing, {method}: {'; '.join(shown)}")
    return lines


def _destinations(report: Report, shares: Mapping[int, float]) -> str:
    top = sorted(shares.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{report.name_of(row)} {100 * share:.0f} %" for row, share in top)


def listed(classes: tuple[int, ...], class_names: tuple[str, ...] | None) -> str:
    """Names of up to twenty classes, and how many more there are."""
    names = [str(row) if class_names is None else class_names[row] for row in classes]
    return first_few(names, 20)
