"""Feature rows in files: saved and loaded with the alphas, whole or not at all."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import wfilter
from helpers import SETS, close, images, rerouted, tiny
from wfilter.files.checkpoint import digest_of


def rewritten(path, change):
    """The same file with tensors and facts changed, and a digest that fits."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["wfilter"])
    tensors = load_file(path)
    change(facts, tensors)
    facts.pop("digest")
    facts["digest"] = digest_of(facts, tensors)
    save_file(tensors, path, metadata={"wfilter": json.dumps(facts)})


@pytest.mark.parametrize("shared", [True, False])
def test_saved_rows_come_back_bit_for_bit(shared, tmp_path):
    wf, x = rerouted(shared=shared)
    again = wfilter.load(wf.save(tmp_path / "a.safetensors"), tiny("cnn"), example_input=x)
    assert again.feature_rows.head == wf.feature_rows.head
    for name, buffer in wf.feature_rows.named_buffers():
        assert torch.equal(buffer, getattr(again.feature_rows, name))
    assert torch.equal(again(x, forget=SETS), wf(x, forget=SETS))


def test_files_without_rows_keep_the_format_that_older_versions_read(tmp_path):
    wf, x = rerouted()
    wf.feature_rows = None
    path = wf.save(tmp_path / "a.safetensors")
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["wfilter"])["format"] == 1
    assert wfilter.load(path, tiny("cnn"), example_input=x).feature_rows is None


def test_a_loaded_model_bakes_before_its_first_forward(tmp_path):
    wf, x = rerouted()
    again = wfilter.load(wf.save(tmp_path / "a.safetensors"), tiny("cnn"), example_input=x)
    close(again.bake(forget=1).eval()(x), wf.bake(forget=1).eval()(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda facts, tensors: tensors.pop("feature_rows/rests"),
        lambda facts, tensors: facts.pop("feature_rows"),
        lambda facts, tensors: facts.update(feature_rows="nowhere.weight"),
        lambda facts, tensors: facts.update(format=1),
        lambda facts, tensors: tensors.update({"feature_rows/rests": -torch.ones(4, 8)}),
        lambda facts, tensors: tensors.update({"feature_rows/more": torch.zeros(4, 8)}),
        lambda facts, tensors: tensors["feature_rows/means"].fill_(torch.nan),
    ],
)
def test_damaged_rows_are_refused_and_leave_the_model_as_it_was(change, tmp_path):
    wf, _ = rerouted()
    path = wf.save(tmp_path / "a.safetensors")
    rewritten(path, change)
    model = tiny("cnn")
    with pytest.raises(ValueError, match=r"a\.safetensors|rests|head"):
        wfilter.load(path, model, example_input=images(4, 3, 8, 8))
    wfilter.apply_weight_filtering(model, example_input=images(4, 3, 8, 8))  # no filters are left


def test_rows_without_sureness_answer_as_they_did(tmp_path):
    wf, x = rerouted()
    path = wf.save(tmp_path / "a.safetensors")
    rewritten(path, lambda facts, tensors: tensors.pop("feature_rows/sureness"))
    again = wfilter.load(path, tiny("cnn"), example_input=x)
    wf.feature_rows.sureness.fill_(1)
    assert torch.equal(again(x, forget=SETS), wf(x, forget=SETS))


def test_rows_of_the_kind_that_moved_features_are_refused_in_words(tmp_path):
    wf, x = rerouted()
    path = wf.save(tmp_path / "a.safetensors")
    rewritten(path, lambda facts, tensors: facts.update(format=2))
    with pytest.raises(ValueError, match=r"earlier kind.*Make the rows again"):
        wfilter.load(path, tiny("cnn"), example_input=x)
