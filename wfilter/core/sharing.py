"""Replicas of a sample that share what comes before the first gate; targets pinned open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wfilter.core import gates as _gates
from wfilter.core.forget import check_per_sample
from wfilter.core.outputs import Inputs, logits_of

if TYPE_CHECKING:
    from wfilter.core.model import FilteredModel


NO_REPLICAS = (
    "torch.nn.DataParallel makes copies whose parameters are none, where no gate finds them, and "
    "runs them in threads that see no block. Use DistributedDataParallel, or one device."
)


class Pins:
    """Targets whose gates are all exactly 1, so that a forward can skip them."""

    def __init__(self) -> None:
        self.indices: frozenset[int] = frozenset()
        self.shares: bool | None = None  # whether replicas can share; not known yet
        self._checked_at: int | None = None  # version of the alphas that was looked at

    def pin_open(self, wf: FilteredModel, names: Iterable[str]) -> None:
        """In place: open every gate of the targets named, and pin those alone."""
        chosen = set(names)
        unknown = chosen - {target.name for target in wf.targets}
        if unknown:
            raise ValueError(f"{sorted(unknown)[0]} is not a target. See wf.plan.")
        with torch.no_grad():
            for name in chosen:
                wf.alpha[name].fill_(_gates.HARD)
        self.indices = frozenset(i for i, t in enumerate(wf.targets) if t.name in chosen)
        self.shares = self._checked_at = None

    def check(self, wf: FilteredModel) -> None:
        """Refuse pinned alphas that are no longer open; waits for a device only after a change."""
        if not self.indices:
            return
        tensor = wf.alphas
        version = None if tensor.is_inference() else tensor._version
        if version is not None and version == self._checked_at:
            return
        names = [wf.targets[index].name for index in sorted(self.indices)]
        is_open = torch.stack([(wf.alpha[name] == _gates.HARD).all() for name in names]).tolist()
        if not all(is_open):
            raise RuntimeError(
                f"{names[is_open.index(False)]} is pinned open, but its alphas were changed and "
                "would be ignored. Call wf.pin_open([]) to let all gates act again."
            )
        self._checked_at = version


def run_replicated(wf: FilteredModel, x: Tensor, forget: Tensor) -> Any:
    """The output for ``forget``, ``replicas * batch`` rows grouped by sample of ``x``.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="*")
        >>> run_replicated(wf, torch.ones(2, 4), torch.tensor([0, 1, 1, 2])).shape
        torch.Size([4, 3])
    """
    replicas = len(forget) // len(x)
    check_per_sample(forget, len(x) * replicas, wf.num_classes)
    pins, inputs = wf.pins, Inputs(x, None, {})
    if pins.indices and replicas > 1 and wf.feature_rows is None and wf.is_fused(inputs):
        pins.check(wf)
        if pins.shares is None:
            pins.shares = _can_share(wf, inputs, replicas)
        if pins.shares:
            return wf.run_gated(x, wf.mixed_gates(forget), replicas=replicas)
    return wf(x.repeat_interleave(replicas, 0), forget)


@torch.no_grad()
def _can_share(wf: FilteredModel, inputs: Inputs, replicas: int) -> bool:
    """Whether replicas can be one up to the first gate, tried with gates at random.

    Not so where a shortcut leads around that gate, or the model reads its batch size before it.
    """
    x = inputs.images
    generator = torch.Generator().manual_seed(0)
    shape = (replicas * len(x), wf.alphas.shape[1])
    gates = torch.rand(shape, generator=generator).to(wf.alphas)
    try:
        shared = logits_of(wf.run_gated(x, gates, replicas=replicas))
    except RuntimeError:
        return False
    alone = logits_of(wf.run_gated(x.repeat_interleave(replicas, 0), gates))
    return shared.shape == alone.shape and torch.allclose(shared, alone, 0.02, 1e-4)
