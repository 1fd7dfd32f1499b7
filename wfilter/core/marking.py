"""The modes of an inspection: one sample is marked with NaN, and its marks are followed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wfilter.core.layouts import Layout, find_layout, place, unfold
from wfilter.core.rules import Function, InterceptMode, Site


@dataclass
class TargetUse:
    """What the inspection saw of one target."""

    functions: list[str] = field(default_factory=list)
    layouts: set[Layout | None] = field(default_factory=set)
    shapes: set[tuple[torch.Size, int]] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    attended: bool = False


class InspectMode(InterceptMode):
    """Run the model unchanged and note how each target is used, and where its samples lie.

    The batch has ``batch`` samples of which number 1 is NaN, so the entries of an output that
    depend on that sample are those that are NaN.
    """

    inspecting = True

    def __init__(self, sites: dict[int, Site], batch: int):
        super().__init__(sites)
        self.batch = batch
        self.uses: dict[int, TargetUse] = {site.index: TargetUse() for site in sites.values()}
        self._function = ""
        self._latest: tuple[int, Tensor] | None = None  # a target and its gated output

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._function = getattr(func, "__name__", str(func))
        return super().__torch_function__(func, types, args, kwargs)

    def other(self, function: Function, args: Any, kwargs: Any) -> Any:
        """Note targets that reach a function without a rule and come out as another tensor."""
        result = function(*args, **kwargs)
        if isinstance(result, torch.Size):  # reading a shape is no use
            return result
        written = function is Tensor.__setitem__
        derived = isinstance(result, (Tensor, tuple, list, float)) and id(result) not in self.sites
        if written or derived:
            values = [*args, *kwargs.values()]
            nested = [v for value in values if isinstance(value, (tuple, list)) for v in value]
            self.unknown_use(function, [*values, *nested])
        return result

    def unknown_use(self, function: Function, parameters: Iterable[Any]) -> None:
        """Note a use without a rule, unless it is the standardisation of a weight."""
        for parameter in parameters:
            site = self.sites.get(id(parameter)) if isinstance(parameter, Tensor) else None
            if site is not None and not site.standardised:
                name = getattr(function, "__name__", str(function))
                self.uses[site.index].unknown.append(name)

    def gate(
        self,
        output: Tensor,
        axis: int,
        site: Site | None,
        bias: Tensor | None,
        bias_site: Site | None,
    ) -> Tensor:
        """Note the layout; the result is that of the plain call."""
        layout = find_layout(output, axis, self.batch)
        for part in (site, bias_site):
            if part is not None:
                self.uses[part.index].functions.append(self._function)
                self.uses[part.index].layouts.add(layout)
                self.uses[part.index].shapes.add((output.shape, axis))
        result = output if bias is None else output + place(bias, output, axis, None)
        if site is not None:
            self._latest = site.index, result
        return result

    def attended(self, query: Tensor) -> None:
        """Note the target whose gated output the query is a view of."""
        if self._latest is not None:
            index, output = self._latest
            same = output.untyped_storage().data_ptr() == query.untyped_storage().data_ptr()
            self.uses[index].attended |= same


class MarkMode(InterceptMode):
    """Run the model with sample 1 of one target's output turned to NaN, as a layout places it."""

    def __init__(self, sites: dict[int, Site], index: int, layout: Layout, batch: int):
        super().__init__(sites)
        self.index, self.layout, self.batch = index, layout, batch

    def gate(
        self,
        output: Tensor,
        axis: int,
        site: Site | None,
        bias: Tensor | None,
        bias_site: Site | None,
    ) -> Tensor:
        """The plain call's result, marked if the target takes part in it.

        Images without NaN may be routed otherwise than those of the inspection, and another number
        of entries has no sample 1 to mark.
        """
        if bias is not None:
            output = output + place(bias, output, axis, None)
        if self.index not in [part.index for part in (site, bias_site) if part is not None]:
            return output
        if output.shape[self.layout.axis] != self.batch * self.layout.times:
            return output
        samples = unfold(output.clone(), self.layout, self.batch)
        samples.select(self.layout.axis + (self.layout.order == "minor"), 1).fill_(float("nan"))
        return samples.reshape(output.shape)
