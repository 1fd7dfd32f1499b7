"""Several reports on the same problem as one: their columns, numbers and details together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wfilter.metrics.cells import Cell, Column, Row

if TYPE_CHECKING:
    from wfilter.evaluation.report import Report


def columns(reports: Sequence[Report]) -> tuple[Column, ...]:
    """The columns of all reports; one name must mean one thing.

    Raises:
        ValueError: Two reports define a column differently.
    """
    defined: dict[str, Column] = {}
    for report in reports:
        for column in report.columns:
            if defined.setdefault(column.name, column) != column:
                raise ValueError(
                    f"the reports define {column.name} differently:\n{defined[column.name]}\n"
                    f"{column}. Measure them with the same budget."
                )
    return tuple(defined.values())


def rows(reports: Sequence[Report]) -> dict[str, dict[str, Cell]]:
    """Every method's numbers from all reports.

    Raises:
        ValueError: Two reports have a number for the same method, class and column.
    """
    together: dict[str, dict[str, Cell]] = {}
    for report in reports:
        for method, row in report.rows.items():
            _add(together.setdefault(method, {}), row, method)
    return together


def details(reports: Sequence[Report]) -> dict[str, Any]:
    """What no cell can hold (`Report.details`), from all reports."""
    together: dict[str, Any] = {}
    for report in reports:
        _deep_update(together, report.details)
    return together


def _add(into: dict[str, Cell], row: Row, method: str) -> None:
    """In place: add the numbers of a method's ``row`` to those in ``into``."""
    for column, cell in row.items():
        old = into.get(column)
        into[column] = cell if old is None else _joined(method, column, old, cell)


def _joined(method: str, column: str, old: Cell, new: Cell) -> Cell:
    shared = sorted({*old.by_class} & {*new.by_class})
    if shared or (not old.by_class and not new.by_class and old != new):
        raise ValueError(
            f"two reports have a number for {method}, {column}"
            f"{f', class {shared[0]}' if shared else ''}. Join each measurement once."
        )
    return Cell({**old.by_class, **new.by_class}, old.value)


def _deep_update(into: dict[Any, Any], new: Mapping[Any, Any]) -> None:
    """In place: nested mappings are merged, anything else replaced."""
    for key, value in new.items():
        if isinstance(value, Mapping):
            _deep_update(into.setdefault(key, {}), value)
        else:
            into[key] = value
