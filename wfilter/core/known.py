"""What has been found out for each input shape: inspections, and where the logits are."""

from __future__ import annotations

import copy
from typing import NamedTuple

from torch import nn

from wfilter.core.forgetting import Running
from wfilter.core.head import Head, find_head
from wfilter.core.inspection import Inspection, Owned
from wfilter.core.modes import Spans
from wfilter.core.outputs import Inputs, Key


class KeptSites(NamedTuple):
    """What the paths found once for an inspection and the targets pinned open."""

    inspection: Inspection
    pinned: frozenset[int]
    owned: tuple[Owned, ...]
    spans: Spans
    watches: bool  # whether one of the sites is standardised


class Known:
    """Inspections and heads of one filtered model, each found once for inputs of a shape.

    Attributes:
        latest: The inspection made last; it also serves graphs, which cannot stop to look again.
        sites: What the paths keep for each inspection, by its identity.
    """

    def __init__(self, inspection: Inspection):
        self.latest = inspection
        self.sites: dict[int, KeptSites] = {}
        self._inspections = {inspection.key: inspection}
        self._heads: dict[Key, Head] = {}

    def remember(self, inspection: Inspection) -> None:
        """In place: use this inspection for inputs of its shape."""
        self._inspections[inspection.key] = self.latest = inspection
        self._heads.pop(inspection.key, None)
        self.sites = {}

    def inspection(self, inputs: Inputs) -> Inspection | None:
        """The inspection of inputs of this shape, if there was one."""
        return self._inspections.get(inputs.key)

    def head(self, base: nn.Module, inputs: Inputs) -> Head:
        """Where the logits are made, looked at now if these inputs are the first.

        On images drawn for it: of none, or of NaN, the outputs of two layers are alike.
        """
        if inputs.key not in self._heads:
            with Running():
                self._heads[inputs.key] = find_head(base, inputs.drawn(2))
        return self._heads[inputs.key]

    def without_sites(self) -> Known:
        """A copy for another model: sites hold the modules of this one."""
        other = copy.copy(self)
        other.sites = {}
        other._inspections, other._heads = dict(self._inspections), dict(self._heads)
        return other
