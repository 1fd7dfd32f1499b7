"""Insertion and deletion curves: do the gates point at the units that carry the class?

Insertion starts from the row's gates and opens them (sets them to 1), the most closed first;
deletion starts from all gates at 1 and closes them (sets them to 0) in the same order. A step
takes the same share of every target. The curve is the forgotten class's confidence on its own
images relative to the original model's. Always show the random order beside it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wfilter.data.checks import check_logits


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
