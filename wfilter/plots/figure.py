"""What all pictures share: palette, sizes, the figure itself and names on its axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK = "#24292f"  # text and axes; a page replaces it by its own text colour
BLUE, ORANGE, GREY = "#0f7ac2", "#d95f02", "#8a8f98"
# Ten colours that differ in hue and lightness and show on white and on near-black.
PALETTE = (
    *("#3b7dd8", "#e07b00", "#2e9e4f", "#d1453b", "#9467bd"),
    *("#a0714f", "#e377c2", "#7f8790", "#a8a800", "#17a5b8"),
)
WIDTH = 4.5  # inches, 432 pixels: text stays readable on a telephone
MANY = 30  # classes beyond this are labelled smaller and bundled in clusters
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "svg.hashsalt": "wfilter",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.titlesize": 12,
}


@contextmanager
def drawing(
    path: str | Path,
    width: float,
    height: float,
    *,
    rows: int = 1,
    columns: int = 1,
    **options: Any,
) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes in the house style, saved at the end; needs no display."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(rows, columns, **options)
        vector = Path(path).suffix == ".svg"
        extra = {"metadata": {"Date": None}} if vector else {"dpi": 130, "facecolor": "white"}
        figure.savefig(path, transparent=vector, **extra)


def height_for(classes: int) -> float:
    """The height in inches of a picture with a line for each class."""
    return 1.2 + classes * (0.135 if classes > MANY else 0.27)


def refuse_too_few(names: Sequence[str], classes: int) -> None:
    """Stop where a class has no name."""
    if len(names) < classes:
        raise ValueError(f"there are {classes} classes and {len(names)} names. Name every class.")


def class_ticks(axis: Any, names: Sequence[str]) -> None:
    """A tick with its name for each class."""
    axis.set_ticks(range(len(names)), [short(name) for name in names])
    axis.set_tick_params(labelsize=7 if len(names) > MANY else 10, length=0)


def short(name: str, most: int = 18) -> str:
    """The beginning of a class's name."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def tail(name: str, most: int = 30) -> str:
    """The end of a dotted name, which tells layers apart."""
    return name if len(name) <= most else f"…{name[1 - most :]}"
