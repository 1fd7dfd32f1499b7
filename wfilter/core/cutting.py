"""Decide which channels `prune` cuts, and cut them out of tensors and layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from wfilter.core.constants import ConstantMode, WeightUse
from wfilter.core.coupling import Coupling, couple
from wfilter.core.targets import CONVOLUTIONS

_SAME = 1e-12  # as a share of a constant's size


class Refused(ValueError):
    """A cut that is not exact."""


# ---- finding ------------------------------------------------------------------------------------


def layer_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights with channels going in and coming out: convolutions and linear layers."""
    weights = {}
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)) and "weight" in module._parameters:
            weights[f"{path}.weight" if path else "weight"] = module.weight
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: w for name, w in weights.items() if first.get(id(w)) == name}


@dataclass
class Cutting:
    """Which classes of channels go, and all that is needed to take them out."""

    weights: dict[str, Tensor]
    uses: dict[str, list[WeightUse]]
    coupling: Coupling
    gone: set[int] = field(default_factory=set)
    kept: dict[int, str] = field(default_factory=dict)
    carriers: dict[str, int] = field(default_factory=dict)

    # ---- deciding ---------------------------------------------------------------------------

    def decide(self) -> None:
        """In place: the classes to remove, and the constant channels that stay to carry others."""
        self._gather()
        self._keep_one_output()
        for name in self.weights:
            self._choose_carrier(name)

    def _gather(self) -> None:
        """Classes that every reader sees as a constant or ignores; repeated until none is added."""
        label = self.coupling.label
        while True:
            live: dict[int, str] = dict(self.coupling.fixed)
            read: set[int] = set()
            for name, calls in self.coupling.inputs.items():
                ignored = self._ignored(name) if calls else torch.ones(0, dtype=torch.bool)
                for call in calls:
                    labels = label[call]
                    read |= set(labels.tolist())
                    live |= {n: f"{name} reads it with open channels"
                             for n in labels[~ignored].tolist() if n not in live}  # fmt: skip
            gone = read - set(live)
            self.kept = live
            if gone == self.gone:
                return
            self.gone = gone

    def _ignored(self, name: str) -> Tensor:
        """Input channels that are constants, or whose weights to every kept output are zero."""
        weight = self.weights[name]
        rows = ~self._is_gone(self.coupling.outputs[name])
        unread = (weight[rows] == 0).transpose(0, 1).flatten(1).all(1)
        maps = [use.channels() for use in self.uses[name]]
        fixed = [~m.isnan().any(1) for m in maps]
        if not maps or any(m.shape != maps[0].shape for m in maps):
            return unread
        same = [(m == maps[0]).all(1) for m in maps]
        return unread | torch.stack(fixed + same).all(0)

    def _is_gone(self, names: Tensor) -> Tensor:
        gone = torch.tensor(sorted(self.gone), dtype=torch.int64)
        return torch.isin(self.coupling.label[names], gone)

    def _keep_one_output(self) -> None:
        for name, outputs in self.coupling.outputs.items():
            if bool(self._is_gone(outputs).all()):
                self._keep(int(self.coupling.label[outputs[0]]), f"{name} needs one output")

    def _keep(self, label: int, why: str) -> None:
        self.gone.discard(label)
        self.kept.setdefault(label, why)

    def _choose_carrier(self, name: str) -> None:
        """Where borders are padded, one constant stays; others must be multiples of it."""
        for_carrier = self._constants(name)
        if not for_carrier or not self._needs_carrier(name):
            return
        maps = self.uses[name][0].channels()
        carrier = max(for_carrier, key=lambda j: float(maps[j].abs().max()))
        labels = self.coupling.label[self.coupling.inputs[name][0]]
        for j in for_carrier:
            if not _multiple(maps[j], maps[carrier])[1]:
                self._keep(int(labels[j]), f"its constant differs at the borders of {name}")
        self._keep(int(labels[carrier]), f"carries the constants at the borders of {name}")
        self.carriers[name] = carrier

    def _needs_carrier(self, name: str) -> bool:
        use = self.uses[name][0]
        maps = use.channels()[self._constants(name)]
        return use.padded or bool((maps != maps[:, :1]).any())

    def _constants(self, name: str) -> list[int]:
        """Input channels that go and are constants other than zero, read with weights not zero."""
        if not self.uses[name] or not self.coupling.inputs[name]:
            return []
        maps = self.uses[name][0].channels()
        going = self._is_gone(self.coupling.inputs[name][0])
        nonzero = (maps != 0).any(1) & ~maps.isnan().any(1)
        read = (self.weights[name] != 0).transpose(0, 1).flatten(1).any(1)
        return (going & nonzero & read).nonzero().flatten().tolist()

    def blocks(self) -> Iterator[set[int]]:
        """Classes that share tensors, together: each block can be cut without the others."""
        edges = [
            [n for n in set(self.coupling.label[names.flatten()].tolist()) if n in self.gone]
            for names in (
                *self.coupling.outputs.values(),
                *(call for calls in self.coupling.inputs.values() for call in calls),
                *self.coupling.elements.values(),
            )
        ]
        group = {label: {label} for label in self.gone}
        for members in edges:
            joined = set().union(*(group[n] for n in members)) if members else set()
            for n in joined:
                group[n] = joined
        seen: set[int] = set()
        for label in sorted(self.gone):
            if label not in seen:
                seen |= group[label]
                yield group[label]

    # ---- cutting ----------------------------------------------------------------------------

    def cut_all(self, model: nn.Module, blocks: list[set[int]]) -> None:
        """In place: cut all blocks, one after the other."""
        for block in blocks:
            self.cut(model, block)

    def cut(self, model: nn.Module, block: set[int]) -> None:
        """In place: take the channels of a block out of ``model``."""
        chosen = torch.tensor(sorted(block), dtype=torch.int64)
        for name in self.weights:
            rows = ~torch.isin(self.coupling.label[self.coupling.outputs[name]], chosen)
            calls = self.coupling.inputs[name]
            columns = ~torch.isin(self.coupling.label[calls[0]], chosen) if calls else rows[:0]
            if not columns.all():
                self.fold(model, name, ~columns)
            slice_tensor(model, name, {0: rows, 1: columns})
            self._follow_bias(model, name, rows)
        for name, names in self.coupling.elements.items():
            going = torch.isin(self.coupling.label[names], chosen)
            if bool(going.any()):
                slice_tensor(model, name, _whole_slices(name, going))

    def _follow_bias(self, model: nn.Module, name: str, rows: Tensor) -> None:
        """In place: a bias that an earlier block has added loses the rows its weight loses."""
        bias = f"{name.removesuffix('weight')}bias"
        module = model.get_submodule(name.rpartition(".")[0])
        added = module._parameters.get("bias") is not None
        if added and bias not in self.coupling.elements and not rows.all():
            slice_tensor(model, bias, {0: rows})

    def fold(self, model: nn.Module, name: str, going: Tensor) -> None:
        """In place: what removed constants gave goes into the carrier's weights or the bias."""
        constants = [j for j in self._constants_of(name) if going[j]]
        if not constants:
            return
        weight: Tensor = model.get_parameter(name)
        use, carrier = self.uses[name][0], self.carriers.get(name)
        if carrier is not None:
            maps = use.channels()
            for j in constants:
                factor = _multiple(maps[j], maps[carrier])[0]
                weight = weight.index_add(1, torch.tensor([carrier]), factor * weight[:, j : j + 1])
            replace_tensor(model, name, weight)
            return
        constant = torch.zeros_like(use.seen)
        index = torch.tensor(constants)
        constant.index_copy_(
            constant.ndim + use.axis, index, use.seen.index_select(use.axis, index)
        )
        result = use.again(constant, weight).movedim(use.axis, 0).flatten(1)[:, 0]
        _add_to_bias(model, name, result)

    def _constants_of(self, name: str) -> list[int]:
        maps = self.uses[name][0].channels()
        return ((maps != 0).any(1) & ~maps.isnan().any(1)).nonzero().flatten().tolist()


