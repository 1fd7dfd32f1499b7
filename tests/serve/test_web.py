"""The application in process, without a Ray cluster: what a client may and may not do."""

import asyncio
import json
import re
import time
from dataclasses import replace

import pytest
import torch

import reference
from servers import JSON, NAMES, as_json, call, classify, png
from wfilter.serve.images import decode


def oracle(engine, image, forget):
    """The best classes by the slow reference: one image, gates multiplied by hand, then masked."""
    x = decode(image, engine.inputs)[None]
    sets = engine.sets([frozenset(forget)])
    logits = reference.logits(engine.wf, x, sets)[0].detach()
    return logits.masked_fill(sets[0], -torch.inf).softmax(0)


def agrees(reply, engine, image, forget):
    expected = oracle(engine, image, forget)
    for entry in reply.json["top"]:
        index = NAMES.index(entry["class"])
        assert index not in forget
        assert entry["probability"] == pytest.approx(float(expected[index]), abs=1e-5)
    return True


def test_answers_of_all_tenants_equal_the_oracle_and_share_batches(
    serve_app, book, engine, tmp_path
):
    app, _ = serve_app(audit=str(tmp_path / "audit"), batch_wait=0.05)
    images = [png(seed) for seed in range(24)]
    names = [list(book.forget)[i % 3] for i in range(24)]

    async def all_at_once():
        asked = [classify(app, book.tokens[n], x, top_k=10) for n, x in zip(names, images)]
        return await asyncio.gather(*asked)

    replies = asyncio.run(all_at_once())
    for reply, name, image in zip(replies, names, images):
        assert reply.status == 200
        assert reply.json["tenant"] == name
        assert len(reply.json["top"]) == 10 - len(book.forget[name])
        assert sum(e["probability"] for e in reply.json["top"]) == pytest.approx(1)
        assert agrees(reply, engine, image, book.forget[name])
    records = [
        json.loads(line) for line in (tmp_path / "audit/test.jsonl").read_text().splitlines()
    ]
    shared = {r["batch"] for r in records if r["tenant"] == "bank"}
    assert shared & {r["batch"] for r in records if r["tenant"] == "museum"}


def test_forbidden_class_stays_out_even_where_its_gates_do_nothing(serve_app, book, engine):
    app, _ = serve_app()

    async def many():
        asked = [classify(app, book.tokens["bank"], png(seed), top_k=20) for seed in range(40)]
        return await asyncio.gather(*asked)

    for reply in asyncio.run(many()):
        assert not {NAMES[i] for i in book.forget["bank"]} & set(reply.names)


@pytest.mark.parametrize("far", [0.0, 200.0, 1e30])
def test_forbidden_class_stays_out_where_allowed_ones_have_no_probability_left(engine, far):
    """Equal logits, or ones so far below the best that float32 gives them the probability 0."""
    logits = torch.full((1, 10), -far)
    logits[0, 4] = 0.0
    forget = frozenset({0, 1, 2})
    served = replace(engine, forward=lambda images, sets: logits)
    (ranked,) = served.answer([torch.zeros(1, 8, 8)], [forget], [20])
    names = [name for name, _ in ranked.top]
    assert set(names) == set(NAMES) - {NAMES[i] for i in forget}
    assert names[0] == NAMES[3 if far == 0 else 4]
    assert sum(p for _, p in ranked.top) == pytest.approx(1)


@pytest.mark.parametrize("field", ["forget", "tenant", "classes", "policy"])
def test_client_cannot_name_its_own_set(serve_app, book, field):
    app, _ = serve_app()
    reply = asyncio.run(classify(app, book.tokens["bank"], png(), **{field: []}))
    assert reply.status == 400
    assert "decided by the token" in reply.json["detail"]


QUERIES = ("forget=", "forget=[]&tenant=school", "_method=PUT", "authorization=Bearer+{school}")
HEADERS = (
    {"x-tenant": "school", "tenant": "school", "forget": "[]"},
    {"x-http-method-override": "PUT", "x-original-url": "/v1/classify?forget="},
    {"x-forwarded-user": "school", "x-forwarded-authorization": "Bearer {school}"},
    {"proxy-authorization": "Bearer {school}", "x-authorization": "Bearer {school}"},
    {"cookie": "authorization=Bearer {school}; token={school}; tenant=school"},
    {"serve_multiplexed_model_id": "school", "x-padding": "a" * 60_000},
)


@pytest.mark.parametrize("query", ["", *QUERIES])
@pytest.mark.parametrize("headers", [{}, *HEADERS], ids=lambda h: ", ".join(h) or "none")
def test_query_and_headers_change_nothing(serve_app, book, query, headers):
    app, _ = serve_app()
    mine = JSON | {"authorization": f"Bearer {book.tokens['bank']}"}
    more = {name: value.format(**book.tokens) for name, value in headers.items()}
    path = f"/v1/classify?{query.format(**book.tokens)}"

    async def both():
        plain = await classify(app, book.tokens["bank"], png(), top_k=10)
        return plain, await call(app, "POST", path, as_json(png(), top_k=10), mine | more)

    plain, other = asyncio.run(both())
    assert plain.json["tenant"] == "bank"
    assert other.json == plain.json


