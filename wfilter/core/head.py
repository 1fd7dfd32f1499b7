"""The head: the linear map that makes the logits, and what it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wfilter.core.guessing import guess_images
from wfilter.core.outputs import Inputs, logits_of
from wfilter.core.state import kept

if TYPE_CHECKING:
    from wfilter.core.rules import InterceptMode

# Edits what the head sees: features and the head itself -> features and logits.
Edit = Callable[[Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, Tensor]]
# Function -> the axis of its input that holds the features; the input is always argument 0.
LINEAR: dict[Callable[..., Any], int] = {
    F.linear: -1,
    torch.conv1d: -2,
    torch.conv2d: -3,
    torch.conv3d: -4,
    torch.matmul: -1,
    Tensor.matmul: -1,
    Tensor.__matmul__: -1,
    torch.mm: -1,
    Tensor.mm: -1,
}


@dataclass(frozen=True)
class Head:
    """Which calls of a forward make the logits: more than one in a distilled DeiT.

    ``weights`` are the names of the parameters they use; a call whose weight is computed from
    parameters has the name ``None`` and is known by its number among the linear calls alone.
    """

    weights: tuple[str | None, ...]
    numbers: tuple[int, ...]
    width: int
    is_plain: bool  # one call of F.linear on (batch, width), whose result is the logits themselves
    samples_first: bool = field(default=True, repr=False)  # each call sees one entry per sample

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """The modules that hold the weights; one that is computed belongs to none."""
        if None in self.weights:
            raise ValueError(
                f"the head of {type(model).__name__} computes its weight (weight norm, a scaled "
                "product): no module holds it. Pass head=, the module that makes the logits."
            )
        return [model.get_submodule(str(name).rpartition(".")[0]) for name in self.weights]


@dataclass
class _Call:
    number: int
    axis: int
    source: Tensor
    weight: Any
    output: Tensor
    is_linear: bool


class _Record(TorchFunctionMode):
    """Run the model unchanged and note its linear calls."""

    def __init__(self, followed: int | None = None) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.followed = followed  # the call whose output wants a gradient

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in LINEAR and isinstance(output, Tensor):
            weight = args[1] if len(args) > 1 else (kwargs or {}).get("weight")
            number = len(self.calls)
            if number == self.followed:
                output = output.detach().requires_grad_()
            self.calls.append(
                _Call(number, LINEAR[func], args[0], weight, output, func is F.linear)
            )
        return output


@torch.no_grad()
def find_head(model: nn.Module, inputs: Inputs | None = None) -> Head:
    """The calls that make the logits of ``model``, found by running it once on ``inputs``.

    Without inputs it is run on images of a shape that it takes.

    They are the call whose output *is* the logits; where something follows it (an average over
    positions, a scale, the mean of two heads), the last calls with one output per class.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> find_head(model, Inputs(torch.ones(2, 4), None, {}))
        Head(weights=('2.weight',), numbers=(1,), width=8, is_plain=True)
    """
    if inputs is None:
        inputs = Inputs(guess_images(model), None, {})
    with kept(model), _Record() as record:
        output = inputs.run(model)
    calls = _heads(record.calls, logits_of(output))
    calls = [call for call in calls if call is calls[-1] or not _feeds(model, inputs, call, calls)]
    if not calls:
        raise ValueError(
            f"{type(model).__name__} has no head that wfilter can see: no linear layer or "
            "convolution gives its logits. Features are what such a layer sees."
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return Head(
        tuple(names.get(id(call.weight)) for call in calls),
        tuple(call.number for call in calls),
        sum(call.source.shape[call.axis] for call in calls),
        _is_plain(calls, logits_of(output), names),
        all(call.source.shape[0] == len(inputs.images) for call in calls),
    )


def _is_plain(calls: list[_Call], logits: Tensor, names: dict[int, str]) -> bool:
    call = calls[0]
    known = len(calls) == 1 and call.is_linear and id(call.weight) in names
    return known and call.source.ndim == 2 and torch.equal(call.output, logits)


def _heads(calls: list[_Call], logits: Tensor) -> list[_Call]:
    """Of all linear calls, those that make the logits."""
    flat = logits.flatten()
    for call in reversed(calls):
        if call.output.numel() == flat.numel() and torch.equal(call.output.flatten(), flat):
            return [call]
    last: list[_Call] = []
    for call in reversed(calls):
        if call.output.shape[call.axis] != logits.shape[-1]:
            break
        last.insert(0, call)
    return last


def _feeds(model: nn.Module, inputs: Inputs, call: _Call, calls: list[_Call]) -> bool:
    """Whether a call with one output per class is a layer before a head, and no head itself."""
    with torch.enable_grad(), kept(model), _Record(call.number) as record:
        inputs.run(model)
    followed = record.calls[call.number].output
    later = {c.number for c in calls if c.number > call.number}
    return any(c.number in later and _depends(c.source, followed) for c in record.calls)


def _depends(made: Tensor, leaf: Tensor) -> bool:
    """Whether one tensor was made of another; parameters may want gradients, too."""
    if not made.requires_grad:
        return False
    ones = torch.ones_like(made)
    gradient = torch.autograd.grad(made, leaf, ones, retain_graph=True, allow_unused=True)
    return gradient[0] is not None


class HeadMode(TorchFunctionMode):
    """Catch what the head sees in ``seen``, ``(batch, ..., width)``, after ``edit`` changed it.

    ``edit`` gets the features and the head as a function of them, and gives features and logits.
    It happens before the head's own gates. The mode that gates is either entered before this one,
    or given as ``gated``: torch then calls Python once for each function instead of twice.
    """

    def __init__(
        self,
        model: nn.Module,
        head: Head,
        edit: Edit | None = None,
        gated: InterceptMode | None = None,
    ):
        super().__init__()
        self.head, self.edit, self.gated = head, edit, gated
        self.ids = {id(model.get_parameter(name)) for name in head.weights if name is not None}
        self.seen: list[Tensor] = []
        self._number = -1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, axis = kwargs or {}, LINEAR.get(func)
        if axis is None and self.gated is not None:  # most calls, kept fast
            return self.gated.__torch_function__(func, types, args, kwargs)
        if axis is None or not self._is_head(args, kwargs):
            return self._run(func, types, args, kwargs)
        features = args[0].movedim(axis, -1)
        if self.edit is None:
            self.seen.append(features)
            return self._run(func, types, args, kwargs)
        features, logits = self.edit(
            features, lambda seen: self._run(func, types, (seen, *args[1:]), kwargs)
        )
        self.seen.append(features)
        return logits

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.gated is None:
            return func(*args, **kwargs)
        return self.gated.__torch_function__(func, types, args, kwargs)

    def _is_head(self, args: Any, kwargs: Any) -> bool:
        self._number += 1
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if id(weight) in self.ids:
            return True
        return None in self.head.weights and self._number in self.head.numbers

    def refuse_unseen(self) -> None:
        """Stop where the head was not met: nothing was caught, and nothing edited."""
        if not self.seen:
            raise RuntimeError(
                "the head was not called in this forward, or not through a function that wfilter "
                "sees. If a part of the model was compiled or replaced since, undo that."
            )

    def features(self, batch: int) -> Tensor:
        """``(batch, width)``: several heads side by side, positions averaged."""
        self.refuse_unseen()
        rows = [seen.shape[0] for seen in self.seen]
        if not self.head.samples_first or any(count != batch for count in rows):
            raise RuntimeError(
                f"the head sees {rows[0]} entries for {batch} samples, as where views or frames of "
                "an image run as a batch, or positions come first: features per sample are not "
                "defined."
            )
        parts = [t.flatten(1, -2).mean(1) if t.ndim > 2 else t for t in self.seen]
        return torch.cat(parts, -1)
