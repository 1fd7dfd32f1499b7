"""Limits that keep one client from taking the server away from the others; refusals as 429, 503."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REFUSALS = {
    400: "The body is broken, or the image in it is.",
    401: "The token is missing, wrong or revoked.",
    408: "The body did not arrive in time.",
    413: "The body or the image is too large.",
    415: "The body is neither JSON nor a form.",
    429: "This tenant asks too often; see Retry-After.",
    500: "The server failed; its log says how.",
    503: "The server is busy or cannot log; see Retry-After.",
}
A_DAY = 86_400


class Refusal(Exception):
    """A request that gets no answer: the status, words for the client, and when to come back."""

    def __init__(self, status: int, detail: str, retry_after: float | None = None):
        super().__init__(detail)
        self.status, self.detail, self.retry_after = status, detail, retry_after

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(min(self.retry_after, A_DAY))))
        return headers


class Buckets:
    """A rate limit for each name: a bucket of permissions, refilled at a rate up to a burst.

    Example:
        >>> buckets = Buckets(clock=iter([0.0, 0.0, 0.0, 2.0]).__next__)
        >>> [buckets.wait("a", rate=0.5, burst=2) for _ in range(4)]
        [0.0, 0.0, 2.0, 0.0]
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}

    def wait(self, name: str, rate: float, burst: int) -> float:
        """Take one permission and return 0, or if there is none the seconds until there is one."""
        now = self._clock()
        level, then = self._levels.get(name, (float(burst), now))
        level = min(float(burst), level + (now - then) * rate)
        self._levels[name] = (level, now) if level < 1 else (level - 1, now)
        return max(0.0, (1 - level) / rate)

    def fill(self, name: str) -> None:
        """Make this bucket full again."""
        self._levels.pop(name, None)


class Seats:
    """How many requests may be inside at once, in all and of one tenant.

    Example:
        >>> seats = Seats(total=1, per_tenant=1)
        >>> with seats.taken("a"), seats.taken("b"):
        ...     pass
        Traceback (most recent call last):
        ...
        wfilter.serve.limits.Refusal: the server is busy. Try again later.
    """

    def __init__(self, total: int, per_tenant: int):
        self.total, self.per_tenant = total, per_tenant
        self.inside: Counter[str] = Counter()
        self.count = 0

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Hold a seat for the time of a request.

        Raises:
            Refusal: 503 if the server is full, 429 if this tenant has all the seats it may have.
        """
        if self.count >= self.total:
            raise Refusal(503, "the server is busy. Try again later.", 1)
        if self.inside[tenant] >= self.per_tenant:
            raise Refusal(429, "too many of your requests wait already. Try again later.", 1)
        self.inside[tenant] += 1
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            self.inside[tenant] -= 1
            if not self.inside[tenant]:
                del self.inside[tenant]
