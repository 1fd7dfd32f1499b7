"""What a round of untraining reports while it runs and afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from wfilter.files.card import NOT_MEASURED


class Ended(str, Enum):
    """Why a round of untraining ended; ``History.stopped`` says it in words."""

    RUNNING = "running"
    STEPS = "steps"
    EPOCHS = "epochs"
    NO_IMPROVEMENT = "no improvement"
    SOLVED = "solved"
    MET = "met"
    NOT_MET = "not met"
    INTERRUPTED = "interrupted"


@dataclass
class Record:
    """One line of a history."""

    step: int
    epoch: int
    seconds: float
    loss: float
    retain_accuracy: float
    forget_accuracy: float
    closed: float
    validation: float | None = None


@dataclass
class History:
    """What happened in a round of untraining; ``records`` has a line per step.

    Attributes:
        recipe: The settings, as ``Recipe.to_dict`` gives them.
        seed: Of everything random.
        records: What each step, or each part of the rows that are solved, reports.
        stopped: Why it ended, in words.
        seconds: How long it took.
        ended: Why it ended.
        choices: What ``recipe="auto"`` decided, and why, a sentence each.
        fixed: The recipe it settled on, which does the same again without looking around.
        rows: Of each class: what its row keeps of the others, what is known of it, and what the
            base model knows of the others, on images that no step has seen.
        verdict: Whether every row met the bar, or which did not and what to try, in one line.
        images: How many images ``recipe="auto"`` looked at, those it judged by included.
    """

    recipe: dict[str, object]
    seed: int
    records: list[Record] = field(default_factory=list)
    stopped: str = ""
    seconds: float = 0.0
    ended: Ended = Ended.RUNNING
    choices: list[str] = field(default_factory=list)
    fixed: dict[str, object] = field(default_factory=dict)
    rows: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    verdict: str = ""
    images: int = 0

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> History:
        """The history that ``to_json`` wrote, also one of an earlier version.

        Example:
            >>> History.from_dict(json.loads(History({}, 3).to_json())).seed
            3
        """
        values = dict(stored)
        values["records"] = [Record(**record) for record in values["records"]]
        values["rows"] = {int(k): tuple(v) for k, v in values.get("rows", {}).items()}
        if "ended" in values:
            values["ended"] = Ended(values["ended"])
        elif values["stopped"] == "solved":  # earlier versions had only the words
            values["ended"] = Ended.SOLVED
        return cls(**values)

    def end(self, ended: Ended, words: str) -> None:
        """In place: note why it ended."""
        self.ended, self.stopped = ended, words

    def to_json(self) -> str:
        """The whole history, readable by ``json.loads``."""
        return json.dumps(asdict(self))

    def plot(self, path: str | Path) -> Path:
        """Loss and accuracies against steps, as a picture."""
        from wfilter.plots import history_plot

        return history_plot(self, Path(path))


def training_figures(history: History) -> str:
    """What a history knows of the result: the mean over its last tenth, on training images.

    Where rows were solved, each record is of other rows, and all of them count.
    """
    if history.rows:
        return f"On training images that no step has seen: {history.verdict} {NOT_MEASURED}"
    solved = history.ended is Ended.SOLVED
    last = history.records[-max(1, len(history.records) // 10) :] if not solved else history.records
    retain, forget = (
        sum(getattr(record, name) for record in last) / len(last)
        for name in ("retain_accuracy", "forget_accuracy")
    )
    where = (
        "On the images the rows were made from, own ones and those most like them"
        if solved
        else f"On the batches of the last {len(last)} steps, training images and sets of several "
        "classes among them"
    )
    return (
        f"{where}: {100 * retain:.1f} % of the other classes right, "
        f"{100 * forget:.1f} % of the forgotten ones. {NOT_MEASURED}"
    )


class ProgressBar:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int | None, show: bool | None):
        from rich.console import Console

        console = Console(stderr=True)
        self.bar = None
        if console.is_terminal if show is None else show:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("untrain"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} {task.fields[note]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self.task = self.bar.add_task("untrain", total=total, note="")

    def __enter__(self) -> ProgressBar:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self) -> None:
        """Move the bar by a step that has no record."""
        if self.bar is not None:
            self.bar.advance(self.task)

    def show(self, record: Record) -> None:
        """Move the bar to a record's step."""
        if self.bar is not None:
            note = (
                f"loss {record.loss:.3f}  retain {record.retain_accuracy:.1%}  "
                f"forget {record.forget_accuracy:.1%}  closed {record.closed:.1%}"
            )
            self.bar.update(self.task, completed=record.step, note=note)
