"""Insertion and deletion: open or close a class's gates step by step and watch it return or go."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wfilter import metrics
from wfilter.core.gates import HARD, slices
from wfilter.core.model import FilteredModel
from wfilter.data.running import evaluating
from wfilter.explain.layers import find_layer, ranking, row_of
from wfilter.explain.units import live_layers
from wfilter.metrics import Curve


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
    """Confidence in the class on its own images while gates are closed in the same order.

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
        steps: Each takes the same share of every layer.
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
    row = row_of(wf, forget)
    return ClassCurves(*_curves(wf, images, row, kinds, steps=steps, layers=layers, seed=seed))


def mean_curve(curves: Iterable[Curve]) -> Curve:
    """The mean of curves over the same shares, point by point.

    Example:
        >>> mean_curve([Curve((0.0, 1.0), (0.0, 1.0)), Curve((0.0, 1.0), (1.0, 1.0))]).values
        (0.5, 1.0)
    """
    given = list(curves)
    if not given or len({curve.shares for curve in given}) != 1:
        raise ValueError(f"{len(given)} curves with different shares. Use the same steps for all.")
    values = tuple(sum(points) / len(given) for points in zip(*(curve.values for curve in given)))
    return Curve(given[0].shares, values)


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
    """Curves of a class: every step is a row of a table, all evaluated in one go."""
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
        base = wf(images)
        logits = _table_logits(wf, images, torch.stack(rows))  # (images, rows, classes)
    values = [metrics.relative_confidence(logits[:, i], base, row) for i in range(len(rows))]
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
        ranking(wf, row, span) if order == "gate" else metrics.random_order(alpha[span], seed + i)
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
    parts = [
        steps.replicated(part, rows.repeat(len(part))).unflatten(0, (len(part), len(table)))
        for part in torch.split(images, size)
    ]
    return torch.cat(parts)


def _with_rows(wf: FilteredModel, table: Tensor) -> FilteredModel:
    """The same base model under other rows; targets that are open in all of them are skipped."""
    other = copy.deepcopy(wf, {id(wf.base): wf.base, id(wf.alphas): wf.alphas})
    other.alphas = nn.Parameter(table, requires_grad=False)
    other.num_classes, other.class_names, other.hard = len(table), None, False
    spans = slices(wf.targets)
    other.pin_open([name for name in spans if bool((table[:, spans[name]] == HARD).all())])
    return other
