"""Heads of requests that are too long or never end, and ones that are neither."""

import http.client
import json
import socket

import pytest

from servers import JSON, as_json, png
from wfilter.serve import heads


@pytest.fixture
def port(serve_app, listen, monkeypatch):
    monkeypatch.setitem(heads.config.HTTP_PROTOCOLS, "auto", "")
    heads.bound_heads()
    return int(listen(serve_app()[0]).rpartition(":")[2])


def closed(connection) -> bool:
    """Whether the server hangs up without a word, and soon."""
    connection.settimeout(30)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


BEGUN = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow:"


@pytest.mark.parametrize("sent", [b"", b"G", BEGUN], ids=["nothing", "a letter", "half a head"])
def test_connection_whose_head_does_not_end_is_closed(port, monkeypatch, sent):
    monkeypatch.setattr(heads, "SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(sent)
        assert closed(connection)


def test_later_head_on_a_connection_has_its_own_time(port, monkeypatch):
    first = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    first.request("GET", "/healthz")
    assert json.loads(first.getresponse().read()) == {"status": "ok"}
    monkeypatch.setattr(heads, "SECONDS", 0.3)
    first.sock.sendall(BEGUN)
    assert closed(first.sock)
    first.close()


@pytest.mark.parametrize("piece", [b"a", b"a: b\r\n"], ids=["one long header", "many headers"])
def test_head_that_grows_past_the_limit_is_cut_off(port, piece):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(BEGUN)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(piece * (2**27 // len(piece)))


def test_large_bodies_in_small_pieces_and_later_requests_pass(port, book, monkeypatch):
    monkeypatch.setattr(heads, "MOST_BYTES", 1000)
    body = as_json(png(size=64))
    assert len(body) > 5 * heads.MOST_BYTES
    headers = JSON | {"Authorization": f"Bearer {book.tokens['bank']}"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for _ in range(3):
        pieces = [body[i : i + 500] for i in range(0, len(body), 500)]
        connection.request("POST", "/v1/classify", iter(pieces), headers, encode_chunked=True)
        reply = connection.getresponse()
        assert (reply.status, json.loads(reply.read())["tenant"]) == (200, "bank")
    connection.close()
