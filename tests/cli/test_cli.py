"""The commands, run as a user types them, and the one line each mistake earns."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from wfilter import load_exported, load_pruned, zoo
from wfilter.cli import main as cli
from wfilter.cli import settings

COMMANDS = ("plan", "untrain", "evaluate", "explain", "bake", "export", "bench", "demo")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "base.safetensors"
    save_file(zoo.create("cnn-digits").state_dict(), path)
    return path


@pytest.fixture(scope="module")
def run(weights, tmp_path_factory):
    """A folder that untrain wrote."""
    folder = tmp_path_factory.mktemp("run") / "filters"
    assert cli.run([*untrain_words(weights), "--out", str(folder), "--quiet"]) == 0
    return folder


def untrain_words(weights, *more):
    words = ["untrain", "wfilter:cnn-digits", "--weights", str(weights), "--dataset", "digits"]
    soft = ["--set", "gates=soft", "--set", "start=none", "--set", "depth=1.0"]
    return [*words, "--recipe", "distill", *soft, "--steps", "2", "--batch-size", "8", *more]


def complaint(capsys, *words, code=1):
    """The one line that a mistaken call prints."""
    assert cli.run([str(word) for word in words]) == code
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1, printed
    assert "Traceback" not in printed
    assert printed.startswith("wfilter: ")
    return printed


# ---- commands -----------------------------------------------------------------------------------


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


# ---- mistakes -----------------------------------------------------------------------------------


def test_wrong_model_name_lists_the_closest(capsys):
    assert "resnet18" in complaint(capsys, "plan", "timm:resnt18")


def test_model_without_source_says_how_to_write_it(capsys):
    assert "Write timm:resnet18" in complaint(capsys, "plan", "resnet18")


def test_unknown_command_and_missing_argument_are_usage_errors(capsys):
    assert "plan" in complaint(capsys, "pln", code=2)
    assert "MODEL" in complaint(capsys, "plan", code=2)


def test_random_weights_are_refused(capsys):
    line = complaint(capsys, "untrain", "wfilter:cnn-digits", "--dataset", "digits", "--json")
    assert "--weights" in line


def test_missing_weights_file_is_named(capsys, tmp_path):
    words = ["untrain", "wfilter:cnn-digits", "--weights", tmp_path / "no.safetensors"]
    assert "no.safetensors is not a file" in complaint(capsys, *words, "--dataset", "digits")


@pytest.mark.parametrize(
    "words", [("--batch-size", "0"), ("--shift", "-1"), ("--validation", "2"), ("--steps", "many")]
)
def test_numbers_out_of_range_are_usage_errors(capsys, weights, words):
    assert f"'{words[0]}'" in complaint(capsys, *untrain_words(weights, *words), code=2)


def test_device_that_is_not_there_is_refused_before_any_work(capsys, weights, tmp_path):
    line = complaint(capsys, *untrain_words(weights, "--device", "warp", "--out", tmp_path / "a"))
    assert "--device warp cannot be used" in line
    assert "--device cpu" in line
    assert not (tmp_path / "a").exists()


def test_unknown_network_of_the_demo_is_named(capsys, tmp_path):
    line = complaint(capsys, "demo", "--model", "resnet18-mnist", "--out", tmp_path)
    assert "only cnn-digits and vit-digits" in line


def test_size_given_for_one_run_is_forgotten_by_the_next(capsys, weights):
    assert "does not take images of (1, 4, 4)" in complaint(
        capsys, *untrain_words(weights, "--size", "4")
    )
    assert zoo.input_format("wfilter:cnn-digits").size == 8


def test_missing_data_folder_is_named(capsys, weights, monkeypatch, tmp_path):
    monkeypatch.delenv("WFILTER_DATA", raising=False)
    words = untrain_words(weights)
    words[words.index("digits")] = "mnist"
    assert "WFILTER_DATA" in complaint(capsys, *words)
    assert "is not a folder" in complaint(capsys, *words, "--data", tmp_path / "no")


def test_unknown_dataset_is_named(capsys, weights):
    words = untrain_words(weights)
    words[words.index("digits")] = "digitz"
    assert "Did you mean 'digits'" in complaint(capsys, *words)


def test_dataset_given_as_data_folder_is_explained(capsys, weights):
    assert "--dataset digits" in complaint(capsys, *untrain_words(weights, "--data", "digits"))


def test_wrong_class_count_shows_both_shapes(capsys, weights):
    line = complaint(capsys, *untrain_words(weights, "--num-classes", "12"))
    assert "(10, 128)" in line
    assert "(12, 128)" in line


@pytest.mark.parametrize(("word", "text"), [("12", "outside 0..9"), ("cat", "not one of 0, 1")])
def test_class_out_of_range_or_unknown(capsys, run, tmp_path, word, text):
    words = ["bake", run, "--forget", word, "--out", tmp_path / "a.safetensors"]
    assert text in complaint(capsys, *words)


def test_corrupt_filter_file_is_refused(capsys, run, tmp_path):
    broken = tmp_path / "filters.safetensors"
    content = bytearray((run / "filters.safetensors").read_bytes())
    content[-3] ^= 1
    broken.write_bytes(content)
    (tmp_path / "settings.toml").write_bytes((run / "settings.toml").read_bytes())
    assert "damaged" in complaint(capsys, "evaluate", tmp_path)


def test_file_that_holds_no_filters_is_refused_before_a_model_is_asked_for(capsys, tmp_path):
    (tmp_path / "filters.safetensors").write_bytes(b"hello")
    assert "cannot be read" in complaint(capsys, "evaluate", tmp_path / "filters.safetensors")


def test_filters_of_another_base_model_are_refused(capsys, run, tmp_path):
    other = tmp_path / "other.safetensors"
    torch.manual_seed(1)
    save_file(zoo.create("cnn-digits").state_dict(), other)
    assert "another base model" in complaint(capsys, "evaluate", run, "--weights", other)


def test_missing_folder_says_how_to_make_one(capsys, tmp_path):
    assert "wfilter untrain" in complaint(capsys, "evaluate", tmp_path / "nowhere")


def test_place_that_cannot_be_written_is_named(capsys, weights, tmp_path):
    (tmp_path / "file").write_text("in the way")
    line = complaint(capsys, *untrain_words(weights, "--out", tmp_path / "file" / "run"))
    assert "file" in line
    assert "Check the path" in line


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_no_write_permission_is_named(capsys, weights, tmp_path):
    tmp_path.chmod(0o500)
    assert "Permission" in complaint(capsys, *untrain_words(weights, "--out", tmp_path / "run"))


def test_bad_settings_file_is_named(capsys, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("steps = ")
    assert "not valid TOML" in complaint(capsys, "untrain", "--config", path)
    path.write_text("stepz = 3")
    assert "'stepz' that is unknown" in complaint(capsys, "untrain", "--config", path)
    path.write_text("batch_size = true")
    assert "batch_size takes a value, not a switch" in complaint(
        capsys, "untrain", "--config", path
    )


def test_a_recipe_without_steps_is_solved_and_its_card_says_so(weights, tmp_path):
    words = ["untrain", "wfilter:cnn-digits", "--weights", str(weights), "--dataset", "digits"]
    assert cli.run([*words, "--recipe", "linear", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    card = (tmp_path / "run" / "README.md").read_text()
    assert "- recipe: linear, solved\n" in card
    assert "On the images the rows were made from" in card
    again = ["untrain", "--config", str(tmp_path / "run" / "settings.toml")]
    assert cli.run([*again, "--out", str(tmp_path / "again"), "--quiet"]) == 0
    files = [(tmp_path / name / "filters.safetensors").read_bytes() for name in ("run", "again")]
    assert files[0] == files[1]


def test_bad_recipe_settings_are_named(capsys, weights):
    assert "learning_rate" in complaint(capsys, *untrain_words(weights, "--set", "learning_rat=1"))
    assert "KEY=VALUE" in complaint(capsys, *untrain_words(weights, "--set", "gates"))
    assert "is not float" in complaint(capsys, *untrain_words(weights, "--set", "margin=wide"))
    assert "recipe='papr'" in complaint(capsys, *untrain_words(weights, "--recipe", "papr"))


def test_report_to_compare_with_must_be_one(capsys, run, tmp_path):
    assert "does not exist" in complaint(capsys, "evaluate", run, "--against", tmp_path / "a.json")
    (tmp_path / "a.json").write_text("{}")
    assert "is not a report" in complaint(capsys, "evaluate", run, "--against", tmp_path / "a.json")


def test_report_for_other_classes_is_refused_before_anything_is_measured(
    capsys, run, tmp_path, monkeypatch
):
    earlier = tmp_path / "earlier.json"
    words = ["evaluate", str(run), "--metrics", "accuracy", "--classes"]
    assert cli.run([*words, "3", "--out", str(earlier), "--quiet"]) == 0
    module = sys.modules["wfilter.evaluation.run"]
    monkeypatch.setattr(module, "evaluate", lambda *_, **__: pytest.fail("measured"))
    said = complaint(capsys, *words, "3,4", "--against", earlier)
    assert "this report is for the classes 3, 4" in said
    assert "the other for 3." in said


def test_wrong_suffix_of_an_export_is_refused(capsys, run, tmp_path):
    assert ".pt2 nor .onnx" in complaint(capsys, "export", run, "--out", tmp_path / "a.pth")


def test_without_words_the_help_is_printed_once(capsys):
    assert cli.run([]) == 2
    printed = capsys.readouterr()
    assert printed.out.count("Start with: wfilter demo") == 1
    assert printed.err == ""


def test_usage_errors_name_the_help_of_their_command(capsys):
    line = complaint(capsys, "evaluate", "a", "--rival", "logit_mask", code=2)
    assert "--rivals" in line
    assert "Try wfilter evaluate --help" in line


def test_several_lines_of_a_message_become_sentences(capsys, run, tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "other.safetensors")
    line = complaint(capsys, "evaluate", run, "--weights", tmp_path / "other.safetensors")
    assert "Only in the file: a. Load it into the model" in line
    torch.manual_seed(1)
    save_file(zoo.create("cnn-digits").state_dict(), tmp_path / "b.safetensors")
    line = complaint(capsys, "evaluate", run, "--weights", tmp_path / "b.safetensors")
    assert "; fingerprint of this VGG" in line


@pytest.mark.parametrize("words", [("plan", "timm:resnet18"), ("bench", "wfilter:cnn-digits")])
def test_negative_class_counts_are_refused(capsys, words):
    assert "not a number of classes" in complaint(capsys, *words, "--num-classes", "-1")


def test_broken_regular_expression_is_named(capsys):
    line = complaint(capsys, "plan", "wfilter:cnn-digits", "--targets", "re:(")
    assert "'re:(' is not a regular expression" in line


def test_places_for_results_are_checked_before_any_work(capsys, run, tmp_path, monkeypatch):
    from wfilter.cli import jobs

    monkeypatch.setattr(jobs, "open_filters", lambda *_, **__: pytest.fail("work has begun"))
    for words in (["evaluate", run, "--out", tmp_path / "a.txt"], ["explain", run]):
        nowhere = [*words[:2], "--out", tmp_path / "no" / "a.json"]
        assert "is not a folder. Make it first" in complaint(capsys, *nowhere)
        assert "Name a file in it" in complaint(capsys, *words[:2], "--out", tmp_path)
    assert "must end in .json, .md, .tex" in complaint(
        capsys, "evaluate", run, "--out", tmp_path / "a.txt"
    )


def test_baked_file_in_a_missing_folder_is_named_once(capsys, run, tmp_path):
    path = tmp_path / "no" / "a.safetensors"
    line = complaint(capsys, "bake", run, "--forget", "3", "--out", path)
    assert line.startswith(f"wfilter: {path} was not written (No such file")


@pytest.fixture
def copied(run, tmp_path):
    """A copy of the run's folder, to be damaged."""
    return shutil.copytree(run, tmp_path / "copy")


