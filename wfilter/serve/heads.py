"""Limits on the heads of requests, which are read before any token is.

uvicorn reads a head of any length and waits for its end for ever, and Ray starts uvicorn with
options of its own. So `BoundedHeads` replaces the protocol that uvicorn would choose by itself.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn import config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_BYTES = 2**16
SECONDS = 20.0  # until a head is complete, from its first byte or from a new connection on


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol, which hangs up on heads that are too long or too slow."""

    _due: asyncio.TimerHandle | None = None
    _length = 0

    def connection_made(self, transport: Any) -> None:
        """Start the time limit of the first head."""
        super().connection_made(transport)
        self._expect()

    def on_message_begin(self) -> None:
        """Start the time limit of a later head; between two requests uvicorn's own limit holds."""
        super().on_message_begin()
        self._length = 0
        if self._due is None:
            self._expect()

    def on_headers_complete(self) -> None:
        """End the limits of a head: what follows is a body, which `read_body` counts."""
        self._forget()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head that has not ended."""
        super().data_received(data)
        if self._due is not None:
            self._length += len(data)
            if self._length > MOST_BYTES:
                self._hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit."""
        self._forget()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self._due = self.loop.call_later(SECONDS, self._hang_up)

    def _forget(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _hang_up(self) -> None:
        self._forget()
        self.transport.close()


def bound_heads() -> None:
    """Make `BoundedHeads` the protocol of every uvicorn that is started in this process."""
    config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedHeads.__name__}"
