"""Whatever a client sends, the answer is one that the OpenAPI description names."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servers import as_json, call, png

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x))
fields = st.fixed_dictionaries(
    {}, optional={"image": values | st.just(json.loads(as_json(png()))["image"]), "top_k": values}
)
bodies = (
    st.binary(max_size=200)
    | values.map(lambda x: json.dumps(x).encode())
    | fields.map(lambda x: json.dumps(x).encode())
    | st.binary(max_size=300).map(as_json)
)
kinds = st.sampled_from(
    ["application/json", "multipart/form-data; boundary=x", "multipart/form-data", "text/html", ""]
)


@pytest.fixture
def application(serve_app, book):
    book.more = "burst = 100000\n"
    book.write()
    return serve_app()[0]


@given(body=bodies, kind=kinds, token=st.sampled_from(["bank", "school", "nobody"]))
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_answer_is_one_that_the_description_names(application, book, body, kind, token):
    described = application.openapi()["paths"]["/v1/classify"]["post"]["responses"]
    headers = {"content-type": kind, "authorization": f"Bearer {book.tokens.get(token, token)}"}
    reply = asyncio.run(call(application, "POST", "/v1/classify", body, headers))
    assert str(reply.status) in described
    assert reply.status != 500
    assert set(reply.json) == ({"top", "tenant", "policy"} if reply.status == 200 else {"detail"})
