"""Catch what a classifier's head sees."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wfilter.core import head as heads
from wfilter.core.outputs import Inputs
from wfilter.data.batches import Batches, labelled_batches
from wfilter.data.running import Forward, device_of, evaluating


def find_head(model: nn.Module) -> nn.Module:
    """The layer that makes the logits, found by running the model once; the last of several.

    Example:
        >>> find_head(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
        Linear(in_features=8, out_features=3, bias=True)
    """
    with evaluating(model):
        return heads.find_head(model).modules(model)[-1]


def penultimate_features(
    model: nn.Module,
    images: Tensor,
    *,
    forward: Forward | None = None,
    head: nn.Module | None = None,
) -> Tensor:
    """What the classifier's head sees, (samples, width): its input, caught by a hook.

    Gradients flow through it where the forward has them. The inputs of several heads (distilled
    DeiT) lie side by side.

    Args:
        model: the module that holds the head. Run as it is: call ``model.eval()`` first.
        images: one batch.
        forward: how to run it, if not ``model(images)``: for a filtered model, a function that
            passes the row.
        head: the module whose input counts; default: the one that makes the logits.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> penultimate_features(model, torch.zeros(5, 1, 2, 2)).shape
        torch.Size([5, 8])
    """
    return _caught(model, images, forward, _modules(model, images, head))


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
    modules: list[nn.Module] = []
    with evaluating(model):
        for images, labels in labelled_batches(batches):
            images = images.to(device)
            modules = modules or _modules(model, images, head)
            parts.append((_caught(model, images, forward, modules).cpu(), labels.cpu()))
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _modules(model: nn.Module, images: Tensor, head: nn.Module | None) -> list[nn.Module]:
    if head is not None:
        return [head]
    return heads.find_head(model, Inputs(images[:2], None, {})).modules(model)


def _caught(
    model: nn.Module, images: Tensor, forward: Forward | None, modules: Sequence[nn.Module]
) -> Tensor:
    """What the modules are given in one forward, side by side."""
    seen: dict[nn.Module, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda m, args: seen.update({m: args[0]}))
        for module in modules
    ]
    try:
        (forward or model)(images)
    finally:
        for handle in handles:
            handle.remove()
    for module in modules:
        if module not in seen or len(seen[module]) != len(images):
            raise ValueError(
                f"{type(module).__name__} was not called with a batch of {len(images)} images in "
                "this forward: it is not the head. Pass head=, the module that makes the logits."
            )
    return torch.cat([_flat(seen[module]) for module in modules], 1)


def _flat(features: Tensor) -> Tensor:
    """(samples, width): a convolutional head's input is averaged over its positions."""
    return features.mean((-2, -1)) if features.ndim == 4 else features.flatten(1)
