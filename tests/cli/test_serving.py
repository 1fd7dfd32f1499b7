"""``wfilter serve`` and ``wfilter token`` up to the moment Ray would start."""

import json
import socket

import pytest

pytest.importorskip("fastapi", reason="needs pip install 'wfilter[serve]'")

from servers import NAMES, Book, make_run
from wfilter.cli import main as cli
from wfilter.serve import parse_policy
from wfilter.serve.tokens import parse_line


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("served") / "run")


def complaint(capsys, *words):
    assert cli.run(["serve", *map(str, words)]) == 1
    return capsys.readouterr().err


def test_token_prints_a_secret_and_lines_that_a_policy_takes(capsys):
    assert cli.run(["token", "--tenant", "museum"]) == 0
    text = capsys.readouterr().out
    lines = text.split("policy:\n")[1].replace("\n  ", "\n").strip()
    assert list(parse_policy(lines, NAMES).tenants) == ["museum"]
    assert cli.run(["token", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert parse_line(made["line"]).matches(made["token"])


def test_mistakes_are_told_before_ray_starts(run, tmp_path, capsys):
    book = Book(tmp_path / "policy.toml", {"museum": [1]})
    assert "no policy is given" in complaint(capsys, run)
    assert "Pass one of" in complaint(capsys, run, "--policy", book.path, "--playground")
    assert "not --host 0.0.0.0" in complaint(capsys, run, "--playground", "--host", "0.0.0.0")
    assert "does not exist" in complaint(capsys, tmp_path / "none", "--policy", book.path)
    assert "is not a file" in complaint(capsys, run, "--policy", tmp_path / "none.toml")
    assert "neither refuse nor serve" in complaint(
        capsys, run, "--policy", book.path, "--audit-failure", "ignore"
    )
    book.forget["museum"] = [77]
    book.write()
    words = complaint(capsys, run, "--policy", book.path)
    assert "line 2: tenant 'museum' forgets 77" in words


def test_engine_of_another_model_is_refused(run, tmp_path, capsys):
    book = Book(tmp_path / "policy.toml", {"museum": [1]})
    given = (run, "--policy", book.path, "--engine")
    assert "neither eager, compiled nor" in complaint(capsys, *given, "model.txt")
    assert "does not exist" in complaint(capsys, *given, tmp_path / "model.pt2")


def test_taken_port_is_told_at_once(run, tmp_path, capsys):
    book = Book(tmp_path / "policy.toml", {"museum": [1]})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = complaint(capsys, run, "--policy", book.path, "--port", port)
    assert "Pass another --port" in words


def test_folder_that_names_its_own_code_is_not_run(run, tmp_path, capsys):
    import shutil

    copy = shutil.copytree(run, tmp_path / "copy")
    text = (copy / "settings.toml").read_text().replace("wfilter:cnn-digits", "os:system")
    (copy / "settings.toml").write_text(text)
    assert "must not choose what is run" in complaint(capsys, copy, "--playground")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_exported_engine_answers_as_the_eager_one(run, tmp_path, suffix):
    import torch

    from wfilter.serve.engine import open_engine
    from wfilter.serve.settings import Settings

    path = tmp_path / f"model{suffix}"
    assert cli.run(["export", str(run), "--forget", "sets", "--out", str(path), "--quiet"]) == 0
    eager = open_engine(Settings(run=str(run)))
    other = open_engine(Settings(run=str(run), engine=str(path)))
    images = [torch.rand(1, 8, 8) for _ in range(5)]
    sets = [frozenset({i}) for i in range(5)]
    for a, b in zip(eager.answer(images, sets, [9] * 5), other.answer(images, sets, [9] * 5)):
        assert [name for name, _ in a.top] == [name for name, _ in b.top]
