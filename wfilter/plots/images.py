"""Images: where those of a forgotten class go, and the images themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from wfilter.plots.figure import BLUE, INK, ORANGE, WIDTH, class_ticks, drawing, refuse_too_few


def routing_plot(routing: Tensor, path: str | Path, names: Sequence[str], forget: int) -> Path:
    """Where the images of a forgotten class go: the share predicted as each class, up to ten.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/a.png"
        ...     routing_plot(torch.tensor([0.0, 1.0]), path, ["cat", "dog"], 0).name
        'a.png'
    """
    refuse_too_few(names, len(routing))
    order = [r for r in routing.argsort(descending=True, stable=True)[:10].tolist() if routing[r]]
    with drawing(path, WIDTH, 0.9 + 0.3 * len(order)) as (_, axes):
        colours = [ORANGE if row == forget else BLUE for row in order]
        bars = axes.barh(
            range(len(order)), (100 * routing[order]).tolist(), color=colours, height=0.7
        )
        axes.bar_label(bars, fmt="%.0f %%", padding=3, color=INK)
        class_ticks(axes.yaxis, [names[row] for row in order])
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.set(xlim=(0, 112), xticks=(0, 25, 50, 75, 100), xlabel="images in %")
    return Path(path)


def pictures(
    images: Tensor,
    path: str | Path,
    captions: Sequence[str],
    *,
    columns: int = 6,
    lines: Sequence[str] = (),
) -> Path:
    """Images side by side with captions below.

    Args:
        images: ``(count, channels, height, width)`` in 0..1.
        path: Where to write.
        captions: One for each image.
        columns: Images in a line.
        lines: A name for each line of images, put to its left.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pictures(torch.rand(2, 3, 8, 8), f"{folder}/a.png", ["cat", "dog"]).name
        'a.png'
    """
    count, tall = -(-len(images) // columns), images.shape[2] / images.shape[3]
    shape = {"rows": count, "columns": columns, "squeeze": False}
    with drawing(path, 1.15 * columns + bool(lines), (1.1 * tall + 0.3) * count, **shape) as (
        _,
        grid,
    ):
        for axes in grid.flat:
            axes.axis("off")
        for axes, image, caption in zip(grid.flat, images, captions):
            axes.imshow(as_pixels(image), cmap="gray", vmin=0, vmax=255)
            below = {"xycoords": "axes fraction", "textcoords": "offset points"}
            place = {"xytext": (0, -3), "ha": "center", "va": "top"}
            axes.annotate(caption, (0.5, 0), size=9, **below, **place)
        for axes, name in zip(grid[:, 0], lines):
            place = {"transform": axes.transAxes, "ha": "right", "va": "center"}
            axes.text(-0.1, 0.5, name, size=10, **place)
    return Path(path)


def as_pixels(image: Tensor) -> Any:
    """An image in 0..1 as uint8, ``(height, width)`` or ``(height, width, 3)``, for drawing.

    Example:
        >>> import torch
        >>> as_pixels(torch.ones(3, 2, 2)).shape
        (2, 2, 3)
    """
    pixels = (image.detach().cpu().float().clamp(0, 1) * 255).round().byte()
    return pixels[0].numpy() if len(pixels) == 1 else pixels.movedim(0, -1).numpy()
