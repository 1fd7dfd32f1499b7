"""The client against servers that answer, refuse, or send it elsewhere."""

import http.server
import threading

import pytest

from servers import png
from wfilter.serve import Client, ServerError


@pytest.fixture
def elsewhere():
    """A server that sends every request on to another path of its own, and what it was asked."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.moved()

        def do_GET(self):
            self.moved()

        def moved(self):
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/stolen")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_token_does_not_follow_a_redirection(elsewhere):
    url, asked = elsewhere
    with pytest.raises(ServerError) as refused:
        Client(url, "wf_secret").classify(png())
    assert refused.value.status == 302
    assert asked == ["/v1/classify"]


def test_client_asks_with_a_path_or_bytes_and_is_told_why_not(serve_app, book, listen, tmp_path):
    url = listen(serve_app()[0])
    (tmp_path / "a.png").write_bytes(png())
    client = Client(url + "/", book.tokens["bank"])
    client.wait(10)
    answer = client.classify(tmp_path / "a.png", top_k=2)
    assert answer == client.classify(png(), top_k=2)
    assert answer["tenant"] == "bank"
    assert len(answer["top"]) == 2
    with pytest.raises(ServerError, match="no JPEG or PNG") as refused:
        client.classify(b"text")
    assert refused.value.status == 400


def test_date_as_retry_after_is_no_failure_of_the_client(listen):
    from starlette.responses import JSONResponse

    when = {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}
    client = Client(listen(JSONResponse({"detail": "busy"}, 503, when)), "wf_x")
    with pytest.raises(ServerError, match="busy") as refused:
        client.classify(b"")
    assert (refused.value.status, refused.value.retry_after) == (503, None)
