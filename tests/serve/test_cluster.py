"""A real server on loopback: Ray, its proxy, replicas that die, policies that change under load."""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from running import IMAGES, Oracle, Running, load
from servers import as_json
from wfilter.serve import Client, ServerError

pytestmark = pytest.mark.slow  # a server takes 10 to 60 seconds to start


@pytest.fixture(scope="module")
def server(tmp_path_factory, run):
    running = Running(tmp_path_factory.mktemp("cluster"), run)
    yield running
    running.stop()


def test_ten_thousand_requests_equal_the_oracle_one_by_one(server, engine):
    count = 10_000
    oracle, before = Oracle(engine), len(server.records())
    found = load(server, count)
    assert {status for _, _, status, *_ in found} == {200}, [f for f in found if f[2] != 200][:3]
    for tenant, image, _, body, *_ in found:
        assert oracle.agrees(json.loads(body), image, server.book.forget[tenant])
    records = server.records()[before:]
    assert len(records) == count
    assert max(record["batch_size"] for record in records) > 1, "requests share batches"


def test_policy_replaced_a_hundred_times_under_load(server, engine):
    """Every answer is right for a policy that was in force at some moment of its request."""
    oracle, versions = Oracle(engine), []
    before = dict(server.book.forget)

    def put(number):
        rng = random.Random(number)
        for tenant in server.book.forget:
            server.book.forget[tenant] = sorted(rng.sample(range(10), 3))
        began = time.time()
        server.book.write()
        versions.append((began, time.time(), dict(server.book.forget)))

    put(0)
    found = []
    loading = threading.Thread(target=lambda: found.extend(load(server, 4000)))
    loading.start()
    for number in range(1, 101):
        put(number)
        time.sleep(0.02)
    loading.join()
    server.book.forget.update(before)
    server.book.write()
    assert {status for _, _, status, *_ in found} == {200}
    # A policy is in force until the write of the next has ended, and that syncs to disk.
    ends = [*(finished for _, finished, _ in versions[1:]), float("inf")]
    shift = 0.05  # the clocks of a write and of a reader are not the same instant
    for tenant, image, _, body, asked, answered in found:
        in_force = [
            forget[tenant]
            for (began, _, forget), end in zip(versions, ends)
            if began <= answered + shift and asked - shift <= end
        ]
        answer = json.loads(body)
        assert any(oracle.agrees(answer, image, forget) for forget in in_force)


def test_wrong_and_revoked_tokens_are_refused(server):
    stranger = Client(f"http://127.0.0.1:{server.port}", "wf_0123456789abcdef_" + "0" * 64)
    with pytest.raises(ServerError, match="not valid") as refused:
        stranger.classify(IMAGES[0])
    assert refused.value.status == 401
    bank, line = server.client("bank"), server.book.lines["bank"]
    assert bank.classify(IMAGES[0])["tenant"] == "bank"
    server.book.lines["bank"] = line.replace(line[-8:], "00000000")
    server.book.write()
    with pytest.raises(ServerError, match="not valid"):
        bank.classify(IMAGES[0])
    server.book.lines["bank"] = line
    server.book.write()
    assert bank.classify(IMAGES[0])["tenant"] == "bank"


def test_ray_itself_refuses_whoever_lacks_its_token(server):
    """Ray's own ports are open to every address; its token keeps strangers from running code."""
    (found,) = {
        re.search(rb"--gcs[-_]address=([\w.]+:\d+)", title).group(1).decode()
        for title in server.descendants(b"raylet/raylet").values()
    }
    code = f"import ray; ray.init({found!r}, logging_level='error'); print('inside')"
    plain = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**plain, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "inside" not in done.stdout


def test_client_that_hangs_does_not_stop_the_others(server):
    head = (
        f"POST /v1/classify HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
        f"{server.book.tokens['school']}\r\nContent-Type: application/json\r\n"
        "Content-Length: 5000\r\n\r\n{"
    )
    hanging = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    try:
        for connection in hanging:
            connection.sendall(head.encode())
        for _ in range(5):
            assert server.client("bank").classify(IMAGES[0])["tenant"] == "bank"
    finally:
        for connection in hanging:
            connection.close()


