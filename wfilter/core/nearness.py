"""When two answers count as equal: rounding is allowed, a wrong gate is not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wfilter.core.feature_rows import BELOW

# What rounding surely explains, as a part of the answer's spread, and what it can explain at most,
# as a part of its size. What lies between is in doubt, and looked at again in float64.
_SURELY = {torch.float64: 1e-6, torch.float32: 1e-4}
_AT_MOST = {torch.float32: 5e-3}
_HALF = 0.1  # at most, for all other dtypes, which are always in doubt


class Near:
    """Compares answers, and remembers whether any difference was too large to be sure.

    Example:
        >>> near = Near()
        >>> near(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001])), near.in_doubt
        (True, True)
        >>> near(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]))
        False
    """

    def __init__(self) -> None:
        self.in_doubt = False

    def __call__(self, answered: Tensor, expected: Tensor) -> bool:
        """Equal up to rounding; NaN is equal to itself."""
        if answered.shape != expected.shape:
            return False
        if not expected.is_floating_point():
            return torch.equal(answered, expected)
        if not torch.equal(answered.isnan(), expected.isnan()):
            return False
        return not expected.numel() or self._is_rounding(answered, expected)

    def _is_rounding(self, answered: Tensor, expected: Tensor) -> bool:
        """Measured by the spread, since an offset that all entries share must hide no difference.

        The last bits of large entries are always allowed.
        """
        a, b = torch.nan_to_num(answered.double()), torch.nan_to_num(expected.double())
        kind, size, error = expected.dtype, float(b.abs().max()), float((a - b).abs().max())
        spread = size if b.numel() == 1 else float(b.max() - b.min())
        sure = _SURELY.get(kind, 0.0) * spread + 32 * torch.finfo(kind).eps * size
        doubtful = error > sure or kind not in _SURELY
        self.in_doubt |= doubtful
        if kind == torch.float64:
            return not doubtful
        return error <= _AT_MOST.get(kind, _HALF) * size + 1e-30

    def alike(
        self,
        together: Sequence[Tensor],
        singles: Sequence[Sequence[Tensor]],
        axes: Sequence[int | None],
    ) -> bool:
        """Whether an output for a batch is that of its first samples alone, put together."""
        for place, single in enumerate(singles):
            for whole, alone, axis in zip(together, single, axes):
                if not self(_row(whole, axis, place, alone), alone):
                    return False
        return True


def _row(whole: Tensor, axis: int | None, place: int, like: Tensor) -> Tensor:
    """The part of a batch's output that belongs to one sample."""
    if axis is None:
        return whole
    size = like.shape[axis]
    return whole.narrow(axis, place * size, size)


def gap(answered: Tensor, expected: Tensor) -> float:
    """The largest difference; NaN is infinitely far from anything, and equal infinities are alike.

    Example:
        >>> gap(torch.tensor([1.0, -torch.inf]), torch.tensor([1.5, -torch.inf]))
        0.5
        >>> gap(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 1.0]))
        inf
    """
    if not expected.numel():
        return 0.0
    apart = (answered - expected).abs().masked_fill(answered == expected, 0)
    return float(apart.max().nan_to_num(nan=math.inf, posinf=math.inf))


def size(logits: Tensor) -> float:
    """The largest logit by magnitude, by which differences are measured.

    Those that feature rows, a folded head or a mask put far below all others do not count: they
    would hide differences of the others.

    Example:
        >>> size(torch.tensor([3.0, -4.0, -104.0, -torch.inf]))
        4.0
    """
    finite = logits[logits.isfinite()]
    usual = finite[finite > -BELOW / 2]
    counted = usual if usual.numel() else finite
    return float(counted.abs().max()) if counted.numel() else 0.0
