import json

import pytest
import torch
from safetensors.torch import load_file

from wfilter.cli import demo
from wfilter.cli import main as cli


def test_short_demo_prints_tables_and_writes_a_folder_that_evaluate_reads(tmp_path, capsys):
    words = ["demo", "--model", "cnn-digits", "--epochs", "1", "--steps", "2", "--no-pages"]
    assert cli.run([*words, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for word in ("original", "wfilter", "logit mask", "retrained", "forgets", "What to try next"):
        assert word in printed
    folder = tmp_path / "cnn-digits"
    assert {"base.safetensors", "filters.safetensors", "settings.toml"} <= {
        path.name for path in folder.iterdir()
    }
    assert "| logit mask | all 10 |" in (folder / "README.md").read_text()
    assert cli.run(["evaluate", str(folder), "--metrics", "accuracy", "--quiet"]) == 0
    again = ["untrain", "--config", str(folder / "settings.toml"), "--out", str(tmp_path / "b")]
    assert cli.run([*again, "--quiet"]) == 0
    first, second = (load_file(f / "filters.safetensors") for f in (folder, tmp_path / "b"))
    assert all(torch.equal(first[name], second[name]) for name in first), "settings repeat the run"


@pytest.mark.slow
@pytest.mark.parametrize("name", demo.MODELS)
def test_demo_forgets_every_class_and_keeps_the_others(name, tmp_path, capsys):
    assert cli.run(["demo", "--model", name, "--out", str(tmp_path), "--json"]) == 0
    (outcome,) = json.loads(capsys.readouterr().out)
    lines = {line["method"]: line for line in outcome["lines"]}
    assert lines["wfilter"]["forget"] == 0
    assert lines["wfilter"]["retain"] > lines["original"]["retain"] - 0.01
    assert lines["retrained"]["forget"] == 0
    assert all(row["after"] != row["forget"] for row in outcome["batch"])
    assert (tmp_path / name / "page.html").is_file()
    assert (tmp_path / name / "history.png").is_file()
