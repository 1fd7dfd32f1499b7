"""The audit log of a server: what is in it, and what happens where it cannot be written."""

import asyncio
import json
import os
import shutil
import subprocess

import pytest

from servers import call, classify, png


@pytest.mark.parametrize("on_failure", ["refuse", "serve"])
def test_full_disk_refuses_or_serves_as_told_and_is_never_silent(
    serve_app, book, monkeypatch, tmp_path, on_failure
):
    app, service = serve_app(audit=str(tmp_path), audit_failure=on_failure)

    def full(file, data):
        raise OSError(28, "No space left on device")

    async def around():
        with monkeypatch.context() as patch:
            patch.setattr("wfilter.serve.audit.os.write", full)
            during = await classify(app, book.tokens["bank"], png())
            ready = await call(app, "GET", "/readyz")
        return during, ready, await classify(app, book.tokens["bank"], png())

    during, ready, after = asyncio.run(around())
    refuse = on_failure == "refuse"
    assert during.status == (503 if refuse else 200)
    assert ready.status == (503 if refuse else 200)
    assert ready.json["audit_failing"]
    assert after.status == 200
    assert service.audit.lost == (0 if refuse else 1)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB; only root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("on_failure", ["refuse", "serve"])
def test_disk_that_fills_up_and_is_cleared_again(serve_app, book, small_disk, on_failure):
    """Every answer has its line in the log, or is counted as one without."""
    app, service = serve_app(audit=str(small_disk), audit_failure=on_failure)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 60 * 1024)  # 4 KiB are left: about twenty lines

    async def ask(count):
        asked = [await classify(app, book.tokens["bank"], png()) for _ in range(count)]
        return [reply.status for reply in asked]

    async def around():
        before = await ask(60)
        ballast.unlink()
        return before, await ask(5)

    before, after = asyncio.run(around())
    lines = [json.loads(x) for x in (small_disk / "test.jsonl").read_text().splitlines()]
    assert before[0] == 200
    assert before[-1] == (503 if on_failure == "refuse" else 200)
    assert after == [200] * 5
    assert len(lines) + service.audit.lost == (before + after).count(200)
    assert (service.audit.lost > 0) == (on_failure == "serve")
    service.audit.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_disk_that_is_full_from_the_start_answers_nothing(serve_app, book, tmp_path):
    (tmp_path / "test.jsonl").symlink_to("/dev/full")
    app, _ = serve_app(audit=str(tmp_path))
    reply = asyncio.run(classify(app, book.tokens["bank"], png()))
    assert reply.status == 503
    assert reply.headers["retry-after"] == "5"
    assert reply.json == {"detail": "the request could not be logged and is refused."}


def test_audit_log_has_all_it_should_and_nothing_it_should_not(serve_app, book, tmp_path):
    app, _ = serve_app(audit=str(tmp_path))
    image = png()

    async def some():
        await classify(app, book.tokens["bank"], image)
        await classify(app, "wf_nobody", image)
        await classify(app, book.tokens["bank"], b"broken")

    asyncio.run(some())
    text = (tmp_path / "test.jsonl").read_text()
    good, stranger, broken = (json.loads(line) for line in text.splitlines())
    assert {"time", "tenant", "policy", "set", "batch", "batch_size", "latency_ms"} < set(good)
    assert (good["status"], broken["status"]) == (200, 400)
    assert stranger["tenant"] is None
    assert stranger["status"] == 401
    secret = book.tokens["bank"].split("_")
    assert not any(part in text for part in (*secret[1:], "digit-", "probability"))
    assert os.stat(tmp_path / "test.jsonl").st_mode & 0o007 == 0
