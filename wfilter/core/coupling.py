"""Find which channels must be pruned together, by running a model on names instead of numbers.

Every output channel of every weight, and every element of every other parameter, gets a random
number as its name. Operations that move data move names; elementwise operations couple the names
that meet; a weight's call writes down whose name stands at each of its inputs. Channels that were
coupled can only be removed together. An operation that is not understood ties what it touches to
a name that is never removed, and whatever this gets wrong is found by comparing logits later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from wfilter.core.constants import CONVOLVE, weight_call

# fmt: off
_PAIRS = {
    "add", "sub", "mul", "div", "true_divide", "multiply", "maximum", "minimum", "pow", "addcmul",
    "rsub", "subtract", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__",
    "__truediv__", "__iadd__", "__imul__", "__isub__",
}
# The output has the shape of the input, but each entry depends on several channels.
_MIXING = (
    "layer_norm", "group_norm", "instance_norm", "rms_norm", "softmax", "normalize", "einsum",
    "baddbmm", "addmm", "mm", "cumsum", "sort", "norm", "multi_head_attention_forward",
    "local_response_norm", "fft",
)
# fmt: on
_MATMUL = ("matmul", "__matmul__", "bmm")
_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Coupling:
    """What belongs together: every name's class, ``fixed`` classes cannot be removed.

    Attributes:
        label: Name -> class, ``(names,)``.
        outputs: Weight -> the names of its output channels.
        inputs: Weight -> per call, whose name stands at each input channel.
        elements: Other parameter or buffer -> the names of its elements, in its shape.
        fixed: Class -> why it cannot be removed.
    """

    label: Tensor
    outputs: Mapping[str, Tensor]
    inputs: Mapping[str, list[Tensor]]
    elements: Mapping[str, Tensor]
    fixed: Mapping[int, str]


class CouplingMode(TorchFunctionMode):
    """Run a model on names; see the module's docstring. ``names`` is the shape-giving model."""

    def __init__(self, weights: Mapping[str, Tensor], others: Mapping[str, Tensor]):
        super().__init__()
        self.weights = {id(weight): name for name, weight in weights.items()}
        total = sum(len(w) for w in weights.values()) + sum(t.numel() for t in others.values()) + 1
        drawn = torch.rand(total, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        self.values = (drawn + 1).sort().values
        self.never = total - 1
        place = 0
        self.outputs: dict[str, Tensor] = {}
        self.elements: dict[str, Tensor] = {}
        for name, weight in weights.items():
            self.outputs[name] = torch.arange(place, place + len(weight))
            place += len(weight)
        for name, tensor in others.items():
            self.elements[name] = torch.arange(place, place + tensor.numel()).view(tensor.shape)
            tensor.copy_(self.values[self.elements[name]])
            place += tensor.numel()
        self.inputs: dict[str, list[Tensor]] = {name: [] for name in weights}
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.reasons: list[tuple[Tensor, str]] = []

    # ---- names --------------------------------------------------------------------------------

    def names(self, tensor: Tensor) -> Tensor:
        """The names in a tensor, -1 where there is none."""
        flat = tensor.detach().to(torch.float64).contiguous()
        place = torch.searchsorted(self.values, flat - _TOLERANCE).clamp(max=self.never)
        return torch.where((self.values[place] - flat).abs() <= _TOLERANCE, place, -1)

    def has_names(self, tensor: Any) -> bool:
        """Whether a tensor holds at least one name."""
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return False
        return bool((self.names(tensor) >= 0).any())

    def couple(self, a: Tensor, b: Tensor) -> None:
        """Names at the same place of two tensors belong together."""
        shape = torch.broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call]
        a, b = a.expand(shape), b.expand(shape)
        both = (a >= 0) & (b >= 0) & (a != b)
        if not bool(both.any()):
            return
        low, high = torch.minimum(a[both], b[both]), torch.maximum(a[both], b[both])
        codes = torch.unique(low * len(self.values) + high)  # faster than unique pairs
        pairs = torch.stack([codes // len(self.values), codes % len(self.values)])
        beside = pairs[1] == self.never  # the largest name
        self.pairs.append((pairs[0, ~beside], pairs[1, ~beside]))
        self.reasons.append((pairs[0, beside], "it meets features that cannot be cut"))

    def fix(self, tensor: Tensor, why: str) -> None:
        """No name in this tensor may be removed."""
        names = torch.unique(self.names(tensor))
        self.reasons.append((names[(names >= 0) & (names != self.never)], why))

    def unknown(self, shape: Iterable[int], like: Tensor) -> Tensor:
        """A tensor in which everything is fixed."""
        return self.values[self.never].to(like.dtype).expand(tuple(shape)).clone()

    # ---- calls --------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """One call of the model, on names."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "size", "dim", "numel", "stride", "__len__"):
            return func(*args, **kwargs)
        if func in CONVOLVE or func is F.linear:
            return self._weighted(func, *weight_call(args, kwargs))
        if not any(self.has_names(leaf) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if name == "prelu":
            return self._per_channel(args[0], args[1:] or kwargs.values())
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if name in _MATMUL:
            return self._matmul(func, *args)
        if name.rstrip("_") in _PAIRS or name in _PAIRS:
            return self._pairwise(func, name, args, kwargs)
        if any(part in name for part in _MIXING):
            return self._refuse(func, name, args, kwargs)
        return self._moved(func, name, args, kwargs)

    def _weighted(
        self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rest: dict[str, Any]
    ) -> Tensor:
        linear = func is F.linear
        output: Tensor = func(x, weight, bias, **rest)
        name, groups = self.weights.get(id(weight)), rest.get("groups", 1)
        if name is None:
            self.fix(x, f"{func.__name__} with a computed weight")
            return self.unknown(output.shape, x)
        axis = -1 if linear else -(weight.ndim - 1)
        entering = self._one_name_each(x, axis, name)
        made = self.outputs[name]
        if groups > 1 and weight.shape[1] == 1:
            self.couple(entering.repeat_interleave(len(made) // len(entering)), made)
        elif groups > 1:
            why = f"{name} has {groups} groups, which must stay of one size"
            for names in (self.values[entering], self.values[made]):
                self.fix(names, why)
        else:
            self.inputs[name].append(entering)
        if bias is not None:
            self.couple(self.names(bias), made)
        shape = [1] * output.ndim
        shape[axis] = len(made)
        return self.values[made].to(x.dtype).view(shape).expand(output.shape).clone()

    def _one_name_each(self, x: Tensor, axis: int, reader: str) -> Tensor:
        """The one name at each channel; channels with several, or none, are fixed."""
        names = self.names(x).movedim(axis, 0).flatten(1)
        highest = names.max(1).values
        lowest = torch.where(names < 0, highest.unsqueeze(1), names).min(1).values
        unclear = (lowest != highest) | (highest < 0)
        if bool(unclear.any()):
            inside = names[unclear]
            self.fix(self.values[inside[inside >= 0]], f"mixed with others before {reader}")
        return torch.where(unclear, self.never, highest)

    def _batch_norm(
        self,
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        return self._per_channel(x, (mean, var, weight, bias))

    def _per_channel(self, x: Tensor, parameters: Iterable[Tensor | None]) -> Tensor:
        """Each channel with its entry of some parameters; of one number for all, none."""
        names = self.names(x[:1])
        for tensor in parameters:
            if tensor is not None and tensor.numel() > 1:
                self.couple(names, self.names(tensor).view(-1, *[1] * (x.ndim - 2)))
        return x

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        self.fix(query, "a query of attention")
        self.fix(key, "a key of attention")
        return self._weighted_sum(value, (*query.shape[:-1], value.shape[-1]))

    def _matmul(self, func: Any, a: Tensor, b: Tensor) -> Tensor:
        """Attention weights times values keep the values' channels; other products fix names."""
        self.fix(a, "a factor of a matrix product")
        shape = func(a.double(), b.double()).shape  # names stay in float64 where a model casts
        if b.ndim < 2 or not self._all_fixed(a):
            self.fix(b, "a factor of a matrix product")
            return self.unknown(shape, a)
        return self._weighted_sum(b, shape)

    def _all_fixed(self, tensor: Tensor) -> bool:
        return bool((self.names(tensor) == self.never).all())

    def _weighted_sum(self, value: Tensor, shape: Iterable[int]) -> Tensor:
        shape, first = tuple(shape), value[..., :1, :]
        if value.shape[:-2] == shape[:-2] and bool((value == first).all()):
            return first.expand(shape).clone()
        self.fix(value, "a factor of a matrix product")
        return self.unknown(shape, value)

    def _pairwise(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
        joined = torch.full(shape, -1)
        for tensor in tensors:
            if tensor.numel() == 1:
                continue  # one number for all channels ties none of them to another
            names = self.names(tensor)
            self.couple(joined, names)
            joined = torch.where(joined < 0, names, joined)
        result = torch.where(joined < 0, 0.0, self.values[joined]).to(tensors[0].dtype)
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        return args[0].copy_(result) if in_place else result

    def _moved(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Whatever moves, repeats or pools names; elementwise functions leave them as they are."""
        named = [leaf for leaf in tree_leaves((args, kwargs)) if self.has_names(leaf)]
        if name in ("__setitem__", "copy_"):
            return func(*args, **kwargs)
        kept = [leaf.clone() for leaf in named]
        result = func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        floats = [leaf for leaf in leaves if leaf.is_floating_point()]
        if all(bool(((self.names(leaf) >= 0) | (leaf == 0)).all()) for leaf in floats):
            return result
        for before, now in zip(kept, named):  # what an operation in place has overwritten
            now.copy_(before)
        if len(named) == 1 and isinstance(result, Tensor) and result.shape == named[0].shape:
            return named[0]
        return self._refuse(func, name, args, kwargs, result)

    def _refuse(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any, result: Any = None
    ) -> Any:
        result = func(*args, **kwargs) if result is None else result
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.fix(leaf, f"read by {name}")
        return tree_map(
            lambda t: (
                self.unknown(t.shape, t) if isinstance(t, Tensor) and t.is_floating_point() else t
            ),
            result,
        )

    def result(self) -> Coupling:
        """All that was seen, as classes of names."""
        label = _components(len(self.values), self.pairs)
        fixed = {self.never: "a part of the model that cannot be cut"}
        for names, why in self.reasons:
            fixed |= {number: why for number in label[names].tolist() if number not in fixed}
        return Coupling(label, self.outputs, self.inputs, self.elements, fixed)


def _components(total: int, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The smallest member of each name's class."""
    label = torch.arange(total)
    if not pairs:
        return label
    a, b = torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs])
    while True:
        low = torch.minimum(label[a], label[b])
        new = label.scatter_reduce(0, a, low, "amin").scatter_reduce(0, b, low, "amin")
        new = new[new]
        if torch.equal(new, label):
            return label
        label = new


@torch.no_grad()
def couple(
    model: nn.Module,
    weights: Callable[[nn.Module], dict[str, Tensor]],
    example: Tensor,
) -> Coupling:
    """What belongs together in ``model``, which is overwritten with names and of no use after."""
    chosen = weights(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    others = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in chosen and tensor.is_floating_point()
    }
    mode = CouplingMode(chosen, others)
    x = mode.unknown(example.shape, example)
    with mode:
        output = model(x)
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            mode.fix(leaf, "an output of the model")
    return mode.result()
