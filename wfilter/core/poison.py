"""Make sure that nothing that stays reads what is to be cut.

Coupling knows which layers read a channel. Code may read it, too: a maximum over all channels, a
comparison. On random images that need not show, since the channel may be the largest on red ones
only. So all that is to go becomes NaN in a copy of the model. Layers that lose these inputs are
given zeros there. If the logits of an image still are NaN, something else has read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from wfilter.core.constants import CONVOLVE, UnknownMode, weight_call
from wfilter.core.cutting import Cutting, Refused, layer_weights
from wfilter.core.heads import Heads


@dataclass(frozen=True)
class Going:
    """What a cut takes out.

    Attributes:
        marks: Tensor -> which of its rows or elements go.
        inputs: Weight -> for each of its calls, which input channels it loses.
    """

    marks: Mapping[str, Tensor]
    inputs: Mapping[str, list[Tensor]]


def going_with(cutting: Cutting, blocks: Iterable[set[int]]) -> Going:
    """What goes with these blocks."""
    coupling = cutting.coupling
    chosen = torch.tensor(sorted(set().union(*blocks)), dtype=torch.int64)

    def marked(names: Tensor) -> Tensor:
        return torch.isin(coupling.label[names], chosen)

    tensors = {**coupling.outputs, **coupling.elements}
    return Going(
        {name: marked(names) for name, names in tensors.items()},
        {name: [marked(call) for call in calls] for name, calls in coupling.inputs.items()},
    )


def going_with_heads(whole: nn.Module, heads: Heads) -> Going:
    """What goes with closed heads: their queries, keys and values."""
    inner = whole.get_parameter(f"{heads.path}.proj.weight").shape[1]
    closed = ~heads.rows(inner)
    named = whole.get_submodule(f"{heads.path}.qkv").named_parameters()
    names = [f"{heads.path}.qkv.{name}" for name, tensor in named if len(tensor) == 3 * inner]
    return Going(dict.fromkeys(names, closed.repeat(3)), {f"{heads.path}.proj.weight": [closed]})


class HiddenMode(TorchFunctionMode):
    """Give each layer zeros instead of the inputs that it is to lose."""

    def __init__(self, model: nn.Module, going: Going):
        super().__init__()
        self.names = {id(weight): name for name, weight in layer_weights(model).items()}
        self.lost = {name: iter(calls) for name, calls in going.inputs.items()}
        self.unknown = UnknownMode()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls of layers with zeros, all others as they are."""
        kwargs = kwargs or {}
        if func not in CONVOLVE and func is not F.linear:
            return func(*args, **kwargs)
        x, weight, bias, rest = weight_call(args, kwargs)
        lost = next(self.lost.get(self.names.get(id(weight), ""), iter(())), None)
        if lost is not None:
            with self.unknown.paused():
                axes = 1 if func is F.linear else weight.ndim - 1
                x = x.masked_fill(lost.view(-1, *[1] * (axes - 1)).to(x.device), 0.0)
        return func(x, weight, bias, **rest)


def refuse_readers(model: nn.Module, going: Going, image: Tensor) -> None:
    """An error if the logits depend on what goes other than through the layers that lose it."""
    mode = HiddenMode(model, going)
    with _poisoned(model, going), mode, mode.unknown:
        leaves = tree_leaves(model(image))
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if any(bool(output.isnan().any()) for output in outputs):
        raise Refused("code other than its layers reads it")


@contextmanager
def _poisoned(model: nn.Module, going: Going) -> Iterator[None]:
    """NaN in all that goes; afterwards the model is as it was."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    marks = {name: mark.to(tensors[name].device) for name, mark in going.marks.items()}
    before = {name: tensors[name][mark] for name, mark in marks.items()}
    for name, mark in marks.items():
        tensors[name][mark] = torch.nan
    try:
        yield
    finally:
        for name, mark in marks.items():
            tensors[name][mark] = before[name]
