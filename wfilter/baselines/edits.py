"""Put a layer between a model's features and its head, as closed-form rivals do."""

import copy

from torch import nn

from wfilter.baselines.batches import Task
from wfilter.core.mask import Mask
from wfilter.metrics.features import find_head


def edited(model: nn.Module, task: Task, edit: nn.Module, *, mask: bool) -> nn.Module:
    """A copy in eval mode whose head sees what ``edit`` makes of the features.

    Args:
        model: left untouched; its head must be a linear layer.
        task: says which classes are forgotten.
        edit: a module from features (samples, width) to features.
        mask: whether the forgotten classes' logits become minus infinity.

    Example:
        >>> import torch
        >>> model, batch = nn.Linear(2, 3), (torch.zeros(3, 2), torch.arange(3))
        >>> edited(model, Task.of(model, 1, [batch]), nn.ReLU(), mask=False)
        Sequential(
          (0): ReLU()
          (1): Linear(in_features=2, out_features=3, bias=True)
        )
    """
    changed = copy.deepcopy(model)
    head = linear_head(changed, task)
    parts = [edit.to(head.weight), head]
    if mask:
        parts.append(Mask(task.classes).to(task.device))
    return _replaced(changed, head, nn.Sequential(*parts)).eval()


def linear_head(model: nn.Module, task: Task) -> nn.Linear:
    """The layer that makes the logits; refused unless it is linear.

    Example:
        >>> import torch
        >>> model, batch = nn.Linear(2, 3), (torch.zeros(3, 2), torch.arange(3))
        >>> linear_head(model, Task.of(model, 1, [batch])) is model
        True
    """
    head = find_head(model)
    if not isinstance(head, nn.Linear) or head.out_features != task.num_classes:
        raise ValueError(
            f"the head found is {head}; a change of the features before it needs a linear layer "
            f"with {task.num_classes} outputs."
        )
    return head


def _replaced(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """In place: ``new`` where ``old`` was, at every place."""
    if model is old:
        return new
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)
    return model