def test_unknown_layer_lists_the_closest(capsys, run, tmp_path):
    words = ["explain", run, "--out", tmp_path / "a.html", "--per-class", "1", "--classes", "3"]
    assert "features.3.weight" in complaint(capsys, *words, "--layer", "featurs.3")


def test_damaged_history_is_named(capsys, copied):
    (copied / "history.json").write_text("{")
    line = complaint(capsys, "evaluate", copied, "--metrics", "accuracy", "--classes", "3")
    assert "history.json is damaged" in line
    assert "Delete it" in line


def test_weights_that_were_moved_are_asked_for(capsys, copied):
    text = (copied / "settings.toml").read_text()
    (copied / "settings.toml").write_text(text.replace("base.safetensors", "moved.safetensors"))
    line = complaint(capsys, "evaluate", copied)
    assert "moved.safetensors is not a file" in line
    assert "pass --weights" in line


def test_size_that_the_model_does_not_take_is_named(capsys, run, tmp_path):
    words = ["export", run, "--size", "4", "--out", tmp_path / "a.pt2"]
    assert "does not take images of 4 x 4" in complaint(capsys, *words)


def test_one_word_in_a_settings_file_stands_for_a_list_of_one(run, tmp_path):
    text = (run / "settings.toml").read_text()
    (tmp_path / "a.toml").write_text(f'targets = "features.0.weight"\n{text}')
    words = ["untrain", "--config", str(tmp_path / "a.toml"), "--out", str(tmp_path / "a")]
    assert cli.run([*words, "--quiet"]) == 0
    assert list(load_file(tmp_path / "a" / "filters.safetensors")) == ["features.0.weight"]


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="lacks its source"):
        cli.run(["plan", "resnet18", "--debug"])


def test_unforeseen_errors_point_to_debug(capsys, monkeypatch):
    def fail(*_, **__):
        raise KeyError("odd")

    monkeypatch.setattr(zoo, "build", fail)
    assert "--debug" in complaint(capsys, "plan", "wfilter:cnn-digits")


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


def test_a_folder_of_filters_does_not_choose_code_to_run(tmp_path):
    from wfilter.cli import jobs

    (tmp_path / "filters.safetensors").write_bytes(b"")
    (tmp_path / "settings.toml").write_text('model = "os:getcwd"\n')
    with pytest.raises(ValueError, match="names a model by its own code, os:getcwd"):
        jobs.open_filters(tmp_path)
