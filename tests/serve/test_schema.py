"""schemathesis reads the server's own OpenAPI description and sends what it allows and forbids."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from running import Running
from servers import png

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
MODES = list(schemathesis.GenerationMode)
images = st.integers(0, 5).map(png)
schemathesis.openapi.format("base64-image", images.map(lambda x: base64.b64encode(x).decode()))
schemathesis.openapi.format("binary", images)


@pytest.fixture
def operations(serve_app, book, listen):
    book.more = "burst = 100000\n"
    book.write()
    return described(listen(serve_app()[0]))


def described(url):
    return [
        found.ok()
        for found in schemathesis.openapi.from_url(url + "/openapi.json").get_all_operations()
    ]


def check(operations, token, mode, examples):
    """What fits the description is answered, what does not is refused, and nothing is a 500."""
    headers = {"Authorization": f"Bearer {token}"}
    for operation in operations:
        if mode is schemathesis.GenerationMode.NEGATIVE and operation.method == "get":
            continue  # without parameters there is nothing that could be wrong

        @settings(max_examples=examples, deadline=None, database=None)
        @given(case=operation.as_strategy(mode))
        def ask(case):
            # A wrong value of a form, such as an empty list, may be sent as nothing at all.
            form = case.media_type == "multipart/form-data"
            beside = [schemathesis.checks.negative_data_rejection] if form else []
            case.call_and_validate(headers=headers, excluded_checks=beside)

        ask()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_server_does_what_its_description_says(operations, book, mode):
    check(operations, book.tokens["bank"], mode, 80)


@pytest.mark.slow
def test_server_behind_rays_proxy_does_what_its_description_says(tmp_path, run):
    """The whole of it: our front, Ray's proxy, and a replica in a process of its own."""
    server = Running(tmp_path, run)
    try:
        operations = described(f"http://127.0.0.1:{server.port}")
        assert "POST /v1/classify" in {operation.label for operation in operations}
        for mode in MODES:
            check(operations, server.book.tokens["bank"], mode, 60)
        statuses = {record["status"] for record in server.records()}
    finally:
        server.stop()
    assert {200, 400} <= statuses, "both kinds of requests got through to the replica"
