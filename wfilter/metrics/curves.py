"""Insertion and deletion curves: do the gates point at the units that carry the class?

Insertion starts from the row's gates and opens them (sets them to 1), the most closed first;
deletion starts from all gates at 1 and closes them (sets them to 0) in the same order. A step
takes the same share of every target. The curve is the forgotten class's confidence on its own
images relative to the original model's. Always show the curve of a random order beside it.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from wfilter.core.gates import HARD, slices
from wfilter.core.model import FilteredModel
from wfilter.core.outputs import logits_of
from wfilter.data.checks import check_logits
from wfilter.data.running import evaluating
from wfilter.metrics.cells import Column
from wfilter.metrics.layers import (
    find_layer,
    forgets_by_gates,
    live_layers,
    ranking,
    refuse_open_gates,
    row_of,
)
from wfilter.metrics.method import Method
from wfilter.metrics.problem import Problem
from wfilter.metrics.registry import Measured, by_class, metric


@dataclass(frozen=True)
class Curve:
    """Relative confidence at each share of units opened or closed.

    Example:
        >>> Curve((0.0, 0.5, 1.0), (0.0, 1.0, 1.0)).auc
        0.75
    """

    shares: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def auc(self) -> float:
        """Area under the curve by the normalised trapezoid."""
        return normalised_auc(self.values)


def normalised_auc(values: tuple[float, ...] | list[float]) -> float:
    """(sum - first/2 - last/2) / (n - 1): the trapezoid over n equally spaced points.

    Source: Petsiuk et al., RISE, BMVC 2018.

    Example:
        >>> normalised_auc([0.0, 0.5, 1.0])
        0.5
    """
    if len(values) < 2:
        raise ValueError(f"a curve of {len(values)} point(s) has no area; expected 2 or more.")
    if any(value != value for value in values):
        raise ValueError(f"the curve contains NaN: {list(values)}.")
    return (sum(values) - values[0] / 2 - values[-1] / 2) / (len(values) - 1)


def order_by_gate(gates: Tensor) -> Tensor:
    """Positions of the units, the most closed gate first; equal gates keep their order.

    Example:
        >>> order_by_gate(torch.tensor([0.9, 0.1, 0.5]))
        tensor([1, 2, 0])
    """
    if gates.isnan().any():
        raise ValueError("gates contain NaN; the alphas diverged.")
    return gates.flatten().argsort(stable=True)


def random_order(gates: Tensor, seed: int = 0) -> Tensor:
    """The control: positions of the units in a random order.

    Example:
        >>> random_order(torch.zeros(3)).sort().values
        tensor([0, 1, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(gates.numel(), generator=generator).to(gates.device)


def inserted(gates: Tensor, order: Tensor, share: float) -> Tensor:
    """New gates: those of the first ``share`` of the order opened to 1, the rest as given.

    Example:
        >>> inserted(torch.tensor([0.5, 0.0]), torch.tensor([1, 0]), share=0.5)
        tensor([0.5000, 1.0000])
    """
    return _set_first(gates, order, share, 1.0)


def deleted(gates: Tensor, order: Tensor, share: float) -> Tensor:
    """New gates: all at 1 but the first ``share`` of the order, which are closed to 0.

    Example:
        >>> deleted(torch.tensor([0.5, 0.1]), torch.tensor([1, 0]), share=0.5)
        tensor([1., 0.])
    """
    return _set_first(torch.ones_like(gates), order, share, 0.0)


def relative_confidence(logits: Tensor, original_logits: Tensor, label: int) -> float:
    """Mean softmax confidence in ``label`` divided by the original model's (a ratio of means).

    Example:
        >>> relative_confidence(torch.zeros(3, 4), torch.zeros(3, 4), label=1)
        1.0
    """
    now, before = (
        float(check_logits(x).double().softmax(-1)[:, label].mean())
        for x in (logits, original_logits)
    )
    if before == 0:
        raise ValueError(f"the original model's confidence in class {label} is 0: no curve.")
    return now / before


def curve(
    confidence: Callable[[dict[str, Tensor]], float],
    gates: Mapping[str, Tensor],
    *,
    kind: Literal["insertion", "deletion"] = "insertion",
    order: Literal["gate", "random"] = "gate",
    steps: int = 20,
    seed: int = 0,
) -> Curve:
    """The curve of one row over ``steps`` + 1 equally spaced shares, 0 and 1 included.

    Args:
        confidence: relative confidence of the model under the gates it is given.
        gates: the row's gates, (units,) for each target, as `FilteredModel.gates` gives them.
        kind: insertion (higher area is better) or deletion (lower is better).
        order: by gate, or the random control.
        steps: the paper does not say how many; 20 takes 5 % of every target at a time.
        seed: of the random order.

    Example:
        >>> gates = {"conv.weight": torch.tensor([0.0, 1.0, 1.0, 1.0])}
        >>> first_open = lambda gates: float(gates["conv.weight"][0])
        >>> curve(first_open, gates, steps=4).values
        (0.0, 1.0, 1.0, 1.0, 1.0)
    """
    if kind not in ("insertion", "deletion") or order not in ("gate", "random"):
        raise ValueError(
            f"kind={kind!r}, order={order!r}; expected kind 'insertion' or 'deletion', "
            "order 'gate' or 'random'."
        )
    if steps < 1 or not gates:
        raise ValueError(f"steps={steps} over {len(gates)} targets; expected at least one of each.")
    change = inserted if kind == "insertion" else deleted
    orders = {
        name: order_by_gate(gate) if order == "gate" else random_order(gate, seed + position)
        for position, (name, gate) in enumerate(gates.items())
    }
    shares = tuple(step / steps for step in range(steps + 1))
    values = tuple(
        confidence({name: change(gates[name], orders[name], share) for name in gates})
        for share in shares
    )
    return Curve(shares, values)


def _set_first(gates: Tensor, order: Tensor, share: float, value: float) -> Tensor:
    """A copy of the gates with the first ``share`` of the order set to ``value``."""
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} is outside 0..1.")
    changed = gates.flatten().clone()
    changed[order[: round(share * len(order))]] = value
    return changed.view_as(gates)


# ---- of a filtered model ------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassCurves:
    """The four curves of one class: by gate and, as a control, in a random order."""

    insertion: Curve
    deletion: Curve
    random_insertion: Curve
    random_deletion: Curve


Kind = Literal["insertion", "deletion"]
Order = Literal["gate", "random"]


def insertion(
    wf: FilteredModel, images: Tensor, forget: int | str, order: Order = "gate", **options: Any
) -> Curve:
    """Confidence in the class on its own images while its gates are opened, most closed first.

    Relative to the base model's. Options as in `class_curves`.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
        >>> insertion(wf, torch.ones(2, 4), 0, steps=4).values[-1]
        1.0
    """
    row = row_of(wf, forget)
    return _curves(wf, images, row, (("insertion", order),), **options)[0]


def deletion(
    wf: FilteredModel, images: Tensor, forget: int | str, order: Order = "gate", **options: Any
) -> Curve:
    """Confidence in the class on its own images while gates close, in the order of `insertion`.

    Starts from all gates at 1. Options as in `class_curves`.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
        >>> deletion(wf, torch.ones(2, 4), 0, steps=4).values[0]
        1.0
    """
    row = row_of(wf, forget)
    return _curves(wf, images, row, (("deletion", order),), **options)[0]


def class_curves(
    wf: FilteredModel,
    images: Tensor,
    forget: int | str,
    *,
    steps: int = 20,
    layers: Sequence[str] | None = None,
    seed: int = 0,
) -> ClassCurves:
    """Insertion and deletion of one class, each by gate and in a random order.

    Args:
        wf: The filtered model.
        images: Images of the class.
        forget: The class, by index or name.
        steps: How many; each changes the same share of every layer.
        layers: Targets to change; by default the live ones (see `live_layers`). In a target where
            every gate is open there is no order to follow, and closing it in any order would only
            break the model. Name all targets for the paper's literal reading.
        seed: Of the random order.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
        >>> len(class_curves(wf, torch.ones(2, 4), 0, steps=4).insertion.values)
        5
    """
    kinds: tuple[tuple[Kind, Order], ...] = (
        ("insertion", "gate"),
        ("deletion", "gate"),
        ("insertion", "random"),
        ("deletion", "random"),
    )
    refuse_open_gates(wf)
    row = row_of(wf, forget)
    return ClassCurves(*_curves(wf, images, row, kinds, steps=steps, layers=layers, seed=seed))


def mean_curve(curves: Iterable[Curve]) -> Curve:
    """The mean of curves over the same shares, point by point.

    Example:
        >>> mean_curve([Curve((0.0, 1.0), (0.0, 1.0)), Curve((0.0, 1.0), (1.0, 1.0))]).values
        (0.5, 1.0)
    """
    averaged = list(curves)
    if not averaged or len({curve.shares for curve in averaged}) != 1:
        raise ValueError(
            f"{len(averaged)} curves with different shares. Use the same steps for all."
        )
    values = tuple(
        sum(points) / len(averaged) for points in zip(*(curve.values for curve in averaged))
    )
    return Curve(averaged[0].shares, values)


@torch.no_grad()
def _curves(
    wf: FilteredModel,
    images: Tensor,
    row: int,
    kinds: Sequence[tuple[Kind, Order]],
    *,
    steps: int = 20,
    layers: Sequence[str] | None = None,
    seed: int = 0,
) -> list[Curve]:
    """Curves of a class: each step's alphas are a row of one table, evaluated in one go."""
    if steps < 1 or not len(images):
        raise ValueError(f"steps={steps} over {len(images)} images; expected one of each or more.")
    names = [find_layer(wf, name) for name in layers] if layers is not None else live_layers(wf)
    spans = [slices(wf.targets)[name] for name in names or list(slices(wf.targets))]
    rows = [
        changed
        for kind, order in kinds
        for changed in _step_rows(wf, row, spans, kind, order, steps, seed)
    ]
    shares = tuple(step / steps for step in range(steps + 1))
    images = images.to(wf.alphas.device)
    with evaluating(wf):
        base = logits_of(wf(images))
        logits = _table_logits(wf, images, torch.stack(rows))  # (images, rows, classes)
    values = [relative_confidence(logits[:, i], base, row) for i in range(len(rows))]
    # Curve after curve in one list: each has a point for every share.
    count = len(shares)
    return [Curve(shares, tuple(values[i * count : (i + 1) * count])) for i in range(len(kinds))]


def _step_rows(
    wf: FilteredModel, row: int, spans: list[slice], kind: Kind, order: Order, steps: int, seed: int
) -> Iterator[Tensor]:
    """Alphas of a row after each step; exactly open or exactly closed where a step changed them."""
    alpha = wf.alphas.detach()[row]
    if wf.hard:
        alpha = torch.where(alpha > 0, HARD, -HARD)
    start, value = (alpha, HARD) if kind == "insertion" else (torch.full_like(alpha, HARD), -HARD)
    ranks = [
        ranking(wf, row, span) if order == "gate" else random_order(alpha[span], seed + i)
        for i, span in enumerate(spans)
    ]
    for step in range(steps + 1):
        changed = start.clone()
        for span, rank in zip(spans, ranks):
            changed[span][rank[: round(step / steps * len(rank))]] = value
        yield changed


def _table_logits(wf: FilteredModel, images: Tensor, table: Tensor, most: int = 256) -> Tensor:
    """Logits ``(images, rows, classes)`` of every image under every row of a table of alphas."""
    steps = _with_rows(wf, table)
    rows = torch.arange(len(table), device=table.device)
    size = max(1, most // len(table))
    pieces = torch.split(images, size)
    outputs = (steps.replicated(part, rows.repeat(len(part))) for part in pieces)
    unfold = "(n rows) classes -> n rows classes"
    return torch.cat([rearrange(logits_of(o), unfold, rows=len(table)) for o in outputs])


def _with_rows(wf: FilteredModel, table: Tensor) -> FilteredModel:
    """The same base model under other rows; targets that are open in all of them are skipped."""
    other = copy.deepcopy(wf, {id(wf.base): wf.base, id(wf.alphas): wf.alphas})
    other.alphas = nn.Parameter(table, requires_grad=False)
    other.num_classes, other.class_names, other.hard = len(table), None, False
    spans = slices(wf.targets)
    other.pin_open([name for name in spans if bool((table[:, spans[name]] == HARD).all())])
    return other


def _columns(problem: Problem) -> list[Column]:
    """Columns of the areas under two curves and under their random controls."""
    group, budget = "insertion and deletion", problem.budget
    text = f"in {budget.curve_steps} steps, {budget.curve_images} images a class"
    insertion = f"Area under the relative confidence while gates open, most closed first, {text}."
    deletion = f"The same while gates close from all open, {text}."
    return [
        Column("insertion", group, "higher", insertion, "number"),
        Column("deletion", group, "lower", deletion, "number"),
        Column("random insertion", group, "none", "The control, in a random order.", "number"),
        Column("random deletion", group, "none", "The control, in a random order.", "number"),
    ]


@metric("curves", _columns, order=80)
def measure_curves(method: Method, problem: Problem) -> Measured:
    """Areas of insertion and deletion, by gate and in a random order."""
    if method.filtered is None or not forgets_by_gates(method.filtered):
        return Measured({})
    wf, budget, points = method.filtered, problem.budget, {}

    def number(row: int) -> dict[str, float | None]:
        images = problem.of_class(row)[0][: budget.curve_images]
        curves = class_curves(wf, images, row, steps=budget.curve_steps, seed=problem.seed)
        by_name = {name.replace("_", " "): curve for name, curve in vars(curves).items()}
        points[row] = {name: list(curve.values) for name, curve in by_name.items()}
        return {name: curve.auc for name, curve in by_name.items()}

    measured = by_class(method, number)
    return Measured(measured.cells, {"curves": points})
