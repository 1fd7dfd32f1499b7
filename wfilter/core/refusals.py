"""Calls that a filtered model refuses, with the reason, before it runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wfilter.core.filters import is_marked
from wfilter.core.forget import Rows
from wfilter.core.gates import HARD, Look, readable
from wfilter.core.outputs import Inputs, Key

_is_training = attrgetter("training")

if TYPE_CHECKING:
    from wfilter.core.model import FilteredModel


def check_base(base: nn.Module, parts: Iterable[nn.Module] = ()) -> None:
    """Stop where the base model, of these ``parts``, is not as apply left it."""
    if not is_marked(base):
        raise RuntimeError("the filters of this model were removed. Apply them again.")
    if any(map(_is_training, parts)):
        refuse_training(parts)


def refuse_training(parts: Iterable[nn.Module]) -> None:
    """Stop where any part of the base model is in training mode."""
    for part in parts:
        if part.training:
            raise RuntimeError(
                "the base model was put in training mode, or a part of it "
                f"({type(part).__name__}): there BatchNorm mixes samples and drifts. Call "
                "wf.base.eval(); wf.train() leaves it in eval mode."
            )


def refuse_single_image(known: Key, inputs: Inputs) -> None:
    """Stop at images without a batch axis, where the model took a batch of such images before."""
    size, _ = known
    if tuple(inputs.images.shape) == size:
        raise ValueError(
            f"the images have shape {tuple(inputs.images.shape)}, that of a single one. Pass a "
            "batch: image[None]."
        )


def refuse_no_logits(wf: FilteredModel, what: str) -> None:
    """Stop where the model's output is not ``(batch, num_classes)``, as ``what`` needs it."""
    if wf.known.latest.classes != wf.num_classes:
        raise ValueError(
            f"{what} needs logits of shape (batch, {wf.num_classes}), but those of "
            f"{type(wf.base).__name__} are none such (a segmentation model, or a batch that is not "
            "first). Wrap the model in one that returns them, then apply weight filtering."
        )


def check_values(wf: FilteredModel, wanted: Rows | Tensor) -> None:
    """Stop at alphas that are not finite, and at pinned ones that moved."""
    check_base(wf.base)
    look = look_for_bad(wf)
    if look is None:
        return
    alphas = wf.alphas
    if isinstance(wanted, tuple):
        look(alphas[wanted[0]] if len(wanted) == 1 else alphas[list(wanted)])
    elif wanted.dtype == torch.int64 and readable(wanted):
        look(alphas[wanted])  # -1 looks at the last row, which nobody asked for: no harm
    else:
        look(alphas)


def look_for_bad(wf: FilteredModel) -> Look | None:
    """What stops at alphas that are not finite, or are pinned open and moved.

    ``None`` where a look would wait for a device; pins are then looked at after a change alone.
    """
    if not readable(wf.alphas):
        wf.pins.look_if_changed(wf)
        return None

    def look(alphas: Tensor) -> None:
        if not readable(alphas):  # labels under vmap
            alphas = wf.alphas
        if not math.isfinite(alphas.sum().item()):
            refuse_bad_alphas(wf)
        if wf.pins.indices:
            wf.pins.look(wf, alphas)

    return look


def refuse_bad_alphas(wf: FilteredModel) -> None:
    """Stop where an alpha is NaN or infinite, and say which."""
    bad = [name for name, alpha in wf.alpha.items() if not alpha.isfinite().all()]
    if bad:
        raise ValueError(
            f"the alphas of {bad[0]} contain NaN or infinity ({len(bad)} targets). Load the "
            f"last good checkpoint; for a gate at exactly 0 or 1 use -/+{HARD:.0f}."
        )


def refuse_recomputation(wf: FilteredModel, images: Tensor | None = None) -> None:
    """Gradient checkpointing runs layers again in the backward pass, without the gates."""
    if not torch.is_grad_enabled():
        return
    if not wf.alphas.requires_grad and (images is None or not images.requires_grad):
        return
    for name, module in wf.base.named_modules():
        if getattr(module, "grad_checkpointing", False) is True:
            raise RuntimeError(
                f"gradient checkpointing is on in {name or type(module).__name__}: its "
                "recomputation would run without gates, and gradients would be wrong. "
                "Call model.set_grad_checkpointing(False), or use torch.no_grad()."
            )
