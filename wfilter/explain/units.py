"""The units of a class: most closed gates, shared ones, how many, where, in which heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import reduce
from torch import Tensor, nn

from wfilter.core.gates import slices
from wfilter.core.model import FilteredModel
from wfilter.core.targets import Target
from wfilter.explain.similarity import class_order, similarity
from wfilter.metrics.layers import (
    CLOSED,
    all_gates,
    find_layer,
    live_layers,
    ranking,
    refuse_open_gates,
    row_of,
)


@dataclass(frozen=True)
class Unit:
    """One unit of a target and its gate under the class asked about."""

    layer: str
    index: int
    gate: float


def default_layers(wf: FilteredModel) -> tuple[str, ...]:
    """The first, the intermediate and the last live target, as the paper draws them.

    Only weights, if there are any; all targets where none is live yet.

    Example:
        >>> import wfilter
        >>> model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
        >>> default_layers(wfilter.apply_weight_filtering(model, targets="*"))
        ('0.weight', '2.weight', '4.weight')
    """
    names = live_layers(wf) or tuple(target.name for target in wf.targets)
    names = tuple(name for name in names if name.endswith("weight")) or names
    return tuple(dict.fromkeys((names[0], names[(len(names) - 1) // 2], names[-1])))


def top_units(
    wf: FilteredModel, forget: int | str, layer: str | None = None, k: int = 10
) -> list[Unit]:
    """The units whose gates a class closes most, the most closed first.

    Equal alphas are ordered by how open the other classes leave the unit, then by position.

    Args:
        wf: The filtered model.
        forget: The class, by index or name.
        layer: A target by name (``.weight`` may be left out); by default all of them together.
        k: How many units.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="weight")
        >>> wf.alpha["weight"].data[2, 1] = -1000.0
        >>> top_units(wf, 2, k=1)
        [Unit(layer='weight', index=1, gate=0.0)]
    """
    if k < 1:
        raise ValueError(f"k={k} is not a number of units: pass 1 or more.")
    refuse_open_gates(wf)
    row = row_of(wf, forget)
    spans = slices(wf.targets)
    span = slice(0, wf.alphas.shape[1]) if layer is None else spans[find_layer(wf, layer)]
    gates, names = all_gates(wf)[row], list(spans)
    starts = torch.tensor([spans[name].start for name in names])
    units = []
    for position in (ranking(wf, row, span)[:k] + span.start).tolist():
        owner = int((starts <= position).sum()) - 1
        units.append(Unit(names[owner], position - int(starts[owner]), float(gates[position])))
    return units


@dataclass(frozen=True)
class Graph:
    """Classes and the units they share in one layer.

    Attributes:
        layer: The target's name.
        classes: Rows, in the order to draw them: classes that share units lie together.
        units: Units, in the order to draw them.
        edges: Pairs (class, unit): the class has the unit among its most closed ones.
    """

    layer: str
    classes: tuple[int, ...]
    units: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]


def shared_units(
    wf: FilteredModel,
    layer: str,
    k: int = 10,
    at_least: int = 2,
    classes: Sequence[int] | None = None,
) -> dict[int, tuple[int, ...]]:
    """Unit -> the classes with it among their ``k`` most closed gates, if ``at_least`` so many.

    As in the paper: top 10 for each class, and units that appear in two classes or more. A gate
    that is not closed never counts, so a class may bring fewer than ``k``. ``classes`` restricts
    the count to some rows.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="weight")
        >>> wf.alpha["weight"].data[:2, 1] = -1.0
        >>> shared_units(wf, "weight")
        {1: (0, 1)}
    """
    owners: dict[int, list[int]] = {}
    for row in range(wf.num_classes) if classes is None else classes:
        for unit in top_units(wf, row, layer, k):
            if unit.gate < CLOSED:
                owners.setdefault(unit.index, []).append(row)
    return {unit: tuple(rows) for unit, rows in sorted(owners.items()) if len(rows) >= at_least}


def class_unit_graph(
    wf: FilteredModel,
    layer: str,
    k: int = 10,
    at_least: int = 2,
    max_units: int = 60,
    classes: Sequence[int] | None = None,
) -> Graph:
    """The bipartite graph of `shared_units`, with an order of classes and units to draw it in.

    Units beyond ``max_units`` are left out, those of the fewest classes first.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="weight")
        >>> wf.alpha["weight"].data[:2, 1] = -1.0
        >>> class_unit_graph(wf, "weight").edges
        ((0, 1), (1, 1))
    """
    rows = list(range(wf.num_classes) if classes is None else classes)
    shared = shared_units(wf, layer, k, at_least, rows)
    kept = sorted(shared, key=lambda unit: -len(shared[unit]))[:max_units]
    ordered = [rows[i] for i in class_order(similarity(wf, layer)[rows][:, rows])]
    place = {row: position for position, row in enumerate(ordered)}
    middle = {unit: sum(place[row] for row in shared[unit]) / len(shared[unit]) for unit in kept}
    units = sorted(kept, key=lambda unit: (middle[unit], unit))
    edges = tuple((row, unit) for unit in units for row in shared[unit])
    return Graph(find_layer(wf, layer), tuple(ordered), tuple(units), edges)


def closed_by_layer(wf: FilteredModel) -> dict[str, Tensor]:
    """Target name -> share of its gates that each class closes, ``(num_classes,)``.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 2), targets="weight")
        >>> wf.alpha["weight"].data[0, 1] = -1.0
        >>> closed_by_layer(wf)["weight"]
        tensor([0.5000, 0.0000])
    """
    closed = (all_gates(wf) < CLOSED).float()
    return {name: closed[:, span].mean(1) for name, span in slices(wf.targets).items()}


def closed_by_class(wf: FilteredModel) -> Tensor:
    """How many gates each class closes, int64 ``(num_classes,)``.

    Example:
        >>> import wfilter
        >>> closed_by_class(wfilter.apply_weight_filtering(nn.Linear(4, 2), targets="weight"))
        tensor([0, 0])
    """
    return (all_gates(wf) < CLOSED).sum(1)


def distance_from_exact(wf: FilteredModel) -> Tensor:
    """How far every gate is from 0 or 1, whichever is nearer: ``(num_classes, units)`` in 0..0.5.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 2), targets="weight", init=0.0)
        >>> float(distance_from_exact(wf).max())
        0.5
    """
    gates = all_gates(wf)
    return torch.minimum(gates, 1 - gates)


def head_usage(wf: FilteredModel) -> dict[str, Tensor]:
    """Which attention heads a class uses: mean closedness by part and head.

    Returns:
        Target name -> ``(num_classes, parts, heads)``, mean of 1 - gate over the units of a head.
        Parts are q, k, v for a joint projection and k, v for ``kv``; a separate projection has one
        part, which its name tells.
        Empty where the model has no attention with a known number of heads.

    Example:
        >>> import wfilter
        >>> from wfilter.data import zoo
        >>> wf = wfilter.apply_weight_filtering(zoo.create("vit-digits"))
        >>> head_usage(wf)["blocks.0.attn.qkv.weight"].shape
        torch.Size([10, 3, 4])
    """
    gates, usage = all_gates(wf), {}
    for target in wf.targets:
        heads = _heads(wf.base, target)
        last = target.owners[0][0].rpartition(".")[2]
        joint = "qkv" in target.name or "in_proj" in target.name
        parts = 3 if joint else 2 if last == "kv" else 1
        if heads and target.unit_axis is not None and target.units % (parts * heads) == 0:
            closed = 1 - gates[:, slices(wf.targets)[target.name]]
            by_head = "classes (parts heads width) -> classes parts heads"
            usage[target.name] = reduce(closed, by_head, "mean", parts=parts, heads=heads)
    return usage


def _heads(model: nn.Module, target: Target) -> int | None:
    """The number of heads of the attention module around a target, if it says so."""
    path = target.owners[0][0]
    while path:
        heads = getattr(model.get_submodule(path), "num_heads", None)
        if isinstance(heads, int):
            return heads
        path = path.rpartition(".")[0]
    return None
