"""The mark on a base model that has filters: what ``apply`` changed, so that it can be put back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Mark:
    """What apply changed on the base model, so that remove can put it back."""

    first_target: str
    trainable: tuple[str, ...]
    training: tuple[str, ...]


MARK = "_weight_filtering"


def unmark(base: nn.Module) -> nn.Module:
    """In place: give a base model back its training flags and gradients."""
    mark: Mark = getattr(base, MARK)
    delattr(base, MARK)
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(name in mark.trainable)
    for name, module in base.named_modules():
        module.training = name in mark.training
    return base


def is_marked(base: nn.Module) -> bool:
    """Whether a model has filters attached."""
    return hasattr(base, MARK)
