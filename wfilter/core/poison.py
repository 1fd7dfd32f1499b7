"""Make sure that nothing that stays reads what is to be cut.

Coupling knows which layers read a channel. Code may read it, too: a maximum over all channels, a
comparison. On random images that need not show, since the channel may be the largest on red ones
only. So all that is to go becomes NaN in a copy of the model. Layers that lose these inputs are
given zeros there. If the logits of an image still are NaN, something else has read them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from wfilter.core.constants import CONVOLVE, UnknownMode, weight_call
from wfilter.core.cutting import Cutting, Refused, layer_weights


class HiddenMode(TorchFunctionMode):
    """Give each layer zeros instead of the inputs that it is to lose."""

    def __init__(self, model: nn.Module, cutting: Cutting, going: Tensor):
        super().__init__()
        self.names = {id(weight): name for name, weight in layer_weights(model).items()}
        self.lost = {
            name: iter([_is_in(cutting.coupling.label[call], going) for call in calls])
            for name, calls in cutting.coupling.inputs.items()
        }
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


def refuse_readers(
    whole: nn.Module, cutting: Cutting, blocks: Iterable[set[int]], image: Tensor
) -> None:
    """An error if the logits depend on channels of these blocks other than through layers."""
    going = torch.tensor(sorted(set().union(*blocks)), dtype=torch.int64)
    model = copy.deepcopy(whole)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    coupling = cutting.coupling
    for name, names in (*coupling.outputs.items(), *coupling.elements.items()):
        tensors[name][_is_in(coupling.label[names], going).to(image.device)] = torch.nan
    mode = HiddenMode(model, cutting, going)
    with mode, mode.unknown:
        leaves = tree_leaves(model(image))
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if any(bool(output.isnan().any()) for output in outputs):
        raise Refused("code other than its layers reads it")


def _is_in(labels: Tensor, going: Tensor) -> Tensor:
    return torch.isin(labels, going)
