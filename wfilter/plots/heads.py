"""Which attention heads a class closes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from wfilter.plots.figure import WIDTH, drawing, tail


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
    with drawing(path, WIDTH, 1.4 + 0.24 * len(shown), columns=3, sharey=True) as (figure, axes):
        for part, name, values in zip(axes, ("query", "key", "value"), shown.unbind(1)):
            image = part.imshow(
                values.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=max(top, 1e-6)
            )
            part.set_xticks(range(0, heads, -(-heads // 6)))
            part.set_title(name, size=11)
            part.set_xlabel("head")
        axes[0].set_yticks(range(len(shown)), [tail(name, 18) for name in blocks], size=9)
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
        parts = re.fullmatch(r"(?:(.*)\.)?(\w+?)(?:[._]weight)", name)
        if parts is None:
            continue
        path, layer = parts.group(1) or "", parts.group(2)
        letters = _LETTERS.get(layer.removesuffix("_proj").removeprefix("to_"))
        if letters is None or closed.shape[1] != len(letters):
            continue
        block = re.sub(r"\.?\w*att\w*$", "", path) or path or name
        blocks.setdefault(block, {}).update(zip(letters, closed.unbind(1)))
    return blocks


_LETTERS = {"qkv": "qkv", "in": "qkv", "kv": "kv", "query": "q", "key": "k", "value": "v"}
_LETTERS.update({letter: letter for letter in "qkv"})