def test_killed_replica_loses_no_request_silently_and_comes_back(server, engine):
    oracle, found = Oracle(engine), []
    loading = threading.Thread(target=lambda: found.extend(load(server, 6000)))
    loading.start()
    time.sleep(1.0)
    (victim,) = server.replicas()
    os.kill(victim, signal.SIGKILL)
    loading.join()
    server.wait(60)
    assert len(found) == 6000, "every request has an answer or an error"
    for tenant, image, status, body, *_ in found:
        if status == 200:
            assert oracle.agrees(json.loads(body), image, server.book.forget[tenant])
        elif status:
            assert status in (500, 503)
            assert json.loads(body).keys() == {"detail"}, "in our words, not in Ray's"
    assert victim not in server.replicas()
    for tenant in server.book.tokens:
        assert server.client(tenant).classify(IMAGES[0])["tenant"] == tenant


def test_headers_that_steer_ray_change_nothing(server):
    rays = {"x-request-timeout-seconds": "0.001", "x-request-id": "\xff\r\n".strip()}
    rays |= {"serve_multiplexed_model_id": "x", "x-session-id": "x"}
    token = {"authorization": f"Bearer {server.book.tokens['bank']}"}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for headers in ({}, rays):
        headers = {"content-type": "application/json", **token, **headers}
        connection.request("POST", "/v1/classify", as_json(IMAGES[0]), headers)
        reply = connection.getresponse()
        assert (reply.status, json.loads(reply.read())["tenant"]) == (200, "bank")
        assert reply.getheader("x-request-id") != "\xff"
    connection.close()


def test_heads_that_never_end_do_not_stop_the_others(server):
    hanging = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    try:
        for connection in hanging:
            connection.sendall(b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nX-Slow:")
        for _ in range(5):
            assert server.client("bank").classify(IMAGES[0])["tenant"] == "bank"
    finally:
        for connection in hanging:
            connection.close()


def test_no_log_of_ours_or_of_ray_holds_a_token(server):
    for tenant in server.book.tokens:
        server.client(tenant).classify(IMAGES[0])
    with pytest.raises(ServerError):
        Client(f"http://127.0.0.1:{server.port}", server.book.tokens["bank"]).classify(b"broken")
    titles = b" ".join(server.descendants(b"raylet/raylet").values())
    (session,) = set(re.findall(rb"--session[-_]dir=(\S+?)(?=[\0 ])", titles + b" "))
    files = [f for f in Path(session.decode(), "logs").rglob("*") if f.is_file()]
    files += [server.folder / "server.log", *(server.folder / "audit").iterdir()]
    assert len(files) > 5
    for file in files:
        content = file.read_bytes()
        for token in server.book.tokens.values():
            assert token.split("_")[2].encode() not in content, file


def test_server_prints_where_it_is_and_no_lines_of_ray(server):
    log, end = server.folder / "server.log", time.monotonic() + 60
    while not log.read_text() and time.monotonic() < end:  # it answers a little before it says so
        time.sleep(0.1)
    assert log.read_text().startswith("Serving at http://127.0.0.1:")


def test_metrics_are_exported_through_ray(server):
    server.client("bank").classify(IMAGES[0])
    ports = listening(server.descendants(b"DashboardAgent"))
    end, found = time.monotonic() + 60, ""
    while time.monotonic() < end and "ray_wfilter_requests" not in found:
        found = "".join(map(scraped, ports))
        time.sleep(1)
    assert re.search(r'ray_wfilter_requests[^\n]*tenant="bank"', found)
    assert "ray_wfilter_batch_size" in found


def listening(processes) -> list[int]:
    """TCP ports that these processes listen on."""
    sockets = set()
    for pid in processes:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(link))
    lines = [
        x.split()
        for name in ("tcp", "tcp6")
        for x in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    return [
        int(x[1].rpartition(":")[2], 16)
        for x in lines
        if x[3] == "0A" and f"socket:[{x[9]}]" in sockets
    ]


def scraped(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            return reply.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
