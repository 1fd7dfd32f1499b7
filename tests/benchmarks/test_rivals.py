import functools
import json
import sys

import pytest
import torch

import references
import rivals
from wfilter import data, metrics


@pytest.fixture
def run(monkeypatch, tmp_path):
    def call(script, *options):
        monkeypatch.setattr(sys, "argv", [script.__name__, "--out", str(tmp_path), *options])
        script.main()

    call(references, "--recipe", "digits", "--each", "3", "--epochs", "3")
    monkeypatch.setattr(references, "RESULTS", tmp_path / "results")
    return lambda *options: call(rivals, "--recipe", "digits", *options)


def test_rivals_are_stored_with_what_was_tried_and_are_not_run_twice(run, tmp_path, capsys):
    chosen = ("--classes", "3", "--methods", "original", "retrained", "delete")
    for _ in range(2):
        run(*chosen)
    log = (tmp_path / "rivals.jsonl").read_text().splitlines()
    original, retrained, deleted = map(json.loads, log)
    assert original["test_forget"] > 80
    assert retrained["test_forget"] == retrained["train_forget"] == 0
    assert retrained["seconds"] is None  # references.py tells how long it took
    best = max(deleted["tried"], key=lambda tried: tried["score"])
    assert deleted["lr"] == best["lr"]
    assert len(deleted["tried"]) == 3
    model = torch.load(tmp_path / "rivals" / deleted["file"], weights_only=False)
    test = data.batches(data.load("digits", "test", size=8, channels=1), 500)
    both = metrics.set_accuracies(*metrics.collect_logits(model, test), 3)
    assert [round(100 * each, 2) for each in both] == [
        deleted["test_retain"],
        deleted["test_forget"],
    ]
    run("--collect")
    table = (tmp_path / "results" / "rivals_digits.md").read_text().splitlines()
    assert [line.split()[1] for line in table[-3:]] == ["original", "retrained", "delete"]
    assert f"{deleted['lr']:g} |" in table[-1]


def test_a_reference_that_is_lacking_is_asked_for_with_its_command(run):
    with pytest.raises(SystemExit, match=r"references\.py --recipe digits --seed 0 --each 5"):
        run("--classes", "5", "--methods", "retrained")


def test_the_script_runs_every_rival_that_there_is():
    assert {*rivals.METHODS} == {*rivals.baselines.METHODS}


def test_half_precision_is_for_training_alone(run, tmp_path, monkeypatch):
    precise = {}
    for name in ("projection", "random_labels"):
        original = rivals.baselines.METHODS[name]

        @functools.wraps(original)
        def watched(*args, _name=name, _original=original, **settings):
            precise[_name] = not torch.is_autocast_enabled("cpu")
            return _original(*args, **settings)

        monkeypatch.setitem(rivals.baselines.METHODS, name, watched)
    run("--bfloat16", "--classes", "3", "--methods", "projection", "random_labels")
    assert precise == {"projection": True, "random_labels": False}
    lines = [json.loads(line) for line in (tmp_path / "rivals.jsonl").read_text().splitlines()]
    assert all(line["bfloat16"] and line["test_forget"] < 5 for line in lines)
