"""Columns that say what they mean, and the numbers of each class in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Better = Literal["higher", "lower", "retrained", "none"]
Kind = Literal["percent", "number", "seconds", "count", "epochs"]
Derived = Literal["", "worst", "gap", "routing", "idi"]
Over = Literal[
    "",
    "forget test",
    "retain test",
    "forget sample",
    "retain sample",
    "forget train",
    "retain train",
]


@dataclass(frozen=True)
class Column:
    """One metric: what it is, and which way is better.

    Attributes:
        name: Shown at the top of the column.
        group: The table it stands in.
        better: Its direction; ``"retrained"`` where the retrained model's number is the bar.
        definition: One sentence.
        kind: How numbers are printed; fractions are printed as per cent.
        cap: What a class without a number counts as: one not relearned counts as all epochs.
        derived: Worked out from other numbers: the worst class of ``source``, the mean gap to the
            retrained model over the columns named in ``source``, the distance of the routings, or
            the index of information over the layers in ``source``.
        source: See ``derived``; names separated by ``", "``.
        over: The images that the number is a share of, whose count decides how uncertain it is:
            of the forgotten class or of the others (``forget``, ``retain``), and from all test
            data or from the test or training sample (``test``, ``sample``, ``train``).
    """

    name: str
    group: str
    better: Better
    definition: str
    kind: Kind = "percent"
    cap: float | None = None
    derived: Derived = ""
    source: str = ""
    over: Over = ""


@dataclass(frozen=True)
class Cell:
    """The number of each class, or one number for all; ``None``: not reached within the cap.

    Example:
        >>> Cell({0: 1.0, 1: 0.5}).mean()
        0.75
        >>> Cell({0: 3.0, 1: None}).mean(cap=9)
        6.0
    """

    by_class: Mapping[int, float | None] = field(default_factory=dict)
    value: float | None = None

    def mean(self, cap: float | None = None) -> float:
        """Mean over classes, each counting once; a class without a number counts as ``cap``."""
        if not self.by_class:
            assert self.value is not None
            return self.value
        if cap is None and self.failures:
            raise ValueError(
                f"{self.failures} of {len(self.by_class)} classes have no number: pass the cap "
                "that a class which never came back counts as."
            )
        counted = [cap if value is None else value for value in self.by_class.values()]
        numbers = [value for value in counted if value is not None]
        assert len(numbers) == len(counted)
        return sum(numbers) / len(numbers)

    @property
    def failures(self) -> int:
        """Classes without a number."""
        return sum(value is None for value in self.by_class.values())


Row = Mapping[str, Cell]


@dataclass(frozen=True)
class RowScores:
    """One number for each row, with their mean and the worst of them.

    Example:
        >>> scores = RowScores({0: 0.9, 1: 0.5}, higher_is_better=True)
        >>> scores.mean, scores.worst, scores.worst_row
        (0.7, 0.5, 1)
    """

    by_row: dict[int, float]
    higher_is_better: bool

    @property
    def mean(self) -> float:
        """Mean over rows, each row counting once however many samples it has."""
        return sum(self.by_row.values()) / len(self.by_row)

    @property
    def worst_row(self) -> int:
        """The row with the worst number."""
        pick = min if self.higher_is_better else max
        return pick(self.by_row, key=self.by_row.__getitem__)

    @property
    def worst(self) -> float:
        """The worst row's number."""
        return self.by_row[self.worst_row]
