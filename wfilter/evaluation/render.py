"""Reports as text: aligned, Markdown and LaTeX tables, and two reports side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wfilter.metrics.cells import Column, Kind

ARROWS = {"higher": "↑", "lower": "↓", "retrained": "≈", "none": ""}
DIRECTIONS = {
    "higher": "higher is better",
    "lower": "lower is better",
    "retrained": "the retrained model's number is the bar",
    "none": "for orientation",
}
UNITS = {"percent": "%, ", "epochs": "epochs, "}
LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"↑": r"$\uparrow$", "↓": r"$\downarrow$", "≈": r"$\approx$"},
    **{"\\": r"\textbackslash{}", ">": "$>$", "<": "$<$", "~": r"\textasciitilde{}"},
    "^": r"\textasciicircum{}",
}


@dataclass(frozen=True)
class Table:
    """One group of columns, all cells as text."""

    title: str
    columns: tuple[Column, ...]
    lines: Mapping[str, Sequence[str]]

    def grid(self) -> list[list[str]]:
        """The header and a line for each method."""
        header = ["method", *(f"{c.name} {ARROWS[c.better]}".strip() for c in self.columns)]
        return [header, *([method, *cells] for method, cells in self.lines.items())]

    def definitions(self, bullet: str) -> str:
        """A line for each column: what it is and which way is better."""
        return "\n".join(
            f"{bullet}{c.name}: {c.definition} ({UNITS.get(c.kind, '')}{DIRECTIONS[c.better]})"
            for c in self.columns
        )

    def to_latex(self) -> str:
        """A ``tabular`` with ``booktabs`` rules."""
        header, *lines = [[_escaped(cell) for cell in line] for line in self.grid()]
        body = "\n".join(" & ".join(line) + r" \\" for line in lines)
        comments = "\n".join(f"% {line}" for line in self.definitions("").splitlines())
        return (
            f"% {self.title}\n\\begin{{tabular}}{{l{'r' * len(self.columns)}}}\n\\toprule\n"
            f"{' & '.join(header)} \\\\\n\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"
            f"{comments}"
        )


@dataclass(frozen=True)
class Change:
    """One number as each of two reports has it."""

    method: str
    column: Column
    here: float
    there: float

    @property
    def difference(self) -> float:
        """Positive where this report's number is larger."""
        return self.here - self.there

    @property
    def verdict(self) -> str:
        """Whether this report's number is the better one; nothing where no direction is known."""
        if self.column.better not in ("higher", "lower") or self.here == self.there:
            return ""
        return "better" if (self.difference > 0) == (self.column.better == "higher") else "worse"

    def cells(self) -> list[str]:
        """The cells of its line in the table, as text."""
        kind, arrow = self.column.kind, ARROWS[self.column.better]
        here, there = number(self.here, kind), number(self.there, kind)
        sign = "" if self.difference < 0 else "+"
        difference = f"{sign}{number(self.difference, kind)} {self.verdict}".strip()
        return [self.method, f"{self.column.name} {arrow}".strip(), here, there, difference]


@dataclass(frozen=True)
class Comparison:
    """Two reports, number by number; made by `Report.against`."""

    lines: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    def grid(self) -> list[list[str]]:
        """The header and a line for each shared number."""
        header = ["method", "column", "this", "other", "difference"]
        return [header, *(line.cells() for line in self.lines)]

    def __str__(self) -> str:
        return "\n".join([aligned(self.grid(), left=(0, 1, 4)), *self.notes])

    def to_markdown(self) -> str:
        """A pipe table."""
        notes = "".join(f"- {note}\n" for note in self.notes)
        return piped(self.grid()) + "\n" + (f"\n{notes}" if notes else "")


def number(value: float, kind: Kind) -> str:
    """A number as its kind is printed; fractions as per cent.

    Example:
        >>> number(0.5, "percent"), number(48000, "count"), number(27.0, "epochs")
        ('50.0', '48,000', '27')
    """
    if kind == "percent":
        return f"{100 * value:.1f}"
    if kind == "number":
        return f"{value:.3f}"
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "seconds":
        return f"{value:,.3f}" if abs(value) < 0.1 else f"{value:,.1f}"
    return f"{value:.1f}".removesuffix(".0")


def aligned(grid: list[list[str]], left: Sequence[int] = (0,)) -> str:
    """Columns as wide as their longest cell; those numbered in ``left`` are aligned left.

    Example:
        >>> print(aligned([["method", "Acc_f"], ["ours", "0.0"]]))
        method  Acc_f
        ours      0.0
    """
    widths = [max(map(len, column)) for column in zip(*grid)]
    lines = [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths))
        )
        for line in grid
    ]
    return "\n".join(line.rstrip() for line in lines)


def piped(grid: list[list[str]], left: Sequence[int] = (0,)) -> str:
    """A Markdown table; the first line is its header, columns in ``left`` are aligned left.

    Example:
        >>> print(piped([["method", "Acc_f"], ["ours", "0.0"]]))
        | method | Acc_f |
        | --- | ---: |
        | ours | 0.0 |
    """
    header, *lines = [[cell.replace("|", r"\|") for cell in line] for line in grid]
    rule = ["---" if place in left else "---:" for place in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def _escaped(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


def plain(value: Any) -> str:
    """A value of a report's conditions in one line.

    Example:
        >>> plain({"torch": "2.9", "sizes": [2, 3]})
        'torch 2.9, sizes 2, 3'
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return f"{value:,}" if isinstance(value, int) and abs(value) > 9999 else str(value)
