"""``forgetting`` blocks: which row is in force, through which filters, and in whose thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from wfilter.core.filters import WeightFilter

_OPENING = threading.Lock()


@dataclass
class Scope:
    """The open blocks of a model: whose they are, and the rows in force, innermost last."""

    thread: int
    rows: list[Tensor | None]
    filters: list[WeightFilter]

    @property
    def row(self) -> Tensor | None:
        """Of the innermost block; ``None``: it forgets nothing, or its thread is leaving it."""
        rows = list(self.rows)
        return rows[-1] if rows else None

    def refresh(self) -> None:
        """Let the filters follow the innermost block."""
        enabled = self.row is not None
        for weight_filter in self.filters:
            weight_filter.enabled = enabled
            weight_filter._kept = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The plain weights for one forward inside a block."""
        before = [weight_filter.enabled for weight_filter in self.filters]
        try:
            for weight_filter in self.filters:
                weight_filter.enabled = False
            yield
        finally:
            for weight_filter, enabled in zip(self.filters, before):
                weight_filter.enabled = enabled


class Blocks:
    """The blocks of one model, all of one thread; ``scope`` is ``None`` while none is open."""

    def __init__(self) -> None:
        self.scope: Scope | None = None
        self.opened = 0  # outermost blocks so far

    @contextmanager
    def entered(
        self, row: Tensor | None, filtered: AbstractContextManager[list[WeightFilter]]
    ) -> Iterator[None]:
        """Inside, ``row`` is in force; the outermost block enters ``filtered`` first."""
        with ExitStack() as stack:
            opened = self._open()
            if opened is not None:
                stack.callback(setattr, self, "scope", None)
                opened.filters = stack.enter_context(filtered)
            scope = self.scope
            assert scope is not None
            scope.rows.append(row)
            scope.refresh()
            try:
                yield
            finally:
                scope.rows.pop()
                scope.refresh()

    def _open(self) -> Scope | None:
        """Make this thread the owner of the blocks; ``None`` where it is already."""
        with _OPENING:
            if self.own() is not None:
                return None
            self.scope = Scope(threading.get_ident(), [], [])
            self.opened += 1
            return self.scope

    def own(self) -> Scope | None:
        """The scope, read once; stops where another thread is inside a block."""
        scope = self.scope
        if scope is not None and scope.thread != threading.get_ident():
            refuse_mixed_threads()
        return scope


def refuse_mixed_threads() -> NoReturn:
    """Stop: the weights are, or were a moment ago, those of another thread's block."""
    raise RuntimeError(
        "another thread is inside wf.forgetting(...). In threads pass forget= to the call, "
        "or give each thread its own copy.deepcopy(wf)."
    )
