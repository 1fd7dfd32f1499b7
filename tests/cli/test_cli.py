"""The commands, run as a user types them, and what they write."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from wfilter import load_exported, load_pruned, zoo
from wfilter.cli import main as cli
from wfilter.cli import settings

COMMANDS = ("plan", "untrain", "evaluate", "explain", "bake", "export", "bench", "demo")


def test_plan_shows_every_target(capsys):
    assert cli.run(["plan", "wfilter:cnn-digits", "--exclude", "*.bias"]) == 0
    printed = capsys.readouterr().out
    assert "features.0.weight" in printed
    assert "5 targets (5 fused), 320 units" in printed


def test_json_is_all_that_is_printed(capsys):
    assert cli.run(["plan", "wfilter:cnn-digits", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["targets"][0]["path"] == "fused"


def test_quiet_prints_nothing(capsys):
    assert cli.run(["plan", "wfilter:cnn-digits", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command, capsys):
    assert cli.run([command, "--help"]) == 0
    assert f"Example: wfilter {command}" in " ".join(capsys.readouterr().out.split())


def test_untrain_writes_filters_history_settings_and_card(run):
    names = {path.name for path in run.iterdir()}
    assert names == {"README.md", "filters.safetensors", "history.json", "settings.toml"}
    assert len(json.loads((run / "history.json").read_text())["records"]) == 2


def test_printed_settings_repeat_the_run_bit_for_bit(run, tmp_path, capsys):
    again = tmp_path / "again"
    assert cli.run(["untrain", "--config", str(run / "settings.toml"), "--out", str(again)]) == 0
    first, second = (load_file(f / "filters.safetensors") for f in (run, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    printed = capsys.readouterr().out
    stored = settings.read(run / "settings.toml")
    assert stored["seed"] == 0
    assert settings.write(stored).splitlines()[-1] in printed


def test_strict_minds_rows_that_fall_short(weights, tmp_path, capsys):
    words = ["untrain", "wfilter:cnn-digits", "--weights", str(weights), "--dataset", "digits"]
    out = tmp_path / "run"
    gates = ("--steps", "1", "--set", "stages=soft 1")
    assert cli.run([*words, *gates, "--out", str(out), "--strict"]) == 3
    assert "rows fall short" in capsys.readouterr().out
    assert "rows fall short" in (out / "README.md").read_text()


def test_the_default_recipe_writes_its_choices_and_does_the_same_again(weights, tmp_path):
    words = ["untrain", "wfilter:cnn-digits", "--weights", str(weights), "--dataset", "digits"]
    out = tmp_path / "run"
    assert cli.run([*words, "--steps", "1", "--out", str(out), "--strict"]) == 0
    assert "Every row met the bar, by feature rows" in (out / "README.md").read_text()
    text = (out / "settings.toml").read_text()
    assert text.startswith("# ")
    assert "no step sees" in text
    assert settings.read(out / "settings.toml")["recipe"]["stages"]
    again = ["untrain", "--config", str(out / "settings.toml"), "--out", str(tmp_path / "again")]
    assert cli.run([*again, "--quiet"]) == 0
    first, second = (load_file(f / "filters.safetensors") for f in (out, tmp_path / "again"))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-3)


def test_options_win_over_the_settings_file(run, tmp_path):
    words = ["untrain", "--config", str(run / "settings.toml"), "--set", "learning_rate=0.5"]
    assert cli.run([*words, "--steps", "1", "--out", str(tmp_path / "a"), "--quiet"]) == 0
    stored = settings.read(tmp_path / "a" / "settings.toml")
    assert stored["steps"] == 1
    assert stored["recipe"]["learning_rate"] == 0.5
    assert stored["recipe"]["gates"] == settings.read(run / "settings.toml")["recipe"]["gates"]


def test_evaluate_needs_only_the_folder(run, tmp_path, capsys):
    words = ["evaluate", str(run), "--metrics", "accuracy", "--classes", "3", "--json"]
    assert cli.run([*words, "--out", str(tmp_path / "report.md"), "--card"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]
    assert "Acc_f" in (tmp_path / "report.md").read_text()
    card = (run / "README.md").read_text()
    assert card.count("## Figures") == card.count("## What it protects against") == 1
    assert "| Acc_r" in card
    assert "Not measured" not in card


def test_the_card_of_a_run_says_how_the_filters_were_made(run, weights):
    card = (run / "README.md").read_text()
    assert "- base model: wfilter:cnn-digits with base.safetensors" in card
    assert "- recipe: distill, 2 steps, 8 images a step" in card
    assert str(weights.parent) not in card, "no folder of the machine it was made on"


def test_evaluate_compares_with_an_earlier_report(run, tmp_path, capsys):
    earlier = tmp_path / "earlier.json"
    words = ["evaluate", str(run), "--metrics", "accuracy", "--classes", "3"]
    assert cli.run([*words, "--out", str(earlier), "--quiet"]) == 0
    assert cli.run([*words, "--against", str(earlier)]) == 0
    printed = capsys.readouterr().out
    assert f"Against {earlier}:" in printed
    assert "difference" in printed
    assert cli.run([*words, "--against", str(earlier), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["against"]
    assert lines
    assert all(line["here"] == line["there"] for line in lines)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt2", ".onnx"])
def test_bake_prunes_into_every_format(run, tmp_path, capsys, suffix):
    out = tmp_path / f"small{suffix}"
    words = ["bake", str(run), "--forget", "3,5", "--snap", "0.5", "--prune", "--out", str(out)]
    assert cli.run(words) == 0
    assert "parameters became" in capsys.readouterr().out
    assert out.is_file()
    if suffix == ".safetensors":
        x = torch.rand(2, 1, 8, 8)
        assert load_pruned(out)(x).shape == (2, 10)


def test_bake_writes_a_plain_state_dict(run, weights, tmp_path, capsys):
    out = tmp_path / "baked.safetensors"
    assert cli.run(["bake", str(run), "--forget", "3,5", "--out", str(out)]) == 0
    assert "a plain model without 3, 5" in capsys.readouterr().out
    baked, base = load_file(out), load_file(weights)
    assert list(baked) == list(base)
    zoo.load_weights(zoo.create("cnn-digits"), out)


def test_export_and_bench_and_explain_run(run, tmp_path, capsys):
    out, page = tmp_path / "model.pt2", tmp_path / "page.html"
    assert cli.run(["export", str(run), "--out", str(out)]) == 0
    assert "inputs images, forget" in capsys.readouterr().out
    assert cli.run(["bench", "wfilter:cnn-digits", "--batch-size", "4", "--rounds", "2"]) == 0
    assert "mixed labels" in capsys.readouterr().out
    words = ["explain", str(run), "--out", str(page), "--per-class", "2", "--classes", "3"]
    assert cli.run([*words, "--layer", "features.3", "--quiet"]) == 0
    text = page.read_text()
    assert "gates of features.3.weight" in text
    assert "<h1>What wfilter:cnn-digits forgets" in text
    for fact in ("wfilter:cnn-digits", "digits", "distill, 2 steps"):
        assert f"<dd>{fact}</dd>" in text, "the header names model, data and recipe"


@pytest.mark.slow
def test_export_compiles_ahead_of_time(run, tmp_path, capsys):
    out = tmp_path / "model.pt2"
    assert cli.run(["export", str(run), "--out", str(out), "--aoti"]) == 0
    assert "inputs images, forget" in capsys.readouterr().out
    answer = load_exported(out)(torch.rand(3, 1, 8, 8), torch.tensor([3, -1, 5]))
    assert answer.shape == (3, 10)


@pytest.mark.slow
def test_torchrun_untrains_in_two_processes(run, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["untrain", "--config", str(run / "settings.toml"), "--out", str(tmp_path / "two")]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "-m", "wfilter", *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("[recipe]") == 1, "only the first process prints"
    first = load_file(run / "filters.safetensors")
    second = load_file(tmp_path / "two" / "filters.safetensors")
    assert {n: t.shape for n, t in first.items()} == {n: t.shape for n, t in second.items()}
