"""Every kind of replica under Ray: its answers are those of the slow reference."""

import json

import pytest

from running import Oracle, Running, load
from wfilter.cli import main as cli

pytestmark = pytest.mark.slow
EXPORTS = {"onnx": ("model.onnx",), "graph": ("model.pt2",), "package": ("model.pt2", "--aoti")}


@pytest.fixture(params=["compiled", *EXPORTS])
def engine_option(request, run, tmp_path):
    """What to pass as ``--engine``, exported from the run if need be."""
    if request.param == "compiled":
        return request.param
    name, *words = EXPORTS[request.param]
    path = str(tmp_path / name)
    command = ["export", str(run), "--forget", "sets", "--out", path, "--quiet", *words]
    assert cli.run(command) == 0
    return path


def test_replica_of_every_kind_answers_as_the_oracle(run, tmp_path, engine, engine_option):
    server, oracle = Running(tmp_path, run, "--engine", engine_option), Oracle(engine)
    try:
        found = load(server, 600)
        records = server.records()
    finally:
        server.stop()
    assert {status for _, _, status, *_ in found} == {200}
    for tenant, image, _, body, *_ in found:
        assert oracle.agrees(json.loads(body), image, server.book.forget[tenant])
    assert len({record["batch_size"] for record in records}) > 1, "batches of several sizes"
