"""Pictures of what `wfilter.explain` measures. Every function writes one file and returns its path.

The suffix chooses the format. PNG has a white ground; SVG has none and keeps its text as text, so
that a page can show it in light and dark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wfilter.explain import ClassCurves, Graph, class_order, clusters, mean_curve

if TYPE_CHECKING:
    from wfilter.history import History

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


def history_plot(history: History, path: str | Path) -> Path:
    """Loss, accuracies and the share of closed gates against steps.

    Example:
        >>> import tempfile
        >>> from wfilter.history import History, Record
        >>> records = [Record(i, 0, 0.0, 1 / i, 0.9, 0.1, 0.05) for i in (1, 2, 3)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     history_plot(History({"name": "distill"}, 0, records), f"{folder}/a.png").name
        'a.png'
    """
    records = history.records
    if not records:
        raise ValueError("the history has no records: untrain for a step or more before plotting.")
    steps = [record.step for record in records]
    with _figure(path, WIDTH, 4.6, rows=2, sharex=True) as (_, (loss, shares)):
        loss.plot(steps, [record.loss for record in records], color=BLUE, label="loss")
        checked = [r for r in records if r.validation is not None]
        if checked:
            values = [r.validation for r in checked]
            loss.plot([r.step for r in checked], values, "o-", color=ORANGE, label="validation")
        loss.set_ylabel("loss")
        loss.legend(loc="upper right")
        for name, label, colour in (
            ("retain_accuracy", "retain accuracy", PALETTE[2]),
            ("forget_accuracy", "forget accuracy", PALETTE[3]),
            ("closed", "closed gates", GREY),
        ):
            shares.plot(steps, [getattr(r, name) for r in records], color=colour, label=label)
        shares.set(xlabel="step", ylabel="share", ylim=(-0.03, 1.03))
        _legend_below(shares, 3)
    return Path(path)


def graph_plot(
    graph: Graph, path: str | Path, names: Sequence[str], groups: Tensor | None = None
) -> Path:
    """The bipartite graph of classes and the units they share in one layer.

    Args:
        graph: As `explain.class_unit_graph` makes it.
        path: Where to write.
        names: A name for each class.
        groups: Class similarity. More than 30 classes are bundled in its clusters, or by the units
            they share where it is not given.

    Example:
        >>> import tempfile
        >>> graph = Graph("conv.weight", (0, 1), (7,), ((0, 7), (1, 7)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     graph_plot(graph, f"{folder}/a.svg", ["cat", "dog"]).name
        'a.svg'
    """
    _refuse_too_few(names, 1 + max(graph.classes, default=-1))
    bundled = _bundles(graph, groups) if len(graph.classes) > MANY else []
    colours = _class_colours(len(names), bundled)
    size = 8 if bundled else 11
    rows = max(len(graph.classes), len(graph.units), 4)
    with _figure(path, WIDTH, 0.8 + rows * (0.135 if bundled else 0.24)) as (_, axes):
        left = _places([row for rows in bundled for row in rows] or graph.classes)
        right = _places(graph.units)
        if bundled:
            _draw_bundles(axes, graph, bundled, left, right, colours)
        for row, unit in () if bundled else graph.edges:
            axes.plot((0, 1), (left[row], right[unit]), color=colours[row], lw=1.2, alpha=0.75)
        for row, y in left.items():
            axes.plot(0, y, "o", ms=3 if bundled else 5, color=colours[row])
            axes.text(
                -0.03, y, _short(names[row]), ha="right", va="center", size=size, color=colours[row]
            )
        for unit, y in right.items():
            axes.plot(1, y, "s", ms=4, color=INK)
            axes.text(1.03, y, str(unit), va="center", size=min(size, 9))
        above = min([*left.values(), *right.values()], default=0.0) - 0.6 / rows - 0.01
        axes.set(xlim=(-0.45, 1.2), ylim=(1.03, above - 1 / rows))
        axes.axis("off")
        axes.set_title(graph.layer.removesuffix(".weight"), loc="left")
        axes.text(-0.03, above, "class", ha="right", va="bottom", style="italic", size=size)
        axes.text(1.03, above, "unit", va="bottom", style="italic", size=size)
        if not graph.edges:
            axes.text(0.5, 0.5, "no unit is shared", ha="center")
        if bundled:
            text = f"{len(bundled)} clusters of classes that close similar gates; thicker\n"
            text += "lines: more classes of the cluster close the unit"
            axes.text(-0.45, 1.01, text, size=9, va="top")
    return Path(path)


def heat_map(
    gates: Tensor, path: str | Path, names: Sequence[str], *, layer: str = "", most: int = 80
) -> Path:
    """Gates of a layer, classes by units: the units that are closed most, grouped by class.

    Args:
        gates: ``(num_classes, units)`` in 0..1.
        path: Where to write.
        names: A name for each class.
        layer: For the title.
        most: Units to show.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     heat_map(torch.rand(3, 8), f"{folder}/a.png", ["cat", "dog", "ship"]).name
        'a.png'
    """
    _refuse_too_few(names, len(gates))
    kept = (1 - gates).sum(0).argsort(descending=True, stable=True)[:most]
    middle = (1 - gates[:, kept]) * torch.arange(len(gates))[:, None]
    centre = middle.sum(0) / (1 - gates[:, kept]).sum(0).clamp_min(1e-9)
    order = kept[centre.argsort(stable=True)]
    with _figure(path, WIDTH, _height(len(names))) as (figure, axes):
        image = axes.imshow(
            gates[:, order].numpy(), aspect="auto", cmap="cividis", vmin=0, vmax=1,
            interpolation="nearest",
        )  # fmt: skip
        _class_ticks(axes.yaxis, names)
        axes.set_xticks([])
        axes.set_xlabel(f"{len(order)} of {gates.shape[1]} units, the most closed")
        axes.set_title(layer.removesuffix(".weight"), loc="left")
        bar = figure.colorbar(image, ax=axes, ticks=(0, 0.5, 1), shrink=0.9)
        bar.set_ticklabels(["0 closed", "0.5", "1 open"])
    return Path(path)


def similarity_plot(
    similarity: Tensor,
    path: str | Path,
    names: Sequence[str],
    *,
    title: str = "overlap of closed gates",
    order: Sequence[int] | None = None,
) -> Path:
    """A class-by-class matrix, similar classes next to each other; the diagonal is left out.

    Args:
        similarity: ``(num_classes, num_classes)``.
        path: Where to write.
        names: A name for each class.
        title: Shown above.
        order: Of the classes, to compare two matrices; by default the matrix's own.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     similarity_plot(torch.eye(3), f"{folder}/a.png", ["cat", "dog", "ship"]).name
        'a.png'
    """
    _refuse_too_few(names, len(similarity))
    order = class_order(similarity) if order is None else list(order)
    shown = similarity.double().clone().fill_diagonal_(float("nan"))[order][:, order]
    side = max(WIDTH, 2.2 + 0.115 * len(names))
    with _figure(path, side, 0.85 * side) as (figure, axes):
        image = axes.imshow(shown.numpy(), cmap="viridis", interpolation="nearest")
        ordered = [names[row] for row in order]
        _class_ticks(axes.yaxis, ordered)
        _class_ticks(axes.xaxis, ordered)
        axes.tick_params(axis="x", rotation=90)
        axes.set_title(title, loc="left")
        figure.colorbar(image, ax=axes, shrink=0.8, label="brighter is more alike")
    return Path(path)


def curves_plot(curves: Mapping[int, ClassCurves], path: str | Path, *, title: str = "") -> Path:
    """Insertion and deletion: the mean over classes, each class thinly, and the random control.

    Example:
        >>> import tempfile
        >>> from wfilter.metrics import Curve
        >>> up, down = Curve((0.0, 1.0), (0.0, 1.0)), Curve((0.0, 1.0), (1.0, 0.0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     curves_plot({0: ClassCurves(up, down, up, down)}, f"{folder}/a.png").name
        'a.png'
    """
    with _figure(path, WIDTH, 6.0, rows=2, sharex=True, sharey=True) as (_, pair):
        for axes, kind, verb in zip(pair, ("insertion", "deletion"), ("opened", "closed")):
            for name, colour, label in (
                (kind, BLUE, "most closed gate first"),
                (f"random_{kind}", GREY, "random order"),
            ):
                each = [getattr(of_class, name) for of_class in curves.values()]
                for curve in each if len(each) > 1 else ():
                    axes.plot(curve.shares, curve.values, color=colour, lw=0.8, alpha=0.5)
                mean = mean_curve(each)
                text = f"{label}: area {mean.auc:.3f}"
                axes.plot(mean.shares, mean.values, color=colour, lw=2.4, label=text)
            axes.set_ylabel("relative confidence")
            axes.legend(
                title=f"{kind}: units {verb}", title_fontsize=12, alignment="left",
                loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderpad=0,
            )  # fmt: skip
        pair[1].set_xlabel(f"share of the units of every layer{', ' + title if title else ''}")
        pair[0].set_ylim(-0.05, 1.15)
    return Path(path)


def depth_plot(closed: Mapping[str, Tensor], path: str | Path) -> Path:
    """Which layers do the forgetting: share of closed gates by depth, mean and range over classes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     depth_plot({"conv.weight": torch.tensor([0.1, 0.3])}, f"{folder}/a.png").name
        'a.png'
    """
    values = torch.stack([shares.float() for shares in closed.values()])  # (layers, classes)
    mean, places = values.mean(1), range(len(values))
    spread = torch.stack([mean - values.amin(1), values.amax(1) - mean]).clamp_min(0)
    many = len(values) > 60
    with _figure(path, WIDTH, 1.2 + len(values) * (0.11 if many else 0.22)) as (_, axes):
        axes.barh(
            places, (100 * mean).tolist(), color=BLUE, xerr=(100 * spread).tolist(), height=0.7,
            error_kw={"ecolor": ORANGE, "lw": 1.6},
        )  # fmt: skip
        labels = [_tail(name.removesuffix(".weight")) for name in closed]
        step = 2 if many else 1
        axes.set_yticks(list(places)[::step], labels[::step], size=9)
        axes.set_ylim(len(values) - 0.4, -0.6)
        axes.set_xlabel("closed gates in %")
        axes.set_title("bar: mean over classes; line: least to most", size=10, loc="right")
    return Path(path)


def closed_plot(closed: Tensor, path: str | Path, names: Sequence[str]) -> Path:
    """How many gates each class closes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     closed_plot(torch.tensor([3, 5]), f"{folder}/a.png", ["cat", "dog"]).name
        'a.png'
    """
    _refuse_too_few(names, len(closed))
    size = 8 if len(names) > MANY else 10
    with _figure(path, WIDTH, _height(len(names))) as (_, axes):
        bars = axes.barh(range(len(names)), closed.tolist(), color=BLUE, height=0.7)
        axes.bar_label(bars, padding=3, size=size, color=INK)
        _class_ticks(axes.yaxis, names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.margins(x=0.12)
        axes.set_xlabel("closed gates")
    return Path(path)


def exactness_plot(distance: Tensor, path: str | Path) -> Path:
    """How far gates are from exactly 0 or 1: a histogram of `explain.distance_from_exact`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     exactness_plot(torch.rand(4, 9) / 2, f"{folder}/a.png").name
        'a.png'
    """
    values, exact = distance.flatten(), float((distance == 0).float().mean())
    counts = torch.histc(values, 25, 0.0, 0.5) / max(1, values.numel())
    with _figure(path, WIDTH, 2.6) as (_, axes):
        axes.bar(
            [0.02 * i + 0.01 for i in range(25)], (100 * counts).tolist(), width=0.017, color=BLUE
        )
        axes.set(xlabel="distance of a gate from 0 or 1, the nearer", ylabel="gates in %")
        axes.set_title(f"{exact:.1%} of gates are exact", loc="left")
    return Path(path)


def heads_plot(usage: Mapping[str, Tensor], path: str | Path, row: int, *, title: str = "") -> Path:
    """Which attention heads a class closes: blocks by heads, for q, k and v side by side.

    Args:
        usage: As `explain.head_usage` gives it. A block's projections may be joint or apart; what a
            block does not have, or no gate filters, stays blank.
        path: Where to write.
        row: The class.
        title: Shown above.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     heads_plot({"qkv.weight": torch.rand(2, 3, 4)}, f"{folder}/a.png", 0).name
        'a.png'
    """
    blocks = _by_block(usage)
    if not blocks:
        raise ValueError("no q/k/v projection among the targets: there is nothing to draw.")
    heads = max(part.shape[1] for parts in blocks.values() for part in parts.values())
    shown = torch.full((len(blocks), 3, heads), float("nan"))
    for i, parts in enumerate(blocks.values()):
        for part, closed in parts.items():
            shown[i, "qkv".index(part), : closed.shape[1]] = closed[row].float()
    top = max(float(u.max()) for parts in blocks.values() for u in parts.values())
    with _figure(path, WIDTH, 1.4 + 0.24 * len(shown), columns=3, sharey=True) as (figure, axes):
        for part, name, values in zip(axes, ("query", "key", "value"), shown.unbind(1)):
            image = part.imshow(
                values.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=max(top, 1e-6)
            )
            part.set_xticks(range(0, heads, -(-heads // 6)))
            part.set_title(name, size=11)
            part.set_xlabel("head")
        axes[0].set_yticks(range(len(shown)), [_tail(name, 18) for name in blocks], size=9)
        figure.colorbar(image, ax=list(axes), label="closed, mean of 1 - gate")
        figure.suptitle(title, x=0.02, ha="left", size=12)
    return Path(path)


def has_heads(usage: Mapping[str, Tensor]) -> bool:
    """Whether `heads_plot` has anything to draw.

    Example:
        >>> has_heads({"blocks.0.attn.proj.weight": torch.rand(2, 1, 4)})
        False
    """
    return bool(_by_block(usage))


def _by_block(usage: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Block -> q, k, v -> ``(num_classes, heads)``, from the names of weights."""
    blocks: dict[str, dict[str, Tensor]] = {}
    for name, closed in usage.items():
        found = re.fullmatch(r"(?:(.*)\.)?(\w+?)(?:[._]weight)", name)
        letters = (
            _LETTERS.get(found.group(2).removesuffix("_proj").removeprefix("to_"))
            if found
            else None
        )
        if found is None or letters is None or closed.shape[1] != len(letters):
            continue
        block = re.sub(r"\.?\w*att\w*$", "", found.group(1) or "") or found.group(1) or name
        blocks.setdefault(block, {}).update(zip(letters, closed.unbind(1)))
    return blocks


_LETTERS = {"qkv": "qkv", "in": "qkv", "kv": "kv", "query": "q", "key": "k", "value": "v"}
_LETTERS.update({letter: letter for letter in "qkv"})


def routing_plot(routing: Tensor, path: str | Path, names: Sequence[str], forget: int) -> Path:
    """Where the images of a forgotten class go: the share predicted as each class, up to ten.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/a.png"
        ...     routing_plot(torch.tensor([0.0, 1.0]), path, ["cat", "dog"], 0).name
        'a.png'
    """
    _refuse_too_few(names, len(routing))
    order = [r for r in routing.argsort(descending=True, stable=True)[:10].tolist() if routing[r]]
    with _figure(path, WIDTH, 0.9 + 0.3 * len(order)) as (_, axes):
        colours = [ORANGE if row == forget else BLUE for row in order]
        bars = axes.barh(
            range(len(order)), (100 * routing[order]).tolist(), color=colours, height=0.7
        )
        axes.bar_label(bars, fmt="%.0f %%", padding=3, color=INK)
        _class_ticks(axes.yaxis, [names[row] for row in order])
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.set(xlim=(0, 112), xticks=(0, 25, 50, 75, 100), xlabel="images in %")
    return Path(path)


def pictures(
    images: Tensor, path: str | Path, captions: Sequence[str], *, columns: int = 6
) -> Path:
    """Images side by side with captions below.

    Args:
        images: ``(count, channels, height, width)`` in 0..1.
        path: Where to write.
        captions: One for each image.
        columns: Images in a line.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pictures(torch.rand(2, 3, 8, 8), f"{folder}/a.png", ["cat", "dog"]).name
        'a.png'
    """
    lines = -(-len(images) // columns)
    shape = {"rows": lines, "columns": columns, "squeeze": False}
    with _figure(path, 1.15 * columns, 1.45 * lines, **shape) as (_, grid):
        for axes in grid.flat:
            axes.axis("off")
        for axes, image, caption in zip(grid.flat, images, captions):
            axes.imshow(as_pixels(image), cmap="gray", vmin=0, vmax=255)
            axes.set_title(caption, size=9, y=-0.22)
    return Path(path)


def as_pixels(image: Tensor) -> Any:
    """An image in 0..1 as uint8, ``(height, width)`` or ``(height, width, 3)``, for drawing.

    Example:
        >>> as_pixels(torch.ones(3, 2, 2)).shape
        (2, 2, 3)
    """
    pixels = (image.detach().cpu().float().clamp(0, 1) * 255).round().byte()
    return pixels[0].numpy() if len(pixels) == 1 else pixels.movedim(0, -1).numpy()


# ---- pieces ------------------------------------------------------------------------------------


@contextmanager
def _figure(
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


def _height(classes: int) -> float:
    return 1.2 + classes * (0.135 if classes > MANY else 0.27)


def _places(items: Sequence[int]) -> dict[int, float]:
    """Items spread evenly from 0 to 1."""
    return {item: (i + 0.5) / len(items) for i, item in enumerate(items)}


def _refuse_too_few(names: Sequence[str], classes: int) -> None:
    if len(names) < classes:
        raise ValueError(f"there are {classes} classes and {len(names)} names. Name every class.")


def _class_ticks(axis: Any, names: Sequence[str]) -> None:
    axis.set_ticks(range(len(names)), [_short(name) for name in names])
    axis.set_tick_params(labelsize=7 if len(names) > MANY else 10, length=0)


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _tail(name: str, most: int = 30) -> str:
    """The end of a dotted name, which tells layers apart."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _class_colours(count: int, bundles: Sequence[Sequence[int]]) -> list[str]:
    """A colour for each class, or for its cluster; the palette starts again where it ends."""
    colours = [PALETTE[row % len(PALETTE)] for row in range(count)]
    for i, rows in enumerate(bundles):
        for row in rows:
            colours[row] = PALETTE[i % len(PALETTE)]
    return colours


def _bundles(graph: Graph, groups: Tensor | None) -> list[list[int]]:
    """The classes of a graph in clusters of about six, in the order of the graph."""
    place = {row: i for i, row in enumerate(graph.classes)}
    rows = torch.tensor(graph.classes)
    alike = _edge_overlap(graph, place) if groups is None else groups[rows][:, rows]
    found: dict[int, list[int]] = {}
    for row, cluster in zip(graph.classes, clusters(alike, len(rows) // 6)):
        found.setdefault(cluster, []).append(row)
    return sorted(found.values(), key=lambda rows: sum(place[row] for row in rows) / len(rows))


def _edge_overlap(graph: Graph, place: Mapping[int, int]) -> Tensor:
    """How many units two classes of a graph share, over those either has."""
    position = {unit: i for i, unit in enumerate(graph.units)}
    joined = torch.zeros(len(place), max(1, len(position)), dtype=torch.float64)
    for row, unit in graph.edges:
        joined[place[row], position[unit]] = 1
    both = joined @ joined.T
    either = joined.sum(1)[:, None] + joined.sum(1) - both
    return both / either.clamp_min(1)


def _draw_bundles(
    axes: Any,
    graph: Graph,
    bundles: Sequence[Sequence[int]],
    left: Mapping[int, float],
    right: Mapping[int, float],
    colours: Sequence[str],
) -> None:
    """Each class joined to its cluster's knot, and one line from knot to unit for all of them."""
    edges = set(graph.edges)
    for rows in bundles:
        colour, knot = colours[rows[0]], sum(left[row] for row in rows) / len(rows)
        for row in rows:
            axes.plot((0, 0.14), (left[row], knot), color=colour, lw=0.8)
        axes.plot(0.14, knot, "o", ms=5, color=colour)
        for unit, y in right.items():
            share = sum((row, unit) in edges for row in rows) / len(rows)
            if share:
                width, alpha = 0.4 + 2.6 * share, 0.25 + 0.6 * share
                axes.plot((0.14, 1), (knot, y), color=colour, lw=width, alpha=alpha)


def _legend_below(axes: Any, columns: int) -> None:
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=columns, fontsize=9, columnspacing=1
    )
