"""schemathesis reads the server's own OpenAPI description and sends what it allows and forbids."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers import png

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
images = st.integers(0, 5).map(png)
schemathesis.openapi.format("base64-image", images.map(lambda x: base64.b64encode(x).decode()))
schemathesis.openapi.format("binary", images)


@pytest.fixture
def operations(serve_app, book, listen):
    book.more = "burst = 100000\n"
    book.write()
    schema = schemathesis.openapi.from_url(listen(serve_app()[0]) + "/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=str)
def test_server_does_what_its_description_says(operations, book, mode):
    """What fits the description is answered, what does not is refused, and nothing is a 500."""
    headers = {"Authorization": f"Bearer {book.tokens['bank']}"}
    for operation in operations:
        if mode is schemathesis.GenerationMode.NEGATIVE and operation.method == "get":
            continue  # without parameters there is nothing that could be wrong

        @settings(max_examples=80, deadline=None, database=None)
        @given(case=operation.as_strategy(mode))
        def ask(case):
            # A wrong value of a form, such as an empty list, may be sent as nothing at all.
            form = case.media_type == "multipart/form-data"
            beside = [schemathesis.checks.negative_data_rejection] if form else []
            case.call_and_validate(headers=headers, excluded_checks=beside)

        ask()
