"""What clients send: whole or broken, small or huge, at once or never."""

import asyncio
import json
import time

import pytest

from servers import JSON, as_json, call, classify, png
from wfilter.serve.bodies import parse_json
from wfilter.serve.limits import Refusal


def form(*parts):
    lines = b""
    for name, extra, content in parts:
        lines += b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n' % (name, extra)
        lines += content + b"\r\n"
    return lines + b"--x--\r\n"


FORM = {"content-type": "multipart/form-data; boundary=x"}
FILE = b'; filename="a.png"'


def test_form_gives_the_same_answer_as_json(serve_app, book):
    app, _ = serve_app()
    headers = FORM | {"authorization": f"Bearer {book.tokens['bank']}"}
    body = form((b"image", FILE, png()), (b"top_k", b"", b"3"))

    async def both():
        reply = await call(app, "POST", "/v1/classify", body, headers)
        return reply, await classify(app, book.tokens["bank"], png(), top_k=3)

    reply, other = asyncio.run(both())
    assert reply.status == 200
    assert reply.json == other.json


BODIES = {
    "no JSON": (JSON, b"{", 400),
    "a list": (JSON, b"[]", 400),
    "deeply nested": (JSON, b"[" * 100_000, 400),
    "millions of values": (JSON, b'{"image": [' + b"[]," * 3_000_000 + b"[]]}", 400),
    "many keys": (JSON, json.dumps(dict.fromkeys(map(str, range(10**5)))).encode(), 400),
    "no image": (JSON, b"{}", 400),
    "an image that is no text": (JSON, b'{"image": 3}', 400),
    "no base64": (JSON, b'{"image": "\xc3\xa9"}', 400),
    "no picture": (JSON, as_json(b"hello"), 400),
    "top_k of zero": (JSON, as_json(png(), top_k=0), 400),
    "top_k too large": (JSON, as_json(png(), top_k=10**30), 400),
    "top_k of text": (JSON, as_json(png(), top_k="5e3"), 400),
    "top_k of digits as text": (JSON, as_json(png(), top_k="5"), 400),
    "top_k and a half": (JSON, as_json(png(), top_k=2.5), 400),
    "top_k beyond all numbers": (JSON, as_json(png(), top_k=float("inf")), 400),
    "top_k of no number": (JSON, as_json(png(), top_k=float("nan")), 400),
    "top_k of truth": (JSON, as_json(png(), top_k=True), 400),
    "two images in JSON": (JSON, as_json(png(1))[:-1] + b", " + as_json(png(2))[1:], 400),
    "top_k twice": (JSON, as_json(png(), top_k=1)[:-1] + b', "top_k": 1}', 400),
    "wrong encoding": (JSON, b"\xff\xfe{}", 400),
    "nothing said of its kind": ({}, as_json(png()), 415),
    "another kind": ({"content-type": "text/plain"}, as_json(png()), 415),
    "a form without boundary": ({"content-type": "multipart/form-data"}, b"x", 400),
    "a form cut short": (FORM, form((b"image", FILE, png()))[:60], 400),
    "two images": (FORM, form((b"image", FILE, png()), (b"image", FILE, png())), 400),
    "many fields": (FORM, form(*[(b"f%d" % i, b"", b"") for i in range(50)]), 400),
    "top_k as a file": (FORM, form((b"image", FILE, png()), (b"top_k", FILE, b"3")), 400),
    "a set in a form": (FORM, form((b"image", FILE, png()), (b"forget", b"", b"")), 400),
    "claims too much": (JSON | {"content-length": "99999999"}, b"{}", 413),
    "claims nonsense": (JSON | {"content-length": "-5"}, b"{}", 413),
}


@pytest.mark.parametrize("name", BODIES)
def test_broken_body_is_refused_in_words(serve_app, book, name):
    app, service = serve_app()
    headers, body, status = BODIES[name]
    headers = headers | {"authorization": f"Bearer {book.tokens['school']}"}
    reply = asyncio.run(call(app, "POST", "/v1/classify", body, headers))
    assert reply.status == status, reply.body
    assert set(reply.json) == {"detail"}
    assert service.seats.count == 0


def test_body_of_brackets_does_not_stop_everybody():
    """Nine megabytes of them are refused in a fraction of the time that parsing would take."""
    body = b'{"image": [' + b"[]," * 3_000_000 + b"[]]}"
    began = time.process_time()
    with pytest.raises(Refusal, match="more than 100 values"):
        parse_json(body)
    refused = time.process_time() - began
    began = time.process_time()
    json.loads(body)
    assert refused < (time.process_time() - began) / 3


def test_body_that_grows_past_the_limit_is_stopped(serve_app, book):
    app, _ = serve_app(body_bytes=1000)
    headers = JSON | {"authorization": f"Bearer {book.tokens['school']}"}
    chunks = [b"x" * 400] * 100
    reply = asyncio.run(call(app, "POST", "/v1/classify", b"", headers, chunks=chunks))
    assert reply.status == 413


def test_client_that_hangs_loses_its_seat(serve_app, book):
    app, service = serve_app(body_seconds=0.1)
    headers = JSON | {"authorization": f"Bearer {book.tokens['school']}"}
    chunks = [b"{"] * 100

    async def hang():
        slow = call(app, "POST", "/v1/classify", b"", headers, chunks=chunks, pause=0.05)
        reply, other = await asyncio.gather(slow, classify(app, book.tokens["bank"], png()))
        return reply.status, other.status

    assert asyncio.run(hang()) == (408, 200)
    assert service.seats.count == 0
