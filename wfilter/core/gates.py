"""Gates for all targets at once, of a class, a label for each sample (-1: all open) or sets.

All alphas live in one tensor ``(num_classes, total_units)``, the targets side by side, so the gates
of a mixed batch are one gather (or one matrix product for sets) and one sigmoid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from wfilter.core.targets import Target

# Far enough that the sigmoid is exactly 0 or 1 in every dtype, and finite so that 0 * alpha is 0.
HARD = 1000.0

# Gets the alphas that gates are made of, as they were gathered; raises where they are bad.
Look = Callable[[Tensor], None]


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


def new_alphas(targets: Sequence[Target], num_classes: int, init: float, like: Tensor) -> Tensor:
    """Alphas ``(num_classes, total_units)``, all ``init``, where the parameter ``like`` is.

    Example:
        >>> from wfilter.core.targets import select_targets
        >>> layer = torch.nn.Linear(4, 3)
        >>> new_alphas(select_targets(layer, "*"), 2, 3.0, layer.weight).shape
        torch.Size([2, 6])
    """
    units = sum(target.units for target in targets)
    # At least float32: a bfloat16 alpha of 3 does not move by a step of 0.005.
    dtype = torch.promote_types(like.dtype, torch.float32)
    with torch.inference_mode(False):  # they are to be trained, wherever they are made
        return torch.full((num_classes, units), float(init), device=like.device, dtype=dtype)


def label_gates(
    alphas: Tensor,
    labels: Tensor,
    *,
    hard: bool = False,
    sparse: bool = False,
    look: Look | None = None,
) -> Tensor:
    """Gates ``(batch, total_units)`` for one class per sample; for label -1 all are exactly 1.

    Args:
        alphas: ``(num_classes, total_units)``.
        labels: int64 ``(batch,)``.
        hard: Round gates to exactly 0 or 1; gradients are those of the sigmoid.
        sparse: Let the gradient of ``alphas`` hold only the rows in ``labels``.
        look: Called with the alphas of each sample.

    Example:
        >>> label_gates(torch.zeros(2, 3), torch.tensor([1, -1]))
        tensor([[0.5000, 0.5000, 0.5000],
                [1.0000, 1.0000, 1.0000]])
    """
    if readable(labels) and labels.numel() and ends(labels)[0] >= 0:
        rows = _gathered(alphas, labels, sparse)
        if look is not None:
            look(rows)
        return _straight_through(torch.sigmoid(rows), rows > 0) if hard else torch.sigmoid(rows)
    nothing = labels == -1
    index = labels + nothing  # row 0 stands in for -1: its values are replaced below
    if torch.compiler.is_compiling():
        # Runtimes of exported graphs count other negative indices from the end instead of refusing.
        index = torch.where(index < 0, len(alphas), index)
    rows = _gathered(alphas, index, sparse)
    # In place (nobody else holds the rows), so that a device has two kernels less to launch.
    rows.masked_fill_(nothing.unsqueeze(-1), HARD)
    if look is not None:
        look(rows)
    gates = torch.sigmoid(rows)
    if hard:
        gates = _straight_through(gates, rows > 0)
    return made_once(gates)


def set_gates(
    alphas: Tensor, sets: Tensor, *, hard: bool = False, look: Look | None = None
) -> Tensor:
    """Gates ``(batch, total_units)`` for a set of classes per sample: the product over the set.

    With ``hard``, a gate is 0 as soon as one class of the set closes it. ``look`` gets the alphas.

    Example:
        >>> set_gates(torch.zeros(2, 3), torch.tensor([[True, True], [False, False]]))
        tensor([[0.2500, 0.2500, 0.2500],
                [1.0000, 1.0000, 1.0000]])
    """
    if look is not None:
        look(alphas)
    chosen = sets.to(alphas.dtype)
    # In float16 a closed gate's logarithm would be -inf, and 0 * -inf is NaN.
    with full_precision(alphas):
        gates = torch.exp(chosen @ F.logsigmoid(alphas))
        if hard:
            gates = _straight_through(gates, chosen @ (alphas <= 0).to(alphas.dtype) == 0)
    return made_once(gates)


def row_gates(
    alphas: Tensor, rows: Sequence[int], *, hard: bool = False, look: Look | None = None
) -> Tensor:
    """Gates ``(total_units,)`` of one class or set, without a look at the other rows.

    The rows are known to Python, so that no device is waited for; ``look`` gets their alphas.

    Example:
        >>> row_gates(torch.zeros(5, 3), [1]), row_gates(torch.zeros(5, 3), [1, 4])
        (tensor([0.5000, 0.5000, 0.5000]), tensor([0.2500, 0.2500, 0.2500]))
    """
    if len(rows) == 1:
        chosen = alphas[rows[0]]
        gates = torch.sigmoid(chosen)
    else:
        index = torch.tensor(rows, dtype=torch.int64).to(alphas.device, non_blocking=True)
        chosen = alphas.index_select(0, index)
        gates = F.logsigmoid(chosen).sum(0).exp()
    if look is not None:
        look(chosen)
    if not hard:
        return gates
    is_open = chosen > 0
    return _straight_through(gates, is_open if is_open.ndim == 1 else is_open.all(0))


def set_vector(rows: Sequence[int], num_classes: int, device: torch.device) -> Tensor:
    """The bool vector ``(num_classes,)`` of a set, made on the CPU and sent without a wait."""
    chosen = torch.zeros(num_classes, dtype=torch.bool)
    chosen[list(rows)] = True
    return chosen.to(device, non_blocking=True)


def _gathered(alphas: Tensor, labels: Tensor, sparse: bool) -> Tensor:
    """What ``F.embedding`` gives, without its checks."""
    return torch.embedding(alphas, labels, -1, False, sparse)


def full_precision(like: Tensor) -> AbstractContextManager[object]:
    """Inside, no autocast on the device of ``like``."""
    kind = like.device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def made_once(values: Tensor) -> Tensor:
    """The same values; in a graph that needs no gradient, written to memory before their uses.

    Inductor would otherwise compute them again in every kernel that reads a part of them. It has to
    give ``as_strided`` a buffer.
    """
    exported = torch.compiler.is_exporting()
    graph = not exported if torch.compiler.is_dynamo_compiling() else exported and _PACKAGING.get()
    if not graph or values.requires_grad:
        return values
    return values.as_strided(values.shape, values.stride())


# Set while a graph is traced that inductor is to compile; others, as ONNX, do without as_strided.
_PACKAGING: ContextVar[bool] = ContextVar("wfilter_packaging", default=False)


@contextmanager
def packaging() -> Iterator[None]:
    """Inside, exported graphs are for AOTInductor: ``made_once`` holds in them, too."""
    token = _PACKAGING.set(True)
    try:
        yield
    finally:
        _PACKAGING.reset(token)


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


def ends(labels: Tensor) -> tuple[int, int]:
    """The least and the largest of some readable labels; of a few, without a kernel.

    Example:
        >>> ends(torch.tensor([3, -1, 2]))
        (-1, 3)
    """
    if labels.numel() <= 32 and type(labels) is Tensor and not is_wrapped(labels):
        values = labels.tolist()
        return min(values), max(values)
    low, high = labels.aminmax()
    return int(low), int(high)


# By torch.func: vmap, grad and the like.
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def readable(values: Tensor) -> bool:
    """Whether Python can look at values for free: on the CPU, not traced, not under vmap."""
    batched = torch._C._functorch.is_batchedtensor(values)
    return values.is_cpu and not batched and not traced(values)
