"""`wfilter audit`: a checkpoint of anybody's in one line, and mistakes in words."""

import json

import pytest
from safetensors.torch import save_file

from wfilter import zoo
from wfilter.cli import main as cli


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("audit") / "unlearned-3.safetensors"
    save_file(dict(zoo.create("cnn-digits").state_dict()), path)
    return path


def words(weights, *more):
    start = ["audit", "wfilter:cnn-digits", "--weights", str(weights), "--dataset", "digits"]
    return [*start, "--images", "100", *more]


def test_a_checkpoint_is_audited_in_one_line(weights, tmp_path, capsys):
    page = tmp_path / "audit.html"
    pattern = str(weights).replace("-3", "-{class}")
    assert cli.run(words(pattern, "--classes", "3", "--json", "--out", str(page))) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["classes"] == [3]
    assert "3" in told["details"]["verdict"]["model"]
    assert "Verdicts" in page.read_text()


def test_mistakes_are_told_before_any_work(weights, tmp_path, capsys):
    assert cli.run(words(weights)) != 0
    assert "say which with --classes" in capsys.readouterr().err
    assert cli.run(words(weights, "--classes", "3,4")) != 0
    assert "one model for 2 classes" in capsys.readouterr().err
    assert cli.run(words(weights, "--classes", "3", "--out", str(tmp_path / "a.pdf"))) != 0
    assert "must end in .html, .json" in capsys.readouterr().err
