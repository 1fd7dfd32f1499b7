"""``Report``: the numbers of methods by columns, what each cell says, means and their errors.

A report keeps the number of every class; means, worst rows and gaps to the retrained model are
worked out when it is shown. So reports of single classes can be joined and saved ones compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wfilter.core.renamed import renamed_fields
from wfilter.evaluation import joining
from wfilter.evaluation.notes import (
    conditions_to_show,
    listed,
    partly_measured,
    routing_lines,
    weak_bar,
)
from wfilter.evaluation.render import Change, Comparison, Table, aligned, number, piped, plain
from wfilter.evaluation.stored import report_fields, stored_fields
from wfilter.metrics.accuracy import average_gap, routing_distance
from wfilter.metrics.cells import Column, Row
from wfilter.metrics.depth import information_index
from wfilter.metrics.relearn import RelearnSummary

if TYPE_CHECKING:
    from rich.console import Group

FIRST = ("original", "retrained", "random network")
"""Methods listed above the others, which are compared with these."""


@renamed_fields(facts="conditions")
@dataclass(frozen=True)
class Report:
    """A table of methods by metrics, with what is needed to judge and repeat it.

    Attributes:
        columns: The metrics, in the order of the table.
        rows: Method -> column name -> numbers.
        classes: The classes that were forgotten, one at a time.
        class_names: A name for each class of the model, or ``None``.
        conditions: What it was measured with: seed, versions, machine, data and budgets.
        details: What no cell can hold: confusions, routings, curves, by method and class.

    Example:
        >>> from wfilter.metrics.cells import Cell
        >>> column = Column("Acc_f", "accuracy", "lower", "Accuracy on the forgotten class.")
        >>> rows = {"ours": {"Acc_f": Cell({0: 0.0, 1: 0.5})}}
        >>> report = Report((column,), rows, (0, 1), ("cat", "dog"))
        >>> report.value("ours", "Acc_f"), report.worst("ours", "Acc_f")
        (0.25, (0.5, 1))
        >>> Report.from_json(report.to_json()) == report
        True
    """

    columns: tuple[Column, ...]
    rows: Mapping[str, Row]
    classes: tuple[int, ...]
    class_names: tuple[str, ...] | None = None
    conditions: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    # ---- reading ------------------------------------------------------------------------------

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods, references first."""
        return tuple(sorted(self.rows, key=lambda name: (name not in FIRST, _place(name))))

    def column(self, name: str) -> Column:
        """A column by name."""
        wanted = next((column for column in self.columns if column.name == name), None)
        if wanted is None:
            names = ", ".join(column.name for column in self.columns)
            raise KeyError(f"no column {name!r}; this report has {names}.")
        return wanted

    def value(self, method: str, column: str) -> float | None:
        """The mean over classes, or ``None`` if the method has no such number."""
        wanted = self.column(column)
        if method not in self.rows:
            raise KeyError(f"no method {method!r}; this report has {', '.join(self.rows)}.")
        if wanted.derived == "worst":
            worst = self.worst(method, wanted.source)
            return None if worst is None else worst[0]
        if wanted.derived == "gap":
            return self._gap(method, wanted.source.split(", "))
        if wanted.derived == "routing":
            return self._routing_distance(method)
        if wanted.derived == "idi":
            return self._information_index(method, wanted.source.split(", "))
        cell = self.rows[method].get(column)
        return None if cell is None else cell.mean(wanted.cap)

    def worst(self, method: str, column: str) -> tuple[float, int] | None:
        """The worst class's number and the class."""
        wanted, cell = self.column(column), self.rows[method].get(column)
        if cell is None or not cell.by_class:
            return None
        numbers = {c: wanted.cap if v is None else v for c, v in cell.by_class.items()}
        known = {c: value for c, value in numbers.items() if value is not None}
        pick = min if wanted.better == "higher" else max
        row = pick(known, key=known.__getitem__)
        return known[row], row

    def of_class(self, method: str, column: str, row: int) -> float | None:
        """The number of one class, or ``None`` if it was not measured."""
        cell = self.rows.get(method, {}).get(column)
        return None if cell is None else cell.by_class.get(row)

    def error(self, method: str, column: str, row: int | None = None) -> float | None:
        """The standard error of a share, from how many images it is a share of; ``None``: unknown.

        It says how far the number would move with other images of the same kind (the bootstrap's
        answer, in closed form), not with another training. Without ``row`` it is the
        error of the mean over classes.
        """
        cell, over = self.rows[method].get(column), self.column(column).over
        counts = self.conditions.get("images", {}).get(over, {})
        if cell is None or not counts or not cell.by_class:
            return None
        chosen = cell.by_class if row is None else {row: cell.by_class.get(row)}
        known = {c: value for c, value in chosen.items() if value is not None}
        if len(known) < len(chosen) or not set(known) <= set(counts):
            return None
        variances = [v * (1 - v) / counts[c] for c, v in known.items()]
        return math.sqrt(sum(variances)) / len(variances)

    def name_of(self, row: int) -> str:
        """A class's name, or its index."""
        return str(row) if self.class_names is None else self.class_names[row]

    def _gap(self, method: str, names: Sequence[str]) -> float | None:
        """The average gap to the retrained model, mean over the classes measured for both."""
        retrained, mine = self.rows.get("retrained", {}), self.rows[method]
        wanted = [name for name in names if name in retrained]
        if method == "retrained" or not wanted or any(name not in mine for name in wanted):
            return None
        shared = [
            row for row in self.classes if all(_both(mine, retrained, n, row) for n in wanted)
        ]
        gaps = [
            average_gap(
                {name: mine[name].by_class[row] or 0.0 for name in wanted},
                {name: retrained[name].by_class[row] or 0.0 for name in wanted},
            )
            for row in shared
        ]
        return sum(gaps) / len(gaps) if gaps else None

    def _routing_distance(self, method: str) -> float | None:
        """Total variation to the retrained model's routing, mean over the classes both have."""
        routings = self.details.get("routing", {})
        mine, theirs = routings.get(method, {}), routings.get("retrained", {})
        shared = [row for row in mine if row in theirs]
        if method == "retrained" or not shared:
            return None
        return sum(routing_distance(*_dense(mine[r], theirs[r])) for r in shared) / len(shared)

    def _information_index(self, method: str, names: Sequence[str]) -> float | None:
        """The mean over classes of `information_index`."""
        indices = [
            information_index(*(self._layers(m, names, row) for m in (method, *FIRST[:2])))
            for row in self.classes
        ]
        known = [value for value in indices if value is not None]
        return sum(known) / len(known) if known and method != "random network" else None

    def _layers(self, method: str, names: Sequence[str], row: int) -> list[float]:
        numbers = [self.of_class(method, name, row) for name in names]
        return [number for number in numbers if number is not None]

    # ---- joining and comparing ----------------------------------------------------------------

    @staticmethod
    def join(reports: Iterable[Report]) -> Report:
        """One report of several on the same problem, on different methods or classes.

        Raises:
            ValueError: The reports name their classes or define a column differently, or give two
                numbers for one method, class and column.

        Example:
            >>> from wfilter.metrics.cells import Cell
            >>> column = Column("Acc_f", "accuracy", "lower", "Accuracy on the forgotten class.")
            >>> parts = [
            ...     Report((column,), {"ours": {"Acc_f": Cell({c: 0.5 * c})}}, (c,)) for c in (0, 1)
            ... ]
            >>> Report.join(parts).value("ours", "Acc_f")
            0.25
        """
        parts = list(reports)
        if not parts:
            raise ValueError("there is no report to join.")
        names = {report.class_names for report in parts}
        if len(names) > 1:
            raise ValueError(
                "the reports name their classes differently:\n" + "\n".join(map(str, names))
            )
        classes = tuple(sorted({row for report in parts for row in report.classes}))
        return Report(
            joining.columns(parts),
            joining.rows(parts),
            classes,
            parts[0].class_names,
            dict(parts[0].conditions),
            joining.details(parts),
        )

    def against(self, other: Report) -> Comparison:
        """This report's numbers beside those of another on the same classes.

        Raises:
            ValueError: The other report is for other classes, or has no method or column in common.

        Example:
            >>> from wfilter.metrics.cells import Cell
            >>> column = Column("Acc_f", "accuracy", "lower", "Accuracy on the forgotten class.")
            >>> old, new = (
            ...     Report((column,), {"ours": {"Acc_f": Cell({0: value})}}, (0,))
            ...     for value in (0.5, 0.25)
            ... )
            >>> print(new.against(old))
            method  column   this  other  difference
            ours    Acc_f ↓  25.0   50.0  -25.0 better
        """
        other.refuse_other_classes(self.classes, self.class_names)
        theirs = {column.name: column for column in other.columns}
        lines = [
            Change(method, column, here, there)
            for column in self.columns
            if theirs.get(column.name, column).kind == column.kind and column.name in theirs
            for method in self.methods
            if method in other.rows
            if (here := self.value(method, column.name)) is not None
            if (there := other.value(method, column.name)) is not None
        ]
        if not lines:
            raise ValueError(
                f"the reports share no number: methods {', '.join(self.methods)}\n"
                f"against {', '.join(other.methods)}. Evaluate the same methods and metrics."
            )
        shown = dict.fromkeys(line.column for line in lines)
        changed = [c for c in shown if theirs[c.name].definition != c.definition]
        notes = (f"{c.name} is not the same there: {theirs[c.name].definition}" for c in changed)
        return Comparison(tuple(lines), tuple(notes))

    def refuse_other_classes(
        self, classes: tuple[int, ...], class_names: tuple[str, ...] | None
    ) -> None:
        """Stop where numbers for these classes could not be compared with this report's."""
        if (self.classes, self.class_names) != (classes, class_names):
            raise ValueError(
                f"this report is for the classes {listed(classes, class_names)}\n"
                f"and the other for {listed(self.classes, self.class_names)}. Evaluate both with "
                "the same classes=."
            )

    # ---- showing ------------------------------------------------------------------------------

    def tables(self) -> list[Table]:
        """One table for each group of columns that has a number."""
        tables = []
        for group in dict.fromkeys(column.group for column in self.columns):
            columns = [column for column in self.columns if column.group == group]
            numbers = {m: [self._shown(m, column) for column in columns] for m in self.methods}
            kept = [i for i in range(len(columns)) if any(row[i] for row in numbers.values())]
            lines = {m: [row[i] or "-" for i in kept] for m, row in numbers.items() if any(row)}
            if lines:
                tables.append(Table(group, tuple(columns[i] for i in kept), lines))
        return tables

    def _shown(self, method: str, column: Column) -> str:
        value = self.value(method, column.name)
        if value is None:
            return ""
        text, error = number(value, column.kind), self.error(method, column.name)
        if error is not None:
            return f"{text} ± {number(error, column.kind)}"
        if column.derived == "worst":
            worst = self.worst(method, column.source)
            return text if worst is None else f"{text} {self.name_of(worst[1])}"
        cell = self.rows[method].get(column.name)
        if column.kind == "epochs" and cell is not None:
            return str(RelearnSummary(value, cell.failures, len(cell.by_class)))
        return text

    def heading(self) -> str:
        """What was evaluated, in one line."""
        named = listed(self.classes, self.class_names)
        return f"Forgetting one class at a time: {named}"

    def notes(self) -> list[str]:
        """Conditions and remarks, one line each."""
        shown = conditions_to_show(self.conditions)
        lines = [f"{name}: {plain(value)}" for name, value in shown.items()]
        return [*lines, *partly_measured(self), *weak_bar(self), *routing_lines(self)]

    def __str__(self) -> str:
        parts = [self.heading()]
        for table in self.tables():
            parts.append(f"{table.title}\n{aligned(table.grid())}\n{table.definitions('  ')}")
        return "\n\n".join([*parts, "\n".join(self.notes())])

    def __rich__(self) -> Group:
        """Tables for a rich console."""
        from rich import box, markup
        from rich import table as rich_table
        from rich.console import Group

        parts: list[Any] = [markup.escape(self.heading())]
        for table in self.tables():
            shown = rich_table.Table(title=table.title, box=box.SIMPLE_HEAD, title_justify="left")
            for place, name in enumerate(table.grid()[0]):
                shown.add_column(name, justify="right" if place else "left", no_wrap=True)
            for line in table.grid()[1:]:
                shown.add_row(*map(markup.escape, line))
            parts += [shown, f"[dim]{markup.escape(table.definitions('  '))}[/dim]"]
        return Group(*parts, markup.escape("\n".join(self.notes())))

    def to_markdown(self) -> str:
        """Headings, pipe tables, definitions as lists."""
        parts = [self.heading() + "."]
        for table in self.tables():
            title = table.title[0].upper() + table.title[1:]
            parts.append(f"### {title}\n\n{piped(table.grid())}\n\n{table.definitions('- ')}")
        return "\n\n".join([*parts, "\n".join(f"- {note}" for note in self.notes())]) + "\n"

    def to_latex(self) -> str:
        """One ``tabular`` for each group, with ``booktabs`` rules; definitions as comments."""
        return "\n\n".join(table.to_latex() for table in self.tables()) + "\n"

    def to_json(self, path: str | Path | None = None) -> str:
        """The whole report, as `from_json` reads it; written to ``path`` too if given."""
        text = json.dumps(
            {"format": 1, **stored_fields(asdict(self))},
            indent=None if path is None else 1,
            allow_nan=False,
        )
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @staticmethod
    def from_json(source: str | Path) -> Report:
        """A report from the text of `to_json` or from a file with it.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The text is no report.
        """
        text = source if isinstance(source, str) and source.lstrip()[:1] == "{" else None
        if text is None:
            if not Path(source).is_file():
                raise FileNotFoundError(f"{source} does not exist. Write it with to_json(path).")
            text = Path(source).read_text(encoding="utf-8")
        try:
            return Report(**report_fields(json.loads(text)))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            where = "the text" if text is source else source
            raise ValueError(
                f"{where} is not a report ({error!r}). Write it with report.to_json(path)."
            ) from None


# ---- parts --------------------------------------------------------------------------------------


def _place(name: str) -> int:
    return FIRST.index(name) if name in FIRST else 0  # the sort is stable: others keep their order


def _both(mine: Row, theirs: Row, name: str, row: int) -> bool:
    return row in mine[name].by_class and row in theirs[name].by_class


def _dense(*routings: Mapping[int, float]) -> list[Tensor]:
    """Routings, which are stored without zeros, as tensors over the same classes."""
    size = 1 + max(row for routing in routings for row in routing)
    return [torch.tensor([routing.get(row, 0.0) for row in range(size)]) for routing in routings]
