"""What forgetting costs and takes, class by class: the picture a reader should see first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wfilter.plots.figure import (
    BLUE,
    INK,
    MANY,
    ORANGE,
    WIDTH,
    class_ticks,
    drawing,
    height_for,
    refuse_too_few,
)

MOST = 20  # classes drawn if there are more than MANY: those best known after forgetting
Pair = tuple[float, float]


def forgetting_plot(
    scores: tuple[Mapping[int, Pair], Mapping[int, Pair]], path: str | Path, names: Sequence[str]
) -> Path:
    """Accuracy before and after forgetting each class: on the class itself, and on all others.

    A ring is before, a disc after. Of more than 30 classes, the 20 best known after forgetting are
    drawn.

    Args:
        scores: Class -> accuracy in 0..1 before and after it is forgotten: on its own images, and
            on those of all other classes. The second mapping may lack a class.
        path: Where to write.
        names: A name for each class.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/a.png"
        ...     forgetting_plot(({0: (0.9, 0.0)}, {0: (0.8, 0.8)}), path, ["cat"]).name
        'a.png'
    """
    own = scores[0]
    refuse_too_few(names, max(own) + 1)
    rows = list(own)
    if len(rows) > MANY:
        rows = sorted(rows, key=lambda row: -own[row][1])[:MOST]
    with drawing(path, WIDTH, height_for(len(rows)), columns=2, sharey=True) as (_, pair):
        for axes, values, colour, title in zip(
            pair, scores, (ORANGE, BLUE), ("the class itself", "all other classes")
        ):
            _dumbbells(axes, rows, values, colour)
            axes.set_title(title, color=INK)
        class_ticks(pair[0].yaxis, [names[row] for row in rows])
        pair[0].set_ylim(len(rows) - 0.4, -0.6)
    return Path(path)


def _dumbbells(axes: Any, rows: Sequence[int], values: Mapping[int, Pair], colour: str) -> None:
    """A line from each class's ring (before) to its disc (after)."""
    known = [(y, *values[row]) for y, row in enumerate(rows) if row in values]
    y, before, after = ([line[i] for line in known] for i in range(3))
    start, end = ([100 * x for x in xs] for xs in (before, after))
    axes.hlines(y, start, end, color=colour, lw=1.6)
    axes.plot(start, y, "o", mfc="none", mec=colour, ms=9, clip_on=False)
    axes.plot(end, y, "o", color=colour, ms=5.5, clip_on=False)
    axes.set(xlim=(-3, 103), xticks=(0, 50, 100), xlabel="right in %")
    axes.grid(axis="x", alpha=0.25)
