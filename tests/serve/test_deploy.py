"""The application file of the docs on a Ray cluster: two nodes on loopback, one of which dies."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import yaml

from running import ROOT, Answering, Oracle, free_port, load
from servers import Book
from wfilter.serve import front

pytestmark = pytest.mark.slow


class Cluster:
    """Two raylets in processes of their own, guarded by a token of Ray's."""

    def __init__(self, log):
        self.dashboard, self.folder = free_port(), tempfile.mkdtemp(prefix="wf")
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.env |= {front.VARIABLE: front.CALLBACK, "OMP_NUM_THREADS": "1"}
        # Else Ray looks for its head under the address of this machine, not on loopback.
        self.env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Else a proxy asks the replicas of its own node alone as long as they can keep up.
        self.env["RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING"] = "0"
        self.env["RAY_worker_niceness"] = "0"
        script = str(ROOT / "tests/two_nodes.py")
        self.process = subprocess.Popen(
            [sys.executable, script, str(self.dashboard), self.folder],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert self.process.stdout.readline() == "two nodes\n"

    def serve(self, *words: str, env=None) -> subprocess.CompletedProcess:
        """Ray's own command ``serve``."""
        command = [str(Path(sys.executable).with_name("serve")), *words]
        command += ["--address", f"http://127.0.0.1:{self.dashboard}"]
        env = {**self.env, **(env or {})}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)

    def kill_second_node(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "one node\n"

    def stop(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.stdout.close()
            shutil.rmtree(self.folder, ignore_errors=True)


class Deployed(Answering):
    """The file in docs/serving.md with paths and ports of this test, and nothing else changed."""

    def __init__(self, folder: Path, run: Path):
        self.port, self.folder = free_port(), folder
        more = "requests_per_second = 100000\nburst = 100000\n"
        self.book = Book(folder / "policy.toml", {"museum": [1, 7], "school": []}, more=more)
        text = (ROOT / "docs/serving.md").read_text().split("```yaml\n")[1].split("```")[0]
        config = yaml.safe_load(text)
        (application,) = config["applications"]
        application["args"] |= {"run": str(run), "policy": str(self.book.path), "replicas": 2}
        application["args"]["audit"] = str(folder / "audit")
        config |= {"proxy_location": "HeadOnly"}  # two nodes of one machine share its ports
        config |= {"http_options": {"host": "127.0.0.1", "port": self.port}}
        self.file = folder / "serve.yaml"
        self.file.write_text(yaml.safe_dump(config))


@pytest.fixture
def cluster(tmp_path):
    with (tmp_path / "cluster.log").open("w") as log:
        started = Cluster(log)
        yield started
        started.stop()


def test_deployed_file_answers_from_two_nodes_and_from_one_when_the_other_dies(
    cluster, tmp_path, run, engine
):
    deployed, oracle = Deployed(tmp_path, run), Oracle(engine)
    stranger = cluster.serve("deploy", str(deployed.file), env={"RAY_AUTH_TOKEN": "0" * 64})
    assert stranger.returncode != 0, "Ray takes no application from whoever lacks its token"
    done = cluster.serve("deploy", str(deployed.file))
    assert done.returncode == 0, done.stderr
    deployed.wait(150)
    until(lambda: len(list((tmp_path / "audit").glob("*.jsonl"))) == 2, 120)

    found = load(deployed, 1500)
    assert {status for _, _, status, *_ in found} == {200}
    check(found, oracle, deployed)
    counts = [len(f.read_text().splitlines()) for f in (tmp_path / "audit").glob("*.jsonl")]
    assert len(counts) == 2, "a replica on each node, for each has one core"
    assert min(counts) > 100

    loading = threading.Thread(target=lambda: found.extend(load(deployed, 3000)))
    loading.start()
    time.sleep(1)
    cluster.kill_second_node()
    loading.join()
    assert len(found) == 4500, "every request has an answer or an error"
    check(found, oracle, deployed)
    found = load(deployed, 300)
    assert {status for _, _, status, *_ in found} == {200}
    check(found, oracle, deployed)


def until(true, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.2)


def check(found, oracle, deployed) -> None:
    for tenant, image, status, body, *_ in found:
        if status == 200:
            assert oracle.agrees(json.loads(body), image, deployed.book.forget[tenant])
        elif status:
            assert json.loads(body).keys() == {"detail"}
