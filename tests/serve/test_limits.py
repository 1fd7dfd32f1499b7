"""One tenant cannot take the server away from the others, and what fails shows no insides."""

import asyncio
import json
import threading
import time

import torch

from servers import classify, png
from wfilter.serve.images import decode
from wfilter.serve.service import DECODERS_PER_TENANT, Question


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

    def slow(content, inputs, pixels):
        if content == b"large":
            time.sleep(0.3)
            content = png()
        return decode(content, inputs, pixels)

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


def test_client_that_hangs_up_keeps_its_turn_until_its_image_is_decoded(
    serve_app, book, monkeypatch
):
    """Else whoever asks and hangs up, again and again, would have every thread."""
    app, service = serve_app()
    go, lock, begun, most = threading.Event(), threading.Lock(), [0], [0]

    def slow(content, inputs, pixels):
        with lock:
            begun[0] += 1
            most[0] = max(most[0], begun[0])
        assert go.wait(60)
        with lock:
            begun[0] -= 1
        return decode(content, inputs, pixels)

    async def around():
        await classify(app, book.tokens["bank"], png())
        monkeypatch.setattr("wfilter.serve.service.decode", slow)
        for _ in range(5):
            impatient = asyncio.create_task(classify(app, book.tokens["bank"], png()))
            await asyncio.sleep(0.1)
            impatient.cancel()
            await asyncio.gather(impatient, return_exceptions=True)
        seats, threads = service.seats.count, begun[0]
        go.set()
        return seats, threads, (await classify(app, book.tokens["bank"], png())).status

    assert asyncio.run(around()) == (0, DECODERS_PER_TENANT, 200)
    assert most[0] == DECODERS_PER_TENANT


def test_answer_that_takes_too_long_is_given_up(serve_app, book, monkeypatch):
    app, service = serve_app(answer_seconds=0.1)
    monkeypatch.setattr(service, "_run", lambda questions: time.sleep(0.4))
    assert asyncio.run(classify(app, book.tokens["bank"], png())).status == 503


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
    question = Question(decode(png(), engine.inputs), frozenset({1}), 3)

    async def both():
        asked = (service.ask(question), service.ask(question))
        return await asyncio.gather(*asked, return_exceptions=True)

    bad, good = asyncio.run(both())
    assert "no finite numbers" in str(bad)
    assert good.batch_size == 2
    assert good.ranked == engine.answer([question.image] * 2, [question.forget] * 2, [3, 3])[1]
