"""Guess an input that a model takes, where the user gave none."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from wfilter.core.messages import first_line
from wfilter.core.state import kept
from wfilter.core.targets import CONVOLUTIONS


@torch.no_grad()
def guess_images(model: nn.Module) -> Tensor:
    """The first guess that the model takes, a batch of one; the model stays as it is.

    Example:
        >>> guess_images(nn.Sequential(nn.Flatten(), nn.Linear(7, 2))).shape
        torch.Size([1, 7])
    """
    reasons = []
    with kept(model):
        model.eval()
        for guess in example_inputs(model):
            try:
                model(guess)
            except Exception as error:
                reasons.append(f"{tuple(guess.shape)}: {first_line(error)[:120]}")
            else:
                return guess
    tried = "\n  ".join(reasons[:4])
    raise ValueError(
        f"could not guess an input that {type(model).__name__} takes. Pass example_input=images "
        f"(a small batch). Tried:\n  {tried}"
    )


def example_inputs(model: nn.Module) -> Iterator[Tensor]:
    """Guesses of an input the model takes, likeliest first, one sample each."""
    first = next(model.parameters(), None)
    if first is None:
        return
    for shape in dict.fromkeys(_shapes(model)):
        yield torch.zeros(1, *shape, device=first.device, dtype=first.dtype)


def _shapes(model: nn.Module) -> Iterator[tuple[int, ...]]:
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, *CONVOLUTIONS))]
    channels = 3
    if layers and isinstance(layers[0], nn.Linear):
        yield (layers[0].in_features,)
    elif layers:
        channels = layers[0].in_channels  # type: ignore[assignment]
    rank = {nn.Conv1d: 1, nn.Conv3d: 3}.get(type(layers[0]) if layers else None, 2)  # type: ignore[arg-type]
    embed = getattr(model, "patch_embed", None)
    for size in (getattr(embed, "img_size", None), getattr(model, "image_size", None)):
        if size is not None:
            yield (channels, *(size if isinstance(size, (tuple, list)) else (size, size)))
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    if config.get("input_size"):
        yield (channels, *config["input_size"][1:])
    for edge in (224, 32, 28, 64, 8, 16, 256, 299, 384):
        yield (channels, *(edge,) * rank)
