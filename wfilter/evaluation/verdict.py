"""What became of a class, in plain words, from its numbers beside the retrained model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from wfilter.evaluation.report import Report

OUTPUTS = ("Acc_f",)
FEATURES = ("probe f", "NCM f", "one-vs-rest AUC", "k-NN f", "MLP f", "refit f", "prototype f")
"""Columns that say what the features still know of the class."""

RELEARNED = "-shot Acc_f"
"""The end of the names of columns that say how fast the class comes back."""

MARGIN = 0.05
"""How far above the retrained model's share another may lie and still count as the same."""

Said: TypeAlias = Literal[
    "as if never learned",
    "hidden at the output only",
    "still known",
    "weaker in the features, no reference to compare with",
    "nothing found, but not all was measured",
]


@dataclass(frozen=True)
class Verdict:
    """What became of a class, and the numbers that say so.

    Example:
        >>> print(Verdict("hidden at the output only", ("probe f 90.1, retrained 62.0",)))
        hidden at the output only (probe f 90.1, retrained 62.0)
    """

    said: Said
    because: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.said + (f" ({'; '.join(self.because)})" if self.because else "")


RULE = (
    f"A class is *still known* where Acc_f is more than {100 * MARGIN:.0f} points (or two standard "
    "errors) above the retrained model's, or above chance where there is none; *as if never "
    f"learned* where besides none of {', '.join(FEATURES)} and of the accuracies after relearning "
    "from few images is that far above the retrained model's; *hidden at the output only* in "
    "between, with the numbers that betray it. Where one of them was not measured, a class "
    f"cannot be as if never learned. Where Acc_r is more than {100 * MARGIN:.0f} points below, the "
    "verdict says at what cost. A verdict is about the model as it is handed out (a "
    "filtered one with its gates folded in) and about these attacks: who also has the original has "
    "everything, and a stronger attack may find more."
)


def verdict(report: Report, method: str, row: int) -> Verdict | None:
    """What became of a class: from its numbers beside the retrained model's.

    Example:
        >>> from wfilter.metrics.cells import Cell, Column
        >>> columns = [Column(n, "", "lower", "") for n in ("Acc_f", "probe f")]
        >>> rows = {
        ...     "mine": {"Acc_f": Cell({0: 0.0}), "probe f": Cell({0: 0.9})},
        ...     "retrained": {"Acc_f": Cell({0: 0.0}), "probe f": Cell({0: 0.6})},
        ... }
        >>> verdict(Report(tuple(columns), rows, (0,)), "mine", 0).said
        'hidden at the output only'
    """
    if report.of_class(method, "Acc_f", row) is None:
        return None
    bar = "retrained" if report.of_class("retrained", "Acc_f", row) is not None else None
    cost = _cost(report, method, bar or "original", row)
    out = _above(report, method, bar, OUTPUTS, row)
    if out:
        return Verdict("still known", (*out, *cost))
    asked = [*FEATURES, *(c.name for c in report.columns if c.name.endswith(RELEARNED))]
    if bar is None:
        betrayed = _as_original(report, method, asked, row)
    else:
        betrayed = _above(report, method, bar, asked, row)
    if betrayed:
        return Verdict("hidden at the output only", (*betrayed, *cost))
    if bar is None:
        return Verdict("weaker in the features, no reference to compare with", cost)
    lacking = _lacking(report, (method, bar), asked, row)
    if lacking:
        return Verdict("nothing found, but not all was measured", (f"without {lacking}", *cost))
    return Verdict("as if never learned", cost)


def _cost(report: Report, method: str, bar: str, row: int) -> tuple[str, ...]:
    """In words: a clear loss on the other classes. Who ruins a network forgets, too."""
    mine, theirs = (report.of_class(m, "Acc_r", row) for m in (method, bar))
    if mine is None or theirs is None or theirs - mine <= MARGIN:
        return ()
    return (f"at the cost of the other classes: Acc_r {100 * mine:.1f}, {bar} {100 * theirs:.1f}",)


def _lacking(report: Report, methods: Sequence[str], asked: Sequence[str], row: int) -> str:
    """The missing measurements without which no class may count as never learned."""
    known = [c for c in asked if all(report.of_class(m, c, row) is not None for m in methods)]
    missing = [c for c in FEATURES if c not in known]
    if not any(c.endswith(RELEARNED) for c in known):
        missing.append("relearning from few images")
    return ", ".join(missing)


def _above(
    report: Report, method: str, bar: str | None, columns: Sequence[str], row: int
) -> list[str]:
    """In words: columns in which a method is clearly above ``bar``, or above 0 without one."""
    betraying = []
    for name in columns:
        mine = report.of_class(method, name, row)
        theirs = 0.0 if bar is None else report.of_class(bar, name, row)
        if mine is None or theirs is None:
            continue
        errors = [report.error(m, name, row) for m in (method, bar) if m is not None]
        spread = sum(error**2 for error in errors if error is not None) ** 0.5
        if mine - theirs > max(MARGIN, 2 * spread):
            beside = f", retrained {100 * theirs:.1f}" if bar else ""
            betraying.append(f"{name} {100 * mine:.1f}{beside}")
    return betraying


def _as_original(report: Report, method: str, columns: Sequence[str], row: int) -> list[str]:
    """In words: columns in which the class is found nearly as well as in the original."""
    betraying = []
    for name in columns:
        mine, before = (report.of_class(m, name, row) for m in (method, "original"))
        if mine is not None and mine >= (1.0 if before is None else before) - 2 * MARGIN:
            beside = "" if before is None else f", original {100 * before:.1f}"
            betraying.append(f"{name} {100 * mine:.1f}{beside}")
    return betraying
