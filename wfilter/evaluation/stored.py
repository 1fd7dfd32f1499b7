"""Reports to JSON and back: integer keys and tuples, which JSON lacks, are put right."""

from __future__ import annotations

from typing import Any

from wfilter.metrics.cells import Cell, Column


def stored_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a report as files of format 1 name them: its conditions are ``facts`` there.

    Example:
        >>> stored_fields({"classes": (3,), "conditions": {"seed": 0}})
        {'classes': (3,), 'facts': {'seed': 0}}
    """
    return {"facts" if name == "conditions" else name: value for name, value in fields.items()}


def report_fields(stored: dict[str, Any]) -> dict[str, Any]:
    """The fields of a report, from what ``Report.to_json`` wrote.

    Example:
        >>> written = {"rows": {}, "columns": [], "classes": [3], "class_names": None}
        >>> written |= {"facts": {}, "details": {"routing": {"3": 1.0}}, "format": 1}
        >>> report_fields(written)["details"]
        {'routing': {3: 1.0}}
    """
    if stored["format"] != 1:
        raise ValueError(f"format {stored['format']}, this wfilter reads format 1")
    names = stored["class_names"]
    return {
        "columns": tuple(Column(**column) for column in stored["columns"]),
        "rows": {
            method: {name: _cell(cell) for name, cell in row.items()}
            for method, row in stored["rows"].items()
        },
        "classes": tuple(stored["classes"]),
        "class_names": None if names is None else tuple(names),
        "conditions": _int_keys(stored["facts"]),
        "details": _int_keys(stored["details"]),
    }


def _cell(stored: dict[str, Any]) -> Cell:
    return Cell({int(row): value for row, value in stored["by_class"].items()}, stored["value"])


def _int_keys(stored: Any) -> Any:
    """JSON has no integer keys: a mapping whose keys are all digits had classes as keys."""
    if not isinstance(stored, dict):
        return stored
    digits = all(key.isdigit() for key in stored)
    return {(int(key) if digits else key): _int_keys(value) for key, value in stored.items()}
