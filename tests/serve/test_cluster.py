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
import torch

import reference
from servers import NAMES, Book, as_json, png
from wfilter.serve import Client, ServerError
from wfilter.serve.images import decode

pytestmark = pytest.mark.slow  # a server takes 10 to 60 seconds to start
IMAGES = [png(seed) for seed in range(40)]
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


class Running:
    """``wfilter serve`` in a process of its own, with as many tenants as asked for."""

    def __init__(self, folder: Path, run: Path, *options: str, forget=None):
        self.port, self.folder = free_port(), folder
        chosen = forget or {"museum": [1, 7], "bank": [0, 8, 9], "school": []}
        more = "requests_per_second = 100000\nburst = 100000\n"
        self.book = Book(folder / "policy.toml", chosen, more=more)
        words = ["serve", str(run), "--policy", str(self.book.path), "--port", str(self.port)]
        self.log = (folder / "server.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "wfilter", *words, "--audit", str(folder / "audit"), *options],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=self.log,
            stderr=self.log,
        )
        self.wait(150)

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            try:
                if self.get("/readyz")["ready"]:
                    return
            except (OSError, ValueError, http.client.HTTPException):
                time.sleep(0.2)
        raise AssertionError((self.folder / "server.log").read_text())

    def get(self, path: str):
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(url, timeout=5) as reply:
            return json.load(reply)

    def client(self, tenant: str) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", self.book.tokens[tenant], timeout=60)

    def records(self) -> list[dict]:
        files = (self.folder / "audit").glob("*.jsonl")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def descendants(self, word: bytes) -> dict[int, bytes]:
        """Processes that this server started, directly or not, by a word of their command."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                    parents[int(entry.name)] = int(fields[1]), (entry / "cmdline").read_bytes()

        def ours(pid):
            while pid in parents and pid != self.process.pid:
                pid = parents[pid][0]
            return pid == self.process.pid

        return {p: title for p, (_, title) in parents.items() if word in title and ours(p)}

    def replicas(self) -> list[int]:
        return list(self.descendants(b"ServeReplica:wfilter"))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.log.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory, run):
    running = Running(tmp_path_factory.mktemp("cluster"), run)
    yield running
    running.stop()


class Oracle:
    """Probabilities by the slow reference, each image and set computed once."""

    def __init__(self, engine):
        self.engine, self.known = engine, {}

    def __call__(self, image: int, forget: tuple[int, ...]):
        if (image, forget) not in self.known:
            x = decode(IMAGES[image], self.engine.facts)[None]
            sets = self.engine.sets([frozenset(forget)])
            logits = reference.logits(self.engine.wf, x, sets)[0].detach()
            masked = logits.masked_fill(sets[0], -torch.inf).softmax(0)
            self.known[image, forget] = masked.tolist()
        return self.known[image, forget]

    def agrees(self, answer, image: int, forget) -> bool:
        expected = self(image, tuple(forget))
        shown = {entry["class"]: entry["probability"] for entry in answer["top"]}
        return not {NAMES[i] for i in forget} & set(shown) and all(
            abs(expected[NAMES.index(name)] - value) < 1e-5 for name, value in shown.items()
        )


def load(server, count, threads=16, choose=None):
    """``count`` requests of random tenants; what was asked and answered, in no order."""
    found, lock, left = [], threading.Lock(), iter(range(count))

    def work(seed):
        rng, connection = random.Random(seed), None
        while True:
            with lock:
                if next(left, None) is None:
                    break
            tenant, image = rng.choice(list(server.book.tokens)), rng.randrange(len(IMAGES))
            headers = {"content-type": "application/json"}
            headers["authorization"] = f"Bearer {server.book.tokens[tenant]}"
            began = time.time()
            try:
                if connection is None:
                    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                connection.request("POST", "/v1/classify", as_json(IMAGES[image]), headers)
                reply = connection.getresponse()
                status, body = reply.status, reply.read()
            except (OSError, http.client.HTTPException) as error:
                status, body = 0, repr(error).encode()
                connection.close()
                connection = None
            with lock:
                found.append((tenant, image, status, body, began, time.time()))
        if connection is not None:
            connection.close()

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return found


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
        else:
            assert status in (0, 500, 503)
            assert b"Traceback" not in body
    assert victim not in server.replicas()
    for tenant in server.book.tokens:
        assert server.client(tenant).classify(IMAGES[0])["tenant"] == tenant


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
