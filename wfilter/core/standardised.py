"""Convolutions that rescale their weight before use, whoever wrote them.

A gate on such a weight would cancel out, so it acts on what the convolution makes of it. Which
convolutions are of this kind is seen from what they do, not from their names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from wfilter.core.state import kept

_APART = 0.05  # of the largest weight used; given half, a standardised layer uses the same to eps


def is_standardised(module: nn.Module) -> bool:
    """Whether half the weight gives the same convolution: a gate on it would cancel out.

    Example:
        >>> is_standardised(nn.Conv2d(3, 4, 3))
        False
    """
    if not isinstance(module, nn.Conv2d) or type(module).forward is nn.Conv2d.forward:
        return False
    own = module._parameters.get("weight")
    if own is None or own.is_meta:
        return False
    try:
        if _call(module, own)[1] is own:
            return False
        drawn = torch.randn(own.shape, generator=torch.Generator().manual_seed(0)).to(own)
        whole, half = _call(module, drawn), _call(module, drawn / 2)
    except Exception:  # takes other inputs, or convolves in another way
        return False
    change = (whole[1] - half[1]).abs().max()
    return bool(change <= _APART * whole[1].abs().max()) and _is_replaceable(module, whole)


def effective_weight(module: nn.Conv2d) -> Tensor:
    """The weight a standardised convolution convolves with, read off one call of it."""
    return _call(module, module.weight)[1].detach()


def pads_like_timm(module: nn.Module) -> bool:
    """Whether a convolution pads its images itself, as timm's ``Conv2dSame`` does."""
    return any(t.__name__.endswith("Same") for t in type(module).__mro__)


def _is_replaceable(module: nn.Conv2d, call: tuple[Any, ...]) -> bool:
    """Whether a plain convolution with the effective weight does the same."""
    return bool(call[0]) or pads_like_timm(module)


@torch.no_grad()
def _call(module: nn.Conv2d, weight: Tensor) -> tuple[bool, Tensor]:
    """Whether the inner convolution takes the images as given, and the weight it uses."""
    seen: list[tuple[Any, ...]] = []

    class Catch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.conv2d:
                seen.append(args)
            return func(*args, **(kwargs or {}))

    edge = [d * (k - 1) + 1 for d, k in zip(module.dilation, module.kernel_size)]
    images = module.weight.new_zeros(1, module.in_channels, *edge)
    with kept(module), Catch():
        functional_call(module, {"weight": weight}, (images,))
    return seen[-1][0] is images, seen[-1][1]