def _multiple(map_: Tensor, of: Tensor) -> tuple[float, bool]:
    """The factor between two constant maps, and whether it holds everywhere."""
    place = int(of.abs().argmax())
    factor = float(map_[place] / of[place])
    scale = max(float(map_.abs().max()), 1e-300)
    return factor, bool(((map_ - factor * of).abs() <= _SAME * scale).all())


def find_cuts(whole: nn.Module, images: Tensor) -> Cutting:
    """What can go from a model, seen on images of this shape."""
    weights = layer_weights(whole)
    mode = ConstantMode({id(weight): name for name, weight in weights.items()})
    with mode, mode.unknown:
        whole(torch.full_like(images[:1], torch.nan))
    coupling = couple(copy.deepcopy(whole), layer_weights, images[:1])
    cutting = Cutting(weights, mode.uses, coupling)
    cutting.decide()
    return cutting


# ---- changing a model ---------------------------------------------------------------------------


class State:
    """A model's tensors and attributes at one moment, to go back to."""

    def __init__(self, model: nn.Module):
        self.kept = [
            (
                module,
                {
                    **vars(module),
                    "_parameters": dict(module._parameters),
                    "_buffers": dict(module._buffers),
                },
            )
            for module in model.modules()
        ]

    def restore(self) -> None:
        """In place: put back the model's tensors and attributes."""
        for module, state in self.kept:
            vars(module).clear()
            vars(module).update(state)


