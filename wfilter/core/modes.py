"""The mode of a filtered forward: outputs scaled by gates, each sample with its own."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wfilter.core.gates import is_wrapped, made_once, traced
from wfilter.core.layouts import Layout, place, unfold
from wfilter.core.recomputing import Recomputation
from wfilter.core.rules import RULES, Function, InterceptMode, Site


class Spans(NamedTuple):
    """Where the parts of the joint axis begin, and their sizes; what is no site lies in between."""

    starts: list[int]
    sizes: list[int]


class GateMode(InterceptMode):
    """Scale outputs by gates ``(batch, total_units)``, or ``(total_units,)``: one row for all.

    ``weights`` are targets that no rule covers, as index and gated tensor, by the identity of the
    original: every function gets them in its place. The model itself is not touched, so threads can
    share it. ``differentiated`` says whether the call's inputs want gradients; ``spans`` are those
    of the sites, and ``watches`` whether one of them is standardised, where that is known.
    """

    def __init__(
        self,
        sites: dict[int, Site],
        gates: Tensor,
        weights: dict[int, tuple[int, Tensor]] | None = None,
        replicas: int = 1,
        *,
        differentiated: bool = False,
        spans: Spans | None = None,
        watches: bool | None = None,
    ):
        super().__init__(sites, watches)
        self.gates = gates
        self.weights = weights or {}
        self.replicas = replicas
        self.spans = spans
        self.acted: set[int] = set()
        self.batch = gates.shape[0] if gates.ndim == 2 else None
        self._tables: dict[object, dict[int, Tensor]] = {}
        self._simple = not self.weights and not self.watches
        self.in_graph = traced(gates)
        self._tracked = self.in_graph or _is_tracked(gates)
        self._recomputation = Recomputation(differentiated or gates.requires_grad)

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._simple:  # most forwards are simple, and are kept fast
            rule = RULES.get(func)
            if rule is not None:
                return rule(self, func, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        if self.weights:
            args = tuple(self._gated(value) for value in args)
            kwargs = {key: self._gated(value) for key, value in (kwargs or {}).items()}
        return super().__torch_function__(func, types, args, kwargs)

    def _gated(self, value: Any) -> Any:
        """An argument, or what stands in for it when it is an original."""
        if isinstance(value, (list, tuple)):
            items = [self._gated(item) for item in value]
            unchanged = all(new is old for new, old in zip(items, value))
            return value if unchanged else tuple(items) if isinstance(value, tuple) else items
        if not isinstance(value, Tensor) or id(value) not in self.weights:
            return value
        index, weight = self.weights[id(value)]
        self._note(index)
        return weight

    def _note(self, index: int, other: int | None = None) -> None:
        """Remember which targets were gated; refuse where a gradient would be wrong."""
        if not torch.compiler.is_dynamo_compiling():  # asked now: the base model may be compiled
            self.acted.add(index)
            if other is not None:
                self.acted.add(other)
        if self._recomputation.needed:
            self._recomputation.refuse()

    def idle(self) -> list[int]:
        """Indices of the targets that nothing has used so far."""
        if len(self.acted) == len(self.sites) + len(self.weights):
            return []
        known = [site.index for site in self.sites.values()]
        known += [index for index, _ in self.weights.values()]
        return [index for index in known if index not in self.acted]

    def gate(
        self,
        output: Tensor,
        axis: int,
        site: Site | None,
        bias: Tensor | None,
        bias_site: Site | None,
    ) -> Tensor:
        """``gate_w * output + gate_b * bias``, each sample with its own gates."""
        first = site or bias_site
        assert first is not None
        self._note(first.index, None if bias_site is None else bias_site.index)
        layout = position = None
        if self.batch is not None:
            layout = first.layout
            assert layout is not None
            position = layout.axis + (layout.order == "minor")
            if layout.order != "plain" or output.shape[layout.axis] != self.batch:
                output = self._samples(output, layout)
        shift = None
        if bias is not None:
            shift = bias if bias.dtype == output.dtype else bias.to(output.dtype)
            if axis != -1 or bias.shape[0] != output.shape[-1]:  # else it meets the output as it is
                shift = place(shift, output, axis, None)
            if bias_site is not None:
                shift = self._of(bias_site, output, axis, position) * shift
        scale = None if site is None else self._of(site, output, axis, position)
        output = self._multiply_add(output, scale, shift)
        if layout is not None and layout.order != "plain":
            return output.flatten(layout.axis, layout.axis + 1)
        if self.in_graph and site is not None and site.attended:
            return made_once(output)
        return output

    def _samples(self, output: Tensor, layout: Layout) -> Tensor:
        """The output with an axis of one entry per row of the gates.

        Replicas of a sample are one until here, the first layer that treats them differently.
        """
        batch = self.gates.shape[0]
        if self.replicas > 1 and output.shape[layout.axis] * self.replicas == batch:
            if layout.order != "plain":
                raise RuntimeError("replicas cannot be told apart where the batch axis is folded.")
            output = output.repeat_interleave(self.replicas, layout.axis)
        return unfold(output, layout, batch)

    def _of(self, site: Site, output: Tensor, axis: int, position: int | None) -> Tensor:
        """The site's gates, shaped to meet ``output`` at its unit axis."""
        if self.in_graph or output.shape[axis] != site.stop - site.start:
            # A graph casts where it multiplies.
            values = self.gates[..., site.start : site.stop].to(output.dtype)
            return place(values, output, axis, position)
        # Cast, shaped and split for all targets at once: one kernel, one call for all views, and
        # one sum of gradients instead of a padded one for each target.
        key = output.dtype, output.ndim, axis, position
        pieces = self._tables.get(key)
        if pieces is None:
            shape = [1] * output.ndim
            shape[axis] = self.gates.shape[-1]
            if position is not None and self.batch is not None:
                shape[position] = self.batch
            table = self.gates if self.gates.dtype == output.dtype else self.gates.to(output.dtype)
            if self.spans is None:
                self.spans = spans(self.sites.values(), table.shape[-1])
            parts = torch.split_with_sizes(table.view(shape), self.spans.sizes, axis)
            pieces = self._tables[key] = dict(zip(self.spans.starts, parts))
        return pieces[site.start]

    def _multiply_add(self, output: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
        """``scale * output + shift``, in place where no gradient or transform needs the output.

        It is fresh from its function, so nobody else holds it; a second buffer of its size would
        cost a CPU as much time as a small layer itself.
        """
        kept = self._tracked or _is_tracked(output)
        if kept or (shift is not None and _is_tracked(shift)):
            if scale is None:
                return output if shift is None else output + shift
            return output * scale if shift is None else torch.addcmul(shift, output, scale)
        if scale is None:
            return output if shift is None else output.add_(shift)
        if shift is None:
            return output.mul_(scale)
        return torch.addcmul(shift, output, scale, out=output)


def spans(sites: Iterable[Site], units: int) -> Spans:
    """Those of the sites, in a joint axis of so many units."""
    ends = {end for site in sites for end in (site.start, site.stop)}
    bounds = sorted(ends | {0, units})
    return Spans(bounds[:-1], [stop - start for start, stop in pairwise(bounds)])


def _is_tracked(tensor: Tensor) -> bool:
    """Whether autograd, forward-mode differentiation or torch.func keeps track of it."""
    if torch.compiler.is_dynamo_compiling():
        return True  # dynamo cannot trace the questions below
    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    return torch.autograd.forward_ad._current_level >= 0 or is_wrapped(tensor)
