"""A real server in processes of its own, load on it, and an oracle for what it answers."""

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import torch

import reference
from servers import NAMES, Book, as_json, png
from wfilter.serve import Client
from wfilter.serve.images import decode

IMAGES = [png(seed) for seed in range(40)]
ROOT = Path(__file__).parents[1]
START_SECONDS = 400  # 20 on two idle cores; on busy ones a compiled engine took more than 150
WITH_PARENT = (sys.executable, str(ROOT / "tests/with_parent.py"), sys.executable, "-m")


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


class Answering:
    """A server at ``port`` with the tenants of ``book`` and an audit log inside ``folder``."""

    port: int
    folder: Path
    book: Book

    def alive(self) -> None:
        """Stop the test early where the server has ended."""

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.alive()
            try:
                if self.get("/readyz")["ready"]:
                    return
            except (OSError, ValueError, http.client.HTTPException):
                time.sleep(0.2)
        raise AssertionError([log.read_text() for log in self.folder.glob("*.log")])

    def get(self, path: str):
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(url, timeout=5) as reply:
            return json.load(reply)

    def client(self, tenant: str) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", self.book.tokens[tenant], timeout=60)

    def records(self) -> list[dict]:
        files = (self.folder / "audit").glob("*.jsonl")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


class Running(Answering):
    """``wfilter serve`` in a process of its own, with as many tenants as asked for."""

    def __init__(self, folder: Path, run: Path, *options: str, forget=None):
        self.port, self.folder = free_port(), folder
        chosen = forget or {"museum": [1, 7], "bank": [0, 8, 9], "school": []}
        more = "requests_per_second = 100000\nburst = 100000\n"
        self.book = Book(folder / "policy.toml", chosen, more=more)
        words = ["serve", str(run), "--policy", str(self.book.path), "--port", str(self.port)]
        self.log = (folder / "server.log").open("w")
        self.process = subprocess.Popen(
            [*WITH_PARENT, "wfilter", *words, "--audit", str(folder / "audit"), *options],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=self.log,
            stderr=self.log,
        )
        try:
            self.wait(START_SECONDS)
        except BaseException:  # nobody else would stop it: the test has nothing to call stop on
            self.stop()
            raise

    def alive(self) -> None:
        assert self.process.poll() is None, (self.folder / "server.log").read_text()

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
            self.process.wait()
            self.log.close()


class Oracle:
    """Probabilities by the slow reference, each image and set computed once."""

    def __init__(self, engine):
        self.engine, self.known = engine, {}

    def __call__(self, image: int, forget: tuple[int, ...]):
        if (image, forget) not in self.known:
            x = decode(IMAGES[image], self.engine.inputs)[None]
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


def load(server, count, threads=16):
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
