"""From what is to be forgotten to gates, for all targets at once.

All alphas live in one tensor ``(num_classes, total_units)``, the targets side by side, so the gates
of a mixed batch are one gather (or one matrix product for sets) and one sigmoid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from wfilter.core.targets import Target

# Far enough that the sigmoid is exactly 0 or 1 in every dtype, and finite so that 0 * alpha is 0.
HARD = 1000.0


class ByTarget(Mapping[str, Tensor]):
    """Parameter name -> the target's slice of a tensor whose last axis holds all units.

    The slices are views: writing into one writes into the whole.
    """

    def __init__(self, targets: Sequence[Target], whole: Tensor):
        self._whole = whole
        self._slices = slices(targets)

    def __getitem__(self, name: str) -> Tensor:
        return self._whole[..., self._slices[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)

    def __repr__(self) -> str:
        rows = "".join(f"\n  {name}: {tuple(self[name].shape)}" for name in self)
        return f"{type(self).__name__}({rows}\n)"


def slices(targets: Sequence[Target]) -> dict[str, slice]:
    """Where each target's units lie in the joint axis."""
    ends, total = {}, 0
    for target in targets:
        ends[target.name] = slice(total, total + target.units)
        total += target.units
    return ends


def label_gates(
    alphas: Tensor, labels: Tensor, *, hard: bool = False, sparse: bool = False
) -> Tensor:
    """Gates ``(batch, total_units)`` for one class per sample; for label -1 all are exactly 1.

    Args:
        alphas: ``(num_classes, total_units)``.
        labels: int64 ``(batch,)``.
        hard: Round gates to exactly 0 or 1; gradients are those of the sigmoid.
        sparse: Let the gradient of ``alphas`` hold only the rows in ``labels``.

    Example:
        >>> label_gates(torch.zeros(2, 3), torch.tensor([1, -1]))
        tensor([[0.5000, 0.5000, 0.5000],
                [1.0000, 1.0000, 1.0000]])
    """
    nothing = labels == -1
    index = torch.where(nothing, 0, labels)
    # Runtimes of exported graphs count negative indices from the end; none refuses this one less.
    index = torch.where(index < 0, len(alphas), index)
    rows = F.embedding(index, alphas, sparse=sparse)
    gates = torch.sigmoid(rows)
    if hard:
        gates = _straight_through(gates, rows > 0)
    return torch.where(nothing.unsqueeze(-1), 1.0, gates)


def set_gates(alphas: Tensor, sets: Tensor, *, hard: bool = False) -> Tensor:
    """Gates ``(batch, total_units)`` for a set of classes per sample: the product over the set.

    With ``hard``, a gate is 0 as soon as one class of the set closes it.

    Example:
        >>> set_gates(torch.zeros(2, 3), torch.tensor([[True, True], [False, False]]))
        tensor([[0.2500, 0.2500, 0.2500],
                [1.0000, 1.0000, 1.0000]])
    """
    chosen = sets.to(alphas.dtype)
    gates = torch.exp(chosen @ F.logsigmoid(alphas))
    if hard:
        gates = _straight_through(gates, chosen @ (alphas <= 0).to(alphas.dtype) == 0)
    return gates


def _straight_through(gates: Tensor, is_open: Tensor) -> Tensor:
    """Exactly 0 or 1 forward, the soft gate's gradient backward."""
    return is_open.to(gates.dtype) + (gates - gates.detach())


def class_index(name: int | str, num_classes: int, class_names: Sequence[str] | None) -> int:
    """The row of a class given by index or name."""
    if isinstance(name, str):
        if class_names is None:
            raise ValueError(
                f"forget={name!r} is a class name, but these filters know none. Pass an index, or "
                "class_names=[...] to apply_weight_filtering."
            )
        if name not in class_names:
            raise ValueError(f"forget={name!r} is not one of {', '.join(class_names)}.")
        return list(class_names).index(name)
    if not 0 <= name < num_classes:
        raise ValueError(
            f"forget={name} is outside 0..{num_classes - 1}: these filters were made for "
            f"{num_classes} classes."
        )
    return int(name)


def traced(x: Tensor) -> bool:
    """Whether this call is being traced; ``torch.compiler.is_compiling`` is one for all threads."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_exporting() and is_fake(x)


def readable(values: Tensor) -> bool:
    """Whether Python can look at values for free: on the CPU, not traced, not under vmap."""
    batched = torch._C._functorch.is_batchedtensor(values)
    return values.device.type == "cpu" and not batched and not traced(values)
