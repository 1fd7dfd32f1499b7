"""Train a model again for a while, as relearning does, and put everything back."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from wfilter.core.folding import ERASED
from wfilter.core.mask import Mask
from wfilter.data.running import Forward, device_of, evaluating


def step(
    model: nn.Module, run: Forward, optimiser: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> None:
    """One step of cross-entropy in the mode the model is in."""
    device = device_of(model)
    loss = nn.functional.cross_entropy(run(images.to(device)), labels.to(device))
    optimiser.zero_grad()
    torch.autograd.backward(loss)
    optimiser.step()


@contextmanager
def borrowed(
    model: nn.Module, parameters: Iterable[nn.Parameter] | None
) -> Iterator[list[nn.Parameter]]:
    """The parameters to train; every tensor, mode and flag of the model is put back afterwards."""
    trained = list(model.parameters() if parameters is None else parameters)
    if not trained:
        raise ValueError("parameters is empty: there is nothing to train.")
    chosen = set(trained)
    everything = {*model.parameters(), *model.buffers(), *chosen}
    values = {tensor: tensor.detach().clone() for tensor in everything}
    flags = {tensor: tensor.requires_grad for tensor in everything}
    with evaluating(model), torch.enable_grad():
        try:
            model.train()
            for tensor in everything:
                if tensor.is_floating_point():
                    tensor.requires_grad_(tensor in chosen)
            yield trained
        finally:
            with torch.no_grad():
                for tensor in everything:
                    tensor.requires_grad_(flags[tensor]).copy_(values[tensor])
            for parameter in trained:
                parameter.grad = None


def unmasked(model: nn.Module) -> nn.Module:
    """A copy without logit masks: whoever trains a model again takes them off first.

    A bias so low that it rules a class out, as folding a feature row leaves it, is such a mask too:
    no step of training would raise it enough, so it is set to the mean of the other biases.

    Example:
        >>> unmasked(nn.Sequential(nn.Linear(2, 2), Mask([0])))[1]
        Identity()
    """
    bare = copy.deepcopy(model)
    for parent in list(bare.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Mask):
                setattr(parent, name, nn.Identity())
            elif isinstance(child, nn.Linear) and child.bias is not None:
                _allow_all(child.bias)
    return bare


@torch.no_grad()
def _allow_all(bias: Tensor) -> None:
    """In place: biases that rule a class out become the mean of the other biases."""
    ruled_out = bias <= ERASED / 2
    if ruled_out.any() and not ruled_out.all():
        bias[ruled_out] = bias[~ruled_out].mean()
