"""What stands before Ray's proxy, called with applications in its place."""

import asyncio
import contextlib

import pytest

from servers import call
from wfilter.serve.front import CALLBACK, Front, middlewares


def ray_says(status, text, kind=b"text/plain", headers=()):
    async def proxy(scope, receive, send):
        heads = [(b"content-type", kind), *headers]
        await send({"type": "http.response.start", "status": status, "headers": heads})
        await send({"type": "http.response.body", "body": text, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return Front(proxy)


@pytest.mark.parametrize(
    "name",
    [
        "X-Request-Timeout-Seconds",
        "x-request-disconnect-disabled",
        "x-request-id",
        "serve_multiplexed_model_id",
        "Serve-Multiplexed-Model-Id",
        "x_session_id",
        "x-serve-router-anything",
    ],
)
def test_headers_that_steer_ray_go_no_further(name):
    seen = {}

    async def proxy(scope, receive, send):
        seen.update(scope["headers"])
        await send({"type": "http.response.start", "status": 200})

    asyncio.run(call(Front(proxy), "POST", "/", headers={name: "1", "authorization": "Bearer x"}))
    assert set(seen) == {b"host", b"authorization"}


@pytest.mark.parametrize(
    ("status", "told"), [(404, 404), (408, 503), (499, 499), (500, 500), (503, 503)]
)
def test_what_ray_says_of_itself_is_not_shown(status, told):
    text = b"The actor died. pid 4711, ip 10.0.0.7, Traceback (most recent call last)"
    reply = asyncio.run(call(ray_says(status, text), "GET", "/"))
    assert reply.status == told
    assert set(reply.json) == {"detail"}
    assert "4711" not in reply.body.decode()
    assert ("retry-after" in reply.headers) == (told in (500, 503))


@pytest.mark.parametrize("kind", [None, RuntimeError, asyncio.CancelledError])
def test_proxy_without_an_answer_is_told_in_our_words(kind):
    async def proxy(scope, receive, send):
        if kind is not None:
            raise kind("pid 4711")

    sent = []

    async def send(message):
        sent.append(message)

    outcome = contextlib.nullcontext() if kind is None else pytest.raises(kind)
    with outcome:  # uvicorn writes it to the log
        asyncio.run(Front(proxy)({"type": "http", "path": "/", "headers": []}, None, send))
    assert sent[0]["status"] == 500
    assert b"4711" not in sent[1]["body"]


def test_rays_own_delay_is_kept():
    front = ray_says(503, b"too many", headers=[(b"Retry-After", b"7")])
    assert asyncio.run(call(front, "GET", "/")).headers["retry-after"] == "7"


@pytest.mark.parametrize(("status", "kind"), [(200, b"text/html"), (400, b"application/json")])
def test_answers_and_our_own_refusals_pass_unchanged(status, kind):
    reply = asyncio.run(call(ray_says(status, b"whatever", kind), "GET", "/"))
    assert (reply.status, reply.body) == (status, b"whatever")


@pytest.mark.parametrize(
    ("path", "status"), [("/-/routes", 404), ("/-/x", 404), ("/-/healthz", 200)]
)
def test_rays_own_pages_are_not_shown_but_for_its_health(path, status):
    reply = asyncio.run(call(ray_says(200, b'{"/": "wfilter"}'), "GET", path))
    assert reply.status == status
    assert (b"wfilter" in reply.body) == (status == 200)


def test_web_socket_is_closed_at_once():
    sent = []

    async def send(message):
        sent.append(message["type"])

    asyncio.run(Front(None)({"type": "websocket"}, None, send))
    assert sent == ["websocket.close"]


def test_ray_finds_it_by_name():
    from ray._common.utils import import_attr

    assert import_attr(CALLBACK) is middlewares
    assert middlewares()[0].cls is Front