def slice_tensor(model: nn.Module, name: str, masks: dict[int, Tensor]) -> None:
    """In place: keep what the masks say of a tensor, wherever the model holds it."""
    if all(bool(mask.all()) for mask in masks.values()):
        return
    tensor = _tensor(model, name)
    smaller = tensor
    for axis, mask in masks.items():
        if not bool(mask.all()):
            smaller = smaller.index_select(axis, mask.nonzero().flatten().to(tensor.device))
    replace_tensor(model, name, smaller)


def replace_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """In place: another tensor instead of one, under all its names; attributes follow."""
    old = _tensor(model, name)
    new = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
    left: list[nn.Module | None] = [model]
    while left:  # not by model.modules(), whose names cost more than all the rest of a cut
        module = left.pop()
        if module is None:
            continue
        left += module._modules.values()
        for held in (module._parameters, module._buffers):
            for key in [key for key, tensor in held.items() if tensor is old]:
                held[key] = new  # type: ignore[assignment]
                _follow(module)


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    tensor = {**module._buffers, **module._parameters}[key]
    assert isinstance(tensor, Tensor)
    return tensor


def _follow(module: nn.Module) -> None:
    """In place: a layer's own numbers of channels, from the shape of its weight."""
    for key, value in layer_numbers(module).items():
        setattr(module, key, value)


def layer_numbers(module: nn.Module) -> dict[str, int]:
    """The attributes of a layer that tell its channels, as its tensors have them."""
    weight = module._parameters.get("weight")
    if isinstance(module, _NormBase):
        tensor = weight if weight is not None else module.running_mean
        return {} if tensor is None else {"num_features": len(tensor)}
    if weight is None:
        return {}
    if isinstance(module, nn.Linear):
        return {"out_features": weight.shape[0], "in_features": weight.shape[1]}
    if isinstance(module, nn.PReLU):
        return {"num_parameters": len(weight)}
    if not isinstance(module, CONVOLUTIONS):
        return {}
    if module.groups == 1:
        return {"out_channels": weight.shape[0], "in_channels": weight.shape[1], "groups": 1}
    each = module.out_channels // module.groups
    groups = weight.shape[0] // each
    inputs = groups * weight.shape[1]
    return {"out_channels": weight.shape[0], "in_channels": inputs, "groups": groups}


def _whole_slices(name: str, going: Tensor) -> dict[int, Tensor]:
    """The axis along which marked elements are whole slices, with what is kept of it."""
    for axis in range(going.ndim):
        slices = going.movedim(axis, 0).flatten(1) if going.ndim > 1 else going.unsqueeze(1)
        if torch.equal(slices.any(1), slices.all(1)):
            return {axis: ~slices.all(1)}
    raise Refused(f"{name} is not used channel by channel")


def _add_to_bias(model: nn.Module, name: str, value: Tensor) -> None:
    """In place: to the bias of the layer that holds a weight; one is made where there is none."""
    path = name.rpartition(".")[0]
    module = model.get_submodule(path)
    bias = module._parameters.get("bias")
    if bias is not None:
        replace_tensor(model, f"{path}.bias" if path else "bias", bias + value)
    else:
        weight = module.get_parameter("weight")
        module.bias = nn.Parameter(value.clone(), weight.requires_grad)
