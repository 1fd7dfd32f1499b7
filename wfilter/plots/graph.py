"""The graph of classes and the units they share; many classes are bundled in clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wfilter.explain import Graph, clusters
from wfilter.plots.figure import INK, MANY, PALETTE, WIDTH, drawing, refuse_too_few, short


def graph_plot(
    graph: Graph, path: str | Path, names: Sequence[str], groups: Tensor | None = None
) -> Path:
    """The bipartite graph of classes and the units they share in one layer.

    Args:
        graph: As `explain.class_unit_graph` makes it.
        path: Where to write.
        names: A name for each class.
        groups: Class similarity. More than 30 classes are bundled in its clusters, or without
            it in clusters by the units they share.

    Example:
        >>> import tempfile
        >>> graph = Graph("conv.weight", (0, 1), (7,), ((0, 7), (1, 7)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     graph_plot(graph, f"{folder}/a.svg", ["cat", "dog"]).name
        'a.svg'
    """
    refuse_too_few(names, 1 + max(graph.classes, default=-1))
    bundled = _bundles(graph, groups) if len(graph.classes) > MANY else []
    colours = _class_colours(len(names), bundled)
    size = 8 if bundled else 11
    rows = max(len(graph.classes), len(graph.units), 4)
    with drawing(path, WIDTH, 0.8 + rows * (0.135 if bundled else 0.24)) as (_, axes):
        left = _places([row for rows in bundled for row in rows] or graph.classes)
        right = _places(graph.units)
        if bundled:
            _draw_bundles(axes, graph, bundled, left, right, colours)
        for row, unit in () if bundled else graph.edges:
            axes.plot((0, 1), (left[row], right[unit]), color=colours[row], lw=1.2, alpha=0.75)
        for row, y in left.items():
            axes.plot(0, y, "o", ms=3 if bundled else 5, color=colours[row])
            axes.text(
                -0.03, y, short(names[row]), ha="right", va="center", size=size, color=colours[row]
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


def _places(items: Sequence[int]) -> dict[int, float]:
    """Items spread evenly from 0 to 1."""
    return {item: (i + 0.5) / len(items) for i, item in enumerate(items)}


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
    members: dict[int, list[int]] = {}
    for row, cluster in zip(graph.classes, clusters(alike, len(rows) // 6)):
        members.setdefault(cluster, []).append(row)
    return sorted(members.values(), key=lambda rows: sum(place[row] for row in rows) / len(rows))


def _edge_overlap(graph: Graph, place: Mapping[int, int]) -> Tensor:
    """For two classes of a graph, the units both have as a share of those either has."""
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
    """Each class joined to its cluster's knot, and one line from the knot to each unit they use."""
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
