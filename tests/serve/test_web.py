"""The application in process, without a Ray cluster: what a client may and may not do."""

import asyncio
import json
import re
import time

import pytest
import torch

import reference
from servers import NAMES, as_json, call, classify, png
from wfilter.serve.images import decode
from wfilter.serve.service import Question

JSON = {"content-type": "application/json"}


def oracle(engine, image, forget):
    """The best classes by the slow reference: one image, gates multiplied by hand, then masked."""
    x = decode(image, engine.facts)[None]
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


@pytest.mark.parametrize("field", ["forget", "tenant", "classes", "policy"])
def test_client_cannot_name_its_own_set(serve_app, book, field):
    app, _ = serve_app()
    reply = asyncio.run(classify(app, book.tokens["bank"], png(), **{field: []}))
    assert reply.status == 400
    assert "decided by the token" in reply.json["detail"]


def test_query_and_headers_change_nothing(serve_app, book):
    app, _ = serve_app()
    headers = JSON | {"authorization": f"Bearer {book.tokens['bank']}", "x-tenant": "school"}

    async def both():
        body = as_json(png(), top_k=10)
        plain = await classify(app, book.tokens["bank"], png(), top_k=10)
        return plain, await call(app, "POST", "/v1/classify?forget=", body, headers)

    plain, other = asyncio.run(both())
    assert other.json == plain.json


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


def test_wrong_secret_of_a_known_id_is_refused_and_soon_slowed_down(serve_app, book):
    app, _ = serve_app()
    wrong = book.tokens["bank"][:-64] + "0" * 64

    async def tries():
        found = [(await classify(app, wrong, png())).status for _ in range(7)]
        return [*found, (await classify(app, book.tokens["museum"], png())).status]

    assert asyncio.run(tries()) == [401] * 5 + [429] * 2 + [200]


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


# ---- bodies -------------------------------------------------------------------------------------


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
    "wrong encoding": (JSON, b"\xff\xfe{}", 400),
    "nothing said of its kind": ({}, as_json(png()), 415),
    "another kind": ({"content-type": "text/plain"}, as_json(png()), 415),
    "a form without boundary": ({"content-type": "multipart/form-data"}, b"x", 400),
    "a form cut short": (FORM, form((b"image", FILE, png()))[:60], 400),
    "two images": (FORM, form((b"image", FILE, png()), (b"image", FILE, png())), 400),
    "many fields": (FORM, form(*[(b"f%d" % i, b"", b"") for i in range(50)]), 400),
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


# ---- limits -------------------------------------------------------------------------------------


def test_tenant_that_asks_too_often_is_told_when_to_come_back(serve_app, book):
    book.more = "burst = 3\nrequests_per_second = 0.1\n"
    book.write()
    app, _ = serve_app()

    async def often():
        replies = [await classify(app, book.tokens["bank"], png()) for _ in range(4)]
        return [*replies, await classify(app, book.tokens["museum"], png())]

    replies = asyncio.run(often())
    assert [r.status for r in replies] == [200, 200, 200, 429, 200]
    assert 1 <= int(replies[3].headers["retry-after"]) <= 10


def test_full_server_says_so_at_once_and_when_to_come_back(serve_app, book):
    app, service = serve_app(seats=4, seats_per_tenant=4, batch_wait=0.2)

    async def many():
        names = list(book.forget) * 4
        return await asyncio.gather(*(classify(app, book.tokens[n], png()) for n in names))

    async def warm_then_many():
        for name in book.forget:
            await classify(app, book.tokens[name], png())
        return await many()

    replies = asyncio.run(warm_then_many())
    statuses = sorted(r.status for r in replies)
    assert statuses == [200] * 4 + [503] * 8
    assert all(r.headers["retry-after"] == "1" for r in replies if r.status == 503)
    assert service.seats.count == 0


def test_images_that_take_long_to_decode_do_not_make_other_tenants_wait(
    serve_app, book, monkeypatch
):
    app, _ = serve_app()

    def slow(content, facts, pixels):
        if content == b"large":
            time.sleep(0.3)
            content = png()
        return decode(content, facts, pixels)

    monkeypatch.setattr("wfilter.serve.service.decode", slow)

    async def around():
        for name in ("bank", "museum"):  # the first scrypt of each is not what is asked here
            await classify(app, book.tokens[name], png())
        large = [
            asyncio.create_task(classify(app, book.tokens["bank"], b"large")) for _ in range(12)
        ]
        await asyncio.sleep(0.1)
        quick = await classify(app, book.tokens["museum"], png())
        waiting = sum(not task.done() for task in large)
        return quick.status, waiting, {reply.status for reply in await asyncio.gather(*large)}

    status, waiting, statuses = asyncio.run(around())
    assert (status, statuses) == (200, {200})
    assert waiting >= 8, "the quick one overtook them"


def test_answer_that_takes_too_long_is_given_up(serve_app, book, monkeypatch):
    app, service = serve_app(answer_seconds=0.1)
    monkeypatch.setattr(service, "_run", lambda questions: time.sleep(0.4))
    assert asyncio.run(classify(app, book.tokens["bank"], png())).status == 503


# ---- failures -----------------------------------------------------------------------------------


def test_failure_inside_shows_nothing_of_the_inside(serve_app, book, monkeypatch, tmp_path):
    app, service = serve_app(audit=str(tmp_path))

    def fail(questions):
        raise RuntimeError("secret path /etc/shadow")

    monkeypatch.setattr(service, "_run", fail)
    reply = asyncio.run(classify(app, book.tokens["bank"], png()))
    assert reply.status == 500
    assert reply.json == {"detail": "the server failed. Its log says how."}
    assert json.loads((tmp_path / "test.jsonl").read_text())["status"] == 500


def test_image_without_finite_logits_fails_alone_not_its_batch(serve_app, engine):
    from dataclasses import replace

    def forward(images, sets):
        logits = engine.forward(images, sets).clone()
        logits[0, 3] = torch.nan
        return logits

    service = serve_app()[1]
    service.engine = replace(engine, forward=forward)
    question = Question(decode(png(), engine.facts), frozenset({1}), 3)

    async def both():
        asked = (service.ask(question), service.ask(question))
        return await asyncio.gather(*asked, return_exceptions=True)

    bad, good = asyncio.run(both())
    assert "no finite numbers" in str(bad)
    assert good.batch_size == 2
    assert good.ranked == engine.answer([question.image] * 2, [question.forget] * 2, [3, 3])[1]


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
