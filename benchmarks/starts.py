"""The weights that a training starts from: those of a model for something else, made to fit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn import functional as F


@torch.no_grad()
def start_from(model: nn.Module, path: Path) -> str:
    """In place: take the tensors of a file whose names and shapes agree; which did not.

    A first kernel for colour images is summed over its channels for grey ones.
    """
    wanted, fresh = model.state_dict(), []
    stored = resized(load_file(path), wanted)
    for name, tensor in wanted.items():
        given = stored.get(name)
        if given is not None and given.ndim == tensor.ndim == 4 and tensor.shape[1] == 1:
            given = given.sum(1, keepdim=True)
        if given is not None and "cls_token" in wanted and given.shape != tensor.shape:
            given = doubled(name, given.float(), tensor)
        if given is not None and given.shape == tensor.shape:
            tensor.copy_(given)
        else:
            fresh.append(name)
    if len(fresh) == len(wanted):
        raise SystemExit(f"nothing in {path} fits this model.")
    return f"started from {path.name}; fresh: {', '.join(fresh) or 'nothing'}"


def resized(stored: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """An ImageNet ViT with the smaller patches of another one, for pixels in 0..1.

    A patch is seen as the same patch enlarged would have been.
    """
    name = "patch_embed.proj.weight"
    shared = name in stored and name in wanted
    if not shared or stored[name].shape[2:] == wanted[name].shape[2:]:
        return stored
    kernel, bias = stored[name].float(), stored["patch_embed.proj.bias"].float()
    size, old_size = wanted[name].shape[2:], kernel.shape[2:]
    pixels = torch.eye(size.numel()).view(-1, 1, *size)  # each pixel of a patch by itself
    enlarged = F.interpolate(pixels, old_size, mode="bicubic").flatten(1)
    side = round((wanted["pos_embed"].shape[1] - 1) ** 0.5)
    return stored | {
        name: (2 * kernel.flatten(2) @ enlarged.T).view(*kernel.shape[:2], *size),
        "patch_embed.proj.bias": bias - kernel.sum((1, 2, 3)),  # it was trained on 2 x - 1
        "pos_embed": resample_abs_pos_embed(stored["pos_embed"].float(), [side, side]),
    }


def doubled(name: str, given: Tensor, fresh: Tensor) -> Tensor:
    """A tensor for a ViT of twice the width: two copies side by side, coupled by fresh weights.

    Queries, keys and values are doubled each by itself; the head takes the mean of both copies.
    """
    if any(new not in (old, 2 * old) for old, new in zip(given.shape, fresh.shape)):
        return given
    if name == "head.weight":
        return torch.cat([given, given], 1) / 2
    if ".qkv." in name:
        return torch.cat([doubled("", *part) for part in zip(given.chunk(3), fresh.chunk(3))])
    result = fresh.clone()
    for half in range(2):
        place = result
        for axis, size in enumerate(given.shape):
            if place.shape[axis] != size:
                place = place.narrow(axis, half * size, size)
        place.copy_(given)
    return result