@pytest.mark.parametrize(
    "form",
    ["Bearer {bank}, Bearer {school}", "Bearer {bank} {school}", "Bearer {bank}\0", "Token {bank}"],
)
def test_anything_but_one_token_is_refused(serve_app, book, form):
    app, _ = serve_app()
    headers = JSON | {"authorization": form.format(**book.tokens)}
    reply = asyncio.run(call(app, "POST", "/v1/classify", as_json(png()), headers))
    assert reply.status == 401


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer x",
        "Basic abc",
        "Bearer wf_0123456789abcdef_" + "0" * 64,
        "Bearer " + "é" * 40,
    ],
)
def test_stranger_is_refused_alike_whatever_the_token(serve_app, authorization):
    app, _ = serve_app()
    headers = JSON | ({} if authorization is None else {"authorization": authorization})
    reply = asyncio.run(call(app, "POST", "/v1/classify", as_json(png()), headers))
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json == {"detail": "the token is not valid."}


@pytest.mark.parametrize("names", [("bank", "school"), ("school", "bank"), ("bank", "bank")])
def test_request_with_two_tokens_is_refused(serve_app, book, names):
    """A proxy that looks at one of them must not be passed by the other."""
    app, _ = serve_app()
    both = [("authorization", f"Bearer {book.tokens[name]}") for name in names]
    reply = asyncio.run(call(app, "POST", "/v1/classify", as_json(png()), [*JSON.items(), *both]))
    assert reply.status == 401


def test_wrong_secret_of_a_known_id_is_refused_and_soon_slowed_down(serve_app, book, tmp_path):
    app, service = serve_app(audit=str(tmp_path / "audit"))
    wrong = book.tokens["bank"][:-64] + "0" * 64

    async def tries():
        found = [(await classify(app, wrong, png())).status for _ in range(7)]
        return [*found, (await classify(app, book.tokens["museum"], png())).status]

    assert asyncio.run(tries()) == [401] * 5 + [429] * 2 + [200]
    lines = (tmp_path / "audit/test.jsonl").read_text().splitlines()
    logged = sum(json.loads(line).get("count", 0) for line in lines)
    assert logged + service._strangers == 7, "those that are slowed down are counted as well"


def test_revoked_token_is_refused_at_once_though_it_was_remembered(serve_app, book):
    app, _ = serve_app()

    async def revoke():
        before = await classify(app, book.tokens["bank"], png())
        del book.forget["bank"]
        book.write()
        return before, await classify(app, book.tokens["bank"], png())

    before, after = asyncio.run(revoke())
    assert (before.status, after.status) == (200, 401)


def test_known_token_is_checked_in_microseconds(serve_app, book):
    _, service = serve_app()

    async def timed():
        policy = service.policy.current()
        header = f"Bearer {book.tokens['bank']}"
        await service._admitted(header, policy)
        began = time.perf_counter()
        for _ in range(200):
            await service._admitted(header, service.policy.current())
        return (time.perf_counter() - began) / 200

    assert asyncio.run(timed()) < 0.001


def test_policy_replaced_under_load_is_in_force_from_one_request_to_the_next(
    serve_app, book, engine
):
    app, _ = serve_app()
    image = png()

    async def replaced():
        for number in range(20):
            book.forget["school"] = [number % 10]
            asked = asyncio.create_task(classify(app, book.tokens["museum"], image))
            book.write()
            reply = await classify(app, book.tokens["school"], image, top_k=10)
            assert agrees(reply, engine, image, [number % 10])
            assert (await asked).status == 200

    asyncio.run(replaced())


# ---- around it ----------------------------------------------------------------------------------


def test_health_readiness_and_description(serve_app):
    app, _ = serve_app()

    async def look():
        return [
            await call(app, "GET", p) for p in ("/healthz", "/readyz", "/openapi.json", "/docs")
        ]

    health, ready, schema, docs = asyncio.run(look())
    assert (health.status, ready.status, docs.status) == (200, 200, 200)
    assert ready.json["policy"]
    path = schema.json["paths"]["/v1/classify"]["post"]
    assert set(path["responses"]) >= {"200", "400", "401", "413", "429", "503"}
    assert set(path["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
    assert not re.search(rb"https?://(?!\.\.\.)", docs.body), "the page needs no network"


def test_playground_is_not_there_unless_asked_for(serve_app):
    app, _ = serve_app()
    for path in ("/playground", "/playground/classify"):
        assert asyncio.run(call(app, "GET", path)).status == 404
        assert asyncio.run(call(app, "POST", path)).status == 404


@pytest.mark.parametrize(
    "path",
    ["/v1/classify/", "//v1/classify", "/V1/classify", "/v1/classify/school", "/v1/../v1/classify"],
)
def test_path_that_only_looks_like_ours_is_not_found(serve_app, book, path):
    app, _ = serve_app()
    headers = JSON | {"authorization": f"Bearer {book.tokens['bank']}"}
    assert asyncio.run(call(app, "POST", path, as_json(png()), headers)).status == 404


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_other_methods_are_refused(serve_app, method):
    app, _ = serve_app()
    reply = asyncio.run(call(app, method, "/v1/classify"))
    assert reply.status == 405
    assert set(reply.json) == {"detail"}
