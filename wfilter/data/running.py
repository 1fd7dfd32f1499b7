"""Run a model over batches without leaving a trace: mode, random state and gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wfilter.core.outputs import logits_of
from wfilter.core.state import evaluating as evaluating  # higher layers import it from here
from wfilter.data.batches import Batches, labelled_batches

Forward: TypeAlias = Callable[[Tensor], Tensor]
"""Anything that turns images into logits: a module, or a function around one."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's random state starts at ``seed`` inside and is the caller's again afterwards.

    Example:
        >>> with seeded(0):
        ...     first = torch.rand(1)
        >>> with seeded(0):
        ...     bool(torch.rand(1) == first)
        True
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def device_of(model: object) -> torch.device:
    """The device of a module's first parameter or buffer; the CPU for anything else.

    Example:
        >>> device_of(nn.Linear(1, 1))
        device(type='cpu')
    """
    if not isinstance(model, nn.Module):
        return torch.device("cpu")
    tensors: Iterator[Any] = chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def synchronise(tensor: Tensor) -> None:
    """Wait until the device of ``tensor`` has done what it was told.

    Example:
        >>> synchronise(torch.zeros(1))  # a CPU has no queue
    """
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


@torch.no_grad()
def collect_logits(
    forward: Forward, batches: Batches, *, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Logits (samples, classes) and labels (samples,) of all batches, on the CPU.

    Args:
        forward: a module (run in eval mode) or any function from images to logits.
        batches: pairs of images and labels.
        device: where the images go; default: where the module's parameters are.

    Example:
        >>> model = nn.Flatten()
        >>> logits, labels = collect_logits(model, [(torch.eye(3), torch.arange(3))])
        >>> labels
        tensor([0, 1, 2])
    """
    device = device or device_of(forward)
    parts = []
    with evaluating(forward):
        for images, labels in labelled_batches(batches):
            parts.append((logits_of(forward(images.to(device))).cpu(), labels.cpu()))
    return torch.cat([logits for logits, _ in parts]), torch.cat([labels for _, labels in parts])


def select_class(batches: Batches, label: int) -> Tensor:
    """All images of one class, in one tensor.

    Example:
        >>> select_class([(torch.arange(4.0), torch.tensor([0, 1, 1, 0]))], 1)
        tensor([1., 2.])
    """
    chosen = [images[labels == label] for images, labels in labelled_batches(batches)]
    if not sum(map(len, chosen)):
        raise ValueError(f"class {label} has no samples in the data.")
    return torch.cat(chosen)
