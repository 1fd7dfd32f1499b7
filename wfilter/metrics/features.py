"""What a classifier's head sees: its input, caught on the way."""

from typing import Any

import torch
from torch import Tensor, nn

from wfilter.data.batches import labelled_batches
from wfilter.data.running import Batches, Forward, device_of, evaluating


def find_head(model: nn.Module) -> nn.Module:
    """The layer that makes the logits: timm's classifier, or the last ``nn.Linear`` registered.

    A model without linear layers gives its last convolution (SqueezeNet).

    Example:
        >>> find_head(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
        Linear(in_features=8, out_features=3, bias=True)
    """
    get_classifier = getattr(model, "get_classifier", None)
    classifier = get_classifier() if callable(get_classifier) else model
    root = classifier if isinstance(classifier, nn.Module) else model
    for kind in (nn.Linear, nn.Conv2d):
        found = [module for module in root.modules() if isinstance(module, kind)]
        if found:
            return found[-1]
    raise ValueError(
        f"{type(model).__name__} has neither a linear nor a convolutional layer. "
        "Pass head=, the module that makes the logits."
    )


def penultimate_features(
    model: nn.Module,
    images: Tensor,
    *,
    forward: Forward | None = None,
    head: nn.Module | None = None,
) -> Tensor:
    """What the classifier's head sees, (samples, width): its input, caught by a hook.

    Gradients flow through it where the forward has them.
    A model with several heads (distilled DeiT) gives timm's ``forward_head(pre_logits=True)``.

    Args:
        model: the module that holds the head. Run as it is: call ``model.eval()`` first.
        images: one batch.
        forward: how to run it, if not ``model(images)``: for a filtered model, a function that
            passes the row.
        head: the module whose input counts; default `find_head`.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> penultimate_features(model, torch.zeros(5, 1, 2, 2)).shape
        torch.Size([5, 8])
    """
    timm_model: Any = model
    if forward is None and head is None and _many_heads(model):
        return _flat(timm_model.forward_head(timm_model.forward_features(images), pre_logits=True))
    seen: list[Tensor] = []
    module = head or find_head(model)
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        (forward or model)(images)
    finally:
        handle.remove()
    if not seen or len(seen[-1]) != len(images):
        raise ValueError(
            f"{type(module).__name__} was called {len(seen)} times, last with a batch of "
            f"{len(seen[-1]) if seen else 0} for {len(images)} images: it is not the head. "
            "Pass head=, the module that makes the logits."
        )
    return _flat(seen[-1])


@torch.no_grad()
def collect_features(
    model: nn.Module,
    batches: Batches,
    *,
    forward: Forward | None = None,
    head: nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    """Penultimate features (samples, width) and labels of all batches in eval mode, on the CPU.

    Arguments as in `penultimate_features`.

    Example:
        >>> features, labels = collect_features(
        ...     nn.Linear(4, 3), [(torch.ones(2, 4), torch.tensor([0, 1]))]
        ... )
        >>> features.shape
        torch.Size([2, 4])
    """
    device, parts = device_of(model), []
    with evaluating(model):
        for images, labels in labelled_batches(batches):
            found = penultimate_features(model, images.to(device), forward=forward, head=head)
            parts.append((found.cpu(), labels.cpu()))
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _many_heads(model: nn.Module) -> bool:
    get_classifier = getattr(model, "get_classifier", None)
    several = callable(get_classifier) and not isinstance(get_classifier(), nn.Module)
    return several and hasattr(model, "forward_features") and hasattr(model, "forward_head")


def _flat(features: Tensor) -> Tensor:
    """(samples, width): a convolutional head's input is averaged over its positions."""
    return features.mean((-2, -1)) if features.ndim == 4 else features.flatten(1)
