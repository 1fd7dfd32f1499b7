"""Gates by class, unit and layer: which are closed, how many, and how alike classes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from wfilter.explain import class_order
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
    tail,
)


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
    refuse_too_few(names, len(gates))
    kept = (1 - gates).sum(0).argsort(descending=True, stable=True)[:most]
    middle = (1 - gates[:, kept]) * torch.arange(len(gates))[:, None]
    centre = middle.sum(0) / (1 - gates[:, kept]).sum(0).clamp_min(1e-9)
    order = kept[centre.argsort(stable=True)]
    with drawing(path, WIDTH, height_for(len(names))) as (figure, axes):
        image = axes.imshow(
            gates[:, order].numpy(), aspect="auto", cmap="cividis", vmin=0, vmax=1,
            interpolation="nearest",
        )  # fmt: skip
        class_ticks(axes.yaxis, names)
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
        order: Of the classes, so that two matrices can be compared; by default worked out from
            this matrix.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     similarity_plot(torch.eye(3), f"{folder}/a.png", ["cat", "dog", "ship"]).name
        'a.png'
    """
    refuse_too_few(names, len(similarity))
    order = class_order(similarity) if order is None else list(order)
    shown = similarity.double().clone().fill_diagonal_(float("nan"))[order][:, order]
    side = max(WIDTH, 2.2 + 0.115 * len(names))
    with drawing(path, side, 0.85 * side) as (figure, axes):
        image = axes.imshow(shown.numpy(), cmap="viridis", interpolation="nearest")
        ordered = [names[row] for row in order]
        class_ticks(axes.yaxis, ordered)
        class_ticks(axes.xaxis, ordered)
        axes.tick_params(axis="x", rotation=90)
        axes.set_title(title, loc="left")
        figure.colorbar(image, ax=axes, shrink=0.8, label="brighter is more alike")
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
    with drawing(path, WIDTH, 1.2 + len(values) * (0.11 if many else 0.22)) as (_, axes):
        axes.barh(
            places, (100 * mean).tolist(), color=BLUE, xerr=(100 * spread).tolist(), height=0.7,
            error_kw={"ecolor": ORANGE, "lw": 1.6},
        )  # fmt: skip
        labels = [tail(name.removesuffix(".weight")) for name in closed]
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
    refuse_too_few(names, len(closed))
    size = 8 if len(names) > MANY else 10
    with drawing(path, WIDTH, height_for(len(names))) as (_, axes):
        bars = axes.barh(range(len(names)), closed.tolist(), color=BLUE, height=0.7)
        axes.bar_label(bars, padding=3, size=size, color=INK)
        class_ticks(axes.yaxis, names)
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
    with drawing(path, WIDTH, 2.6) as (_, axes):
        axes.bar(
            [0.02 * i + 0.01 for i in range(25)], (100 * counts).tolist(), width=0.017, color=BLUE
        )
        axes.set(xlabel="distance of a gate from 0 or 1, the nearer", ylabel="gates in %")
        axes.set_title(f"{exact:.1%} of gates are exact", loc="left")
    return Path(path)
