"""Bars for each method: what attacks find in a model, beside the retrained one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from wfilter.plots.figure import BLUE, GREY, ORANGE, PALETTE, WIDTH, drawing

COLOURS = {"original": GREY, "retrained": ORANGE}


def audit_plot(
    shares: Mapping[str, Mapping[str, float | None]], path: str | Path, *, title: str = ""
) -> Path:
    """A group of bars for each column, a bar for each method; grey original, orange retrained.

    Args:
        shares: Column -> method -> share in 0..1; a missing one has no bar.
        path: The file to write.
        title: Above the picture.

    Example:
        >>> import tempfile
        >>> shares = {"probe f": {"retrained": 0.6, "mine": 0.9}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     audit_plot(shares, f"{folder}/a.png").name
        'a.png'
    """
    methods = list(dict.fromkeys(m for column in shares.values() for m in column))
    own = [m for m in methods if m not in COLOURS]
    colours = COLOURS | dict(zip(own, [BLUE, *PALETTE[2:]]))
    height, thick = 0.9 + 0.11 * len(shares) * (len(methods) + 1), 1 / (len(methods) + 1)
    with drawing(path, WIDTH, height) as (_, axes):
        for i, method in enumerate(methods):
            known = [(j, column.get(method)) for j, column in enumerate(shares.values())]
            drawn = [(j + (i + 0.5) * thick, 100 * v) for j, v in known if v is not None]
            axes.barh(
                [at for at, _ in drawn],
                [value for _, value in drawn],
                height=0.9 * thick,
                color=colours.get(method, GREY),
                label=method,
            )
        middle = len(methods) * thick / 2
        axes.set_yticks([j + middle for j in range(len(shares))], list(shares))
        axes.invert_yaxis()
        axes.set(xlabel="%", xlim=(0, 102), title=title)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9)
    return Path(path)
