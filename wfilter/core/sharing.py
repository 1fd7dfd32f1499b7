"""Replicas of a sample that share what comes before the first gate; targets pinned open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wfilter.core import gates as _gates
from wfilter.core.forget import check_per_sample
from wfilter.core.outputs import Inputs, logits_of
from wfilter.core.refusals import look_for_bad

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
        self._spans: list[slice] = []  # where they lie in the joint axis, neighbours as one
        self._checked_at: tuple[int, int] | None = None  # the alphas on a device last looked at

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
        self._spans = _joined([s for n, s in _gates.slices(wf.targets).items() if n in chosen])
        self.shares = self._checked_at = None

    def look(self, wf: FilteredModel, alphas: Tensor) -> None:
        """Refuse these alphas, all of ``wf`` or some rows, where pinned ones are not open."""
        if all(bool((alphas[..., span] == _gates.HARD).all()) for span in self._spans):
            return
        names = [wf.targets[index].name for index in sorted(self.indices)]
        moved = [name for name in names if not bool((wf.alpha[name] == _gates.HARD).all())]
        raise RuntimeError(
            f"{moved[0]} is pinned open, but its alphas were changed and would be ignored. Call "
            "wf.pin_open([]) to let all gates act again."
        )

    def look_if_changed(self, wf: FilteredModel) -> None:
        """The same where a look waits for a device: at other alphas than last time alone.

        An edit of ``alphas.data`` in place does not show there.
        """
        if not self.indices:
            return
        tensor = wf.alphas
        unknown = tensor.is_inference() or _gates.is_wrapped(tensor)
        version = None if unknown else (tensor.data_ptr(), tensor._version)
        if version is None or version != self._checked_at:
            self.look(wf, tensor)
            self._checked_at = version


def _joined(spans: Sequence[slice]) -> list[slice]:
    """Slices in order, those that follow on each other as one."""
    joined: list[slice] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            span = slice(joined.pop().start, span.stop)
        joined.append(span)
    return joined


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
        if pins.shares is None:
            pins.shares = _can_share(wf, inputs, replicas)
        if pins.shares:
            gates = wf.mixed_gates(forget, look_for_bad(wf))
            return wf.run_gated(x, gates, replicas=replicas)
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
