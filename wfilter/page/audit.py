"""An audit as a page: verdicts, bars against the reference one class at a time, and all tables."""

from __future__ import annotations

import tempfile
from collections import Counter
from html import escape
from pathlib import Path

from wfilter import plots
from wfilter.evaluation.audit import Audit
from wfilter.evaluation.render import ARROWS, DIRECTIONS
from wfilter.evaluation.verdict import FEATURES, RELEARNED, RULE
from wfilter.page import html

BARS = (
    "What each attack finds of the class: the closer a bar to the retrained model's (orange), the "
    "more the model is as if it had never learned the class. Longer means still known."
)
PANELS = 20  # classes with a panel of their own


def write_audit(audit: Audit, path: str | Path, *, title: str = "") -> Path:
    """Write one HTML file with an audit's verdicts, pictures, tables and definitions.

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
        sections = audit_sections(audit, Path(folder))
    top = (
        f'<header id="summary"><h1>{escape(heading)}</h1>'
        f'<p class="lead">{escape(_summary(audit))}</p></header>'
    )
    Path(path).write_text(html.document(heading, top, sections), encoding="utf-8")
    return Path(path)


def audit_sections(audit: Audit, folder: Path) -> list[html.Section]:
    """The audit as sections of a page; pictures are drawn in ``folder`` first."""
    report = audit.report
    verdicts = html.table(["method", *map(report.name_of, report.classes)], _said(audit))
    top, *lines = audit.worst()
    worst = html.table(top, lines, _meant(audit))
    panels = [
        (report.name_of(row), _panel(audit, row, folder / f"audit-{row}.svg"))
        for row in report.classes[:PANELS]
    ]
    rule = escape(RULE.replace("*", ""))
    rule = f"<details><summary>What the verdicts mean</summary><p>{rule}</p></details>"
    return [
        html.Section("verdicts", "Verdicts", verdicts + rule),
        html.Section("audit", "The audit, class by class", html.tabs(panels, "class", "audit-")),
        html.Section("worst", "The worst class of each column", worst),
        *_tables(audit),
    ]


def _summary(audit: Audit) -> str:
    """One line: how often each verdict was given."""
    verdicts = [
        (m, v.said) for m in audit.methods for row in audit.report.classes
        if (v := audit.verdict(m, row)) is not None
    ]  # fmt: skip
    counts = Counter(said for _, said in verdicts)
    told = ". ".join(
        f"{words.capitalize()}: {count} of {len(verdicts)}" for words, count in counts.most_common()
    )
    methods = len({m for m, _ in verdicts})
    return (
        f"{methods} {'method' if methods == 1 else 'methods'} on {len(audit.report.classes)} "
        f"{'class' if len(audit.report.classes) == 1 else 'classes'}. {told or 'No verdict'}."
    )


def _meant(audit: Audit) -> dict[str, str]:
    """Column name, with and without its arrow -> its definition and which way is better."""
    columns = audit.report.columns
    return {
        name: f"{column.definition} ({DIRECTIONS[column.better]})"
        for column in columns
        for name in (column.name, f"{column.name} {ARROWS[column.better]}")
    }


def _said(audit: Audit) -> list[list[str]]:
    """A line for each method: its verdict on every class; the reasons are in the panels."""
    verdicts = {m: [audit.verdict(m, row) for row in audit.report.classes] for m in audit.methods}
    return [[m, *("-" if v is None else v.said for v in said)] for m, said in verdicts.items()]


def _panel(audit: Audit, row: int, path: Path) -> str:
    """The panel of one class: its verdicts and its bars."""
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


def _tables(audit: Audit) -> list[html.Section]:
    """A section for each table of the report, with its columns' definitions, and one for notes."""
    sections = []
    for i, table in enumerate(audit.report.tables()):
        grid = table.grid()
        title = table.title[0].upper() + table.title[1:]
        meaning = "".join(f"<li>{escape(x)}</li>" for x in table.definitions("").splitlines())
        body = html.table(grid[0], grid[1:], _meant(audit)) + (
            f"<details><summary>What the columns mean</summary><ul>{meaning}</ul></details>"
        )
        sections.append(html.Section(f"table-{i}", title, body))
    notes = "".join(f"<li>{escape(note)}</li>" for note in audit.report.notes())
    return [*sections, html.Section("how", "How it was measured", f"<ul>{notes}</ul>")]
