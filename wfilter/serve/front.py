"""Before Ray's proxy: no client steers Ray, and no client is shown Ray's insides.

Ray calls `middlewares` in each of its proxies where ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``
names it, as ``wfilter serve`` does. Nothing of torch is imported here: a proxy has no model.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from wfilter.serve.heads import bound_heads
from wfilter.serve.limits import REFUSALS

if TYPE_CHECKING:
    from starlette.middleware import Middleware

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "wfilter.serve.front.middlewares"
# With these headers a client would choose its deadline, its replica, or its name in a log.
RAYS_OWN = (b"serve-", b"x-request-", b"x-serve-", b"x-session-id")
RAYS_STATUS = {408: 503}  # Ray says 408 where no replica answered, which is not the client's fault

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGI = Callable[[Message, Receive, Send], Awaitable[None]]


def middlewares() -> list[Middleware]:
    """The middleware that Ray puts around its proxy; the call also bounds heads of requests."""
    from starlette.middleware import Middleware

    bound_heads()
    return [Middleware(Front)]


class Front:
    """Takes Ray's own headers off requests, and its own words out of errors."""

    def __init__(self, app: ASGI):
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one connection, as ASGI calls it."""
        if scope["type"] == "websocket":  # no route takes one
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["headers"] = [pair for pair in scope["headers"] if not _is_rays_own(pair[0])]
        words = _Words(send)
        if _is_rays_page(scope["path"]):
            await _refuse(send, 404)
            return
        try:
            await self.app(scope, receive, words)
        finally:  # a replica that dies may leave its request with an exception, or with nothing
            await words.end()


def _is_rays_page(path: str) -> bool:
    # /-/routes lists applications. /-/healthz may pass: it says no more than our /healthz, and
    # load balancers know it.
    return path.startswith("/-/") and path != "/-/healthz"


def _is_rays_own(name: bytes) -> bool:
    return name.lower().replace(b"_", b"-").startswith(RAYS_OWN)


class _Words:
    """Passes our own errors, which are JSON; replaces Ray's, which may name addresses and paths."""

    def __init__(self, send: Send):
        self.send, self.started, self.replaced = send, False, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            kind = headers.get(b"content-type", b"")
            self.replaced = message["status"] >= 400 and not kind.startswith(b"application/json")
            if self.replaced:
                await _refuse(self.send, message["status"], headers.get(b"retry-after"))
        if not self.replaced:
            await self.send(message)

    async def end(self) -> None:
        if not self.started:
            await _refuse(self.send, 500)


async def _refuse(send: Send, status: int, retry_after: bytes | None = None) -> None:
    status = RAYS_STATUS.get(status, status)
    words = REFUSALS.get(status, "There is no answer to this request.")
    body = json.dumps({"detail": words}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    if status in (500, 503):  # a replica died or none is there: Ray is already starting another
        headers.append((b"retry-after", retry_after or b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
