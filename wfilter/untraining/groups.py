"""One gate for all layers that make the same channel, so that closed channels can be pruned.

Where layers add to one stream, as the blocks of a residual network do, a channel can only be taken
out when all of them have closed it. Tied gates move by the sum of their gradients: as one gate
would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wfilter.core.bake import plain_copy
from wfilter.core.coupling import Coupling, couple
from wfilter.core.cutting import layer_weights
from wfilter.core.gates import slices
from wfilter.core.messages import first_line
from wfilter.core.model import FilteredModel


def find_groups(wf: FilteredModel, images: Tensor) -> Tensor:
    """The group of each unit, ``(total_units,)``; a unit with a number of its own is in none.

    Units are tied where a channel could be pruned if all of them were closed: gates that are pinned
    open, and channels that cannot be cut, tie nothing.

    Example:
        >>> import wfilter
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 3))
        >>> wf = wfilter.apply_weight_filtering(model, targets="0.weight")
        >>> find_groups(wf, torch.zeros(1, 4))
        tensor([0, 1])
    """
    try:
        plain = plain_copy(wf.base).cpu().double().eval()
        coupling = couple(plain, layer_weights, images[:1].cpu().double())
    except Exception as error:
        reason = first_line(error)
        raise ValueError(
            f"groups=True: the model could not be followed ({reason}). Use groups=False."
        ) from error
    places = {
        name: part
        for name, part in slices(wf.targets).items()
        if name in coupling.outputs and name not in wf.pinned
    }
    return _numbers(coupling, places, wf.alphas.shape[1])


def _numbers(coupling: Coupling, places: dict[str, slice], total: int) -> Tensor:
    numbers = torch.arange(total)
    never = set(coupling.fixed)
    for name, names in coupling.outputs.items():
        if name not in places:
            never |= set(coupling.label[names].tolist())
    first: dict[int, int] = {}
    for name, part in places.items():
        labels = coupling.label[coupling.outputs[name]]
        if len(labels) != part.stop - part.start:
            raise ValueError(
                f"groups=True needs one gate per output channel, and {name} has others. "
                "Use granularity='out', or groups=False."
            )
        for unit, label in zip(range(part.start, part.stop), labels.tolist()):
            if label not in never:
                numbers[unit] = first.setdefault(label, unit)
    return numbers


@torch.no_grad()
def level(alphas: Tensor, groups: Tensor) -> None:
    """In place: the mean over each group, so that tied gates start from one place."""
    groups = groups.to(alphas.device)
    count = torch.zeros_like(alphas[0]).index_add_(0, groups, torch.ones_like(alphas[0]))
    total = torch.zeros_like(alphas).index_add_(1, groups, alphas)
    alphas.copy_((total / count.clamp(min=1))[:, groups])


def tie(alphas: Tensor, groups: Tensor) -> None:
    """In place: each unit's gradient becomes the sum over its group.

    Example:
        >>> alphas = torch.zeros(1, 3, requires_grad=True)
        >>> alphas.grad = torch.tensor([[1.0, 2.0, 3.0]])
        >>> tie(alphas, torch.tensor([0, 1, 0]))
        >>> alphas.grad
        tensor([[4., 2., 4.]])
    """
    assert alphas.grad is not None
    groups = groups.to(alphas.device)
    alphas.grad = torch.zeros_like(alphas).index_add_(1, groups, alphas.grad)[:, groups]
