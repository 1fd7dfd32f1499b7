"""Prometheus metrics through Ray, whose agent on each node exports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BATCHES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
MILLISECONDS = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0, 30000.0]


class Silent:
    """A meter that keeps nothing, for where nobody reads it."""

    def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        """Ignore a count."""

    def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
        """Ignore a value."""


_SILENT = Silent()


@dataclass(frozen=True)
class Meters:
    """What a replica counts; by default by meters that keep nothing."""

    requests: Any = _SILENT
    refused: Any = _SILENT
    latency: Any = _SILENT
    batch_size: Any = _SILENT
    unlogged: Any = _SILENT


def ray_meters() -> Meters:
    """Meters that Ray exports, under names that begin with ``ray_wfilter_``."""
    from ray.util.metrics import Counter, Histogram

    return Meters(
        Counter("wfilter_requests", "Requests of tenants, by status.", ("tenant", "status")),
        Counter("wfilter_refused", "Requests without a valid token."),
        Histogram("wfilter_latency_ms", "From a request's head to its answer.", MILLISECONDS),
        Histogram("wfilter_batch_size", "Requests in a forward.", BATCHES),
        Counter("wfilter_unlogged", "Requests served without an audit record."),
    )
