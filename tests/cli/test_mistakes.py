"""The one line that each mistake on the command line earns."""

import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import complaint, untrain_words
from wfilter import zoo
from wfilter.cli import main as cli


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


def test_a_folder_of_filters_does_not_choose_code_to_run(tmp_path):
    from wfilter.cli import jobs

    (tmp_path / "filters.safetensors").write_bytes(b"")
    (tmp_path / "settings.toml").write_text('model = "os:getcwd"\n')
    with pytest.raises(ValueError, match="names a model by its own code, os:getcwd"):
        jobs.open_filters(tmp_path)
