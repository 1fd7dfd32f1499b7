"""An audit as a page: verdicts, bars against the reference one class at a time, and all tables."""

from __future__ import annotations

import tempfile
from html import escape
from pathlib import Path

from wfilter import plots
from wfilter.evaluation.audit import Audit
from wfilter.evaluation.verdict import FEATURES, RELEARNED, RULE
from wfilter.page import html

BARS = (
    "What each attack finds of the class: the closer a bar to the retrained model's (orange), the "
    "more the model is as if it had never learned the class. Longer means still known."
)
PANELS = 20  # classes with a panel of their own


def write_audit(audit: Audit, path: str | Path, *, title: str = "") -> Path:
    """One HTML file with an audit's verdicts, pictures, tables and definitions.

    Example:
        >>> import tempfile
        >>> from wfilter import Report
        >>> from wfilter.metrics import Cell, Column
        >>> column = Column("Acc_f", "accuracy", "lower", "Accuracy on the forgotten class.")
        >>> report = Report((column,), {"mine": {"Acc_f": Cell({0: 0.0})}}, (0,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_audit(Audit(report), f"{folder}/a.html").name
        'a.html'
    """
    heading = title or "What the unlearned model still knows"
    with tempfile.TemporaryDirectory() as folder:
        body = f"<header><h1>{escape(heading)}</h1></header>" + audit_section(audit, Path(folder))
        Path(path).write_text(html.document(heading, body), encoding="utf-8")
    return Path(path)


def audit_section(audit: Audit, folder: Path) -> str:
    """The audit as sections of a page; pictures are drawn in ``folder`` first."""
    report = audit.report
    verdicts = html.table(["method", *map(report.name_of, report.classes)], _said(audit))
    worst = audit.worst()
    panels = [
        (report.name_of(row), _panel(audit, row, folder / f"audit-{row}.svg"))
        for row in report.classes[:PANELS]
    ]
    return (
        f"<section><h2>Verdicts</h2>{verdicts}<p>{escape(RULE.replace('*', ''))}</p></section>"
        f"<section><h2>One class at a time</h2>{html.tabs(panels, 'class', 'audit-')}</section>"
        f"<section><h2>The worst class of each column</h2>{html.table(worst[0], worst[1:])}"
        f"</section>{_tables(audit)}"
    )


def _said(audit: Audit) -> list[list[str]]:
    """A line for each method: its verdict on every class, the reasons left to the panels."""
    found = {m: [audit.verdict(m, row) for row in audit.report.classes] for m in audit.methods}
    return [[m, *("-" if v is None else v.said for v in said)] for m, said in found.items()]


def _panel(audit: Audit, row: int, path: Path) -> str:
    """A class: its verdicts and its bars."""
    report = audit.report
    asked = [c.name for c in report.columns if c.name in ("Acc_f", *FEATURES)]
    asked += [c.name for c in report.columns if c.name.endswith(RELEARNED)]
    shares = {
        name: {m: v for m in report.methods if (v := report.of_class(m, name, row)) is not None}
        for name in asked
    }
    said = [f"{m}: {one}" for m in audit.methods if (one := audit.verdict(m, row)) is not None]
    words = "".join(f"<p>{escape(line)}.</p>" for line in said)
    name = report.name_of(row)
    drawn = {name: methods for name, methods in shares.items() if methods}
    if not drawn:
        return words
    picture = html.inline_svg(
        plots.audit_plot(drawn, path), f"a{row}", f"what attacks find of {name}"
    )
    return f"{words}{html.figure(picture, BARS)}"


def _tables(audit: Audit) -> str:
    """Every table of the report with the definitions of its columns."""
    parts = []
    for table in audit.report.tables():
        grid = table.grid()
        meaning = "".join(f"<li>{escape(x)}</li>" for x in table.definitions("").splitlines())
        title = escape(table.title[0].upper() + table.title[1:])
        parts.append(
            f"<section><h2>{title}</h2>{html.table(grid[0], grid[1:])}<ul>{meaning}</ul></section>"
        )
    notes = "".join(f"<li>{escape(note)}</li>" for note in audit.report.notes())
    return "".join(parts) + f"<section><h2>How it was measured</h2><ul>{notes}</ul></section>"
