"""Save and load: a round trip, or a clear error and nothing half-loaded."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import wfilter
from helpers import apply, assert_same_state, randomise, snapshot, tiny
from wfilter.files import checkpoint

LABELS = torch.tensor([3, -1, 0, 1])


@pytest.fixture
def saved(wf, tmp_path):
    return wf.save(tmp_path / "filters.safetensors")


def contents(path):
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["wfilter"])
        return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def rewrite(path, facts, alphas):
    """A file as save would write it for these facts, digest included."""
    facts = {key: value for key, value in facts.items() if key != "digest"}
    facts["digest"] = checkpoint.digest_of(facts, alphas)
    save_file(alphas, path, metadata={"wfilter": json.dumps(facts)})


def assert_refused_and_untouched(path, x, message, error=ValueError):
    model = tiny("cnn").train()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        wfilter.load(path, model, example_input=x)
    assert_same_state(model, before)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    wfilter.apply_weight_filtering(model, example_input=x)  # no filter was left on it


@pytest.mark.parametrize("granularity", ["out", "element"])
@torch.no_grad()
def test_save_then_load_gives_the_same_model(granularity, tmp_path, x):
    names = ["cat", "dog", "eel", "fox"]
    wf = apply(tiny("cnn"), x, granularity=granularity, targets="*.weight", class_names=names)
    path = wf.save(tmp_path / "filters.safetensors")
    other = wfilter.load(path, tiny("cnn"), example_input=x)
    assert torch.equal(other.alphas, wf.alphas)
    assert other.targets == wf.targets
    assert other.class_names == wf.class_names
    assert (other.granularity, other.num_classes) == (granularity, 4)
    assert torch.equal(other(x, forget=LABELS), wf(x, forget=LABELS))


def test_file_holds_alphas_and_facts_and_no_base_weights(wf, saved):
    facts, alphas = contents(saved)
    assert {name: tuple(alpha.shape) for name, alpha in alphas.items()} == {
        name: tuple(alpha.shape) for name, alpha in wf.alpha.items()
    }
    assert facts["num_classes"] == 4
    assert facts["class_names"] is None
    assert facts["granularity"] == "out"
    assert facts["version"] == wfilter.__version__
    assert facts["base"] == checkpoint.fingerprint(tiny("cnn"))
    assert saved.stat().st_size < wf.alphas.numel() * 8 + 4096


def test_nothing_is_pickled():
    source = Path(checkpoint.__file__).read_text()
    assert "import pickle" not in source
    assert "torch.load" not in source
    assert "torch.save" not in source


def test_the_card_counts_gates_and_shows_a_report(wf, tmp_path, x):
    with torch.no_grad():
        wf.alphas.fill_(1000.0)
        wf.alphas[0, : wf.alphas.shape[1] // 2] = -1000.0
    labels = torch.arange(len(x)) % wf.num_classes
    report = wfilter.evaluate(wf, [(x, labels)], metrics=["accuracy"])
    text = (wf.save(tmp_path / "filters", report=report).parent / "README.md").read_text()
    assert "100 % are exactly 0 or 1" in text
    assert "of which it closes" in text
    assert "| Acc_r" in text
    assert text.index("## Figures") < text.index("| Acc_r") < text.index("## What it protects")
    text = (wf.save(tmp_path / "bare").parent / "README.md").read_text()
    assert "Not measured on test images yet" in text


def test_folder_gets_a_model_card(wf, tmp_path, x):
    path = wf.save(tmp_path / "filters")
    assert path == tmp_path / "filters" / "filters.safetensors"
    assert "does not erase it" in (tmp_path / "filters" / "README.md").read_text()
    assert torch.equal(
        wfilter.load(tmp_path / "filters", tiny("cnn"), example_input=x).alphas, wf.alphas
    )


def test_missing_file_says_how_to_write_one(tmp_path, x):
    message = r"none\.safetensors does not exist\. Write it with wf\.save\(path\)"
    path = tmp_path / "none.safetensors"
    assert_refused_and_untouched(path, x, message, FileNotFoundError)


def test_another_base_model_is_refused_with_both_fingerprints(saved, x):
    other = randomise(tiny("cnn"), seed=3)
    before = snapshot(other)
    message = (
        r"was made for another base model \(TinyCNN\)\.\n  fingerprint in the file: \w{16}\n"
        r"  fingerprint of this TinyCNN: \w{16}\nLoad the weights the filters were trained on"
    )
    with pytest.raises(ValueError, match=message):
        wfilter.load(saved, other, example_input=x)
    assert_same_state(other, before)
    with pytest.raises(ValueError, match="was made for another base model"):
        wfilter.load(saved, tiny("attention"), example_input=x)


def test_one_changed_buffer_is_another_base_model(saved, x):
    other = tiny("cnn")
    other.norm.running_mean[0] += 1e-12
    with pytest.raises(ValueError, match="was made for another base model"):
        wfilter.load(saved, other, example_input=x)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file_is_refused(saved, x, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    assert_refused_and_untouched(saved, x, "cannot be read")


@pytest.mark.parametrize("where", [0.02, 0.3, 0.6, 0.999])
def test_one_flipped_bit_is_refused(saved, x, where):
    content = bytearray(saved.read_bytes())
    content[int(where * len(content))] ^= 1
    saved.write_bytes(content)
    assert_refused_and_untouched(saved, x, "is damaged|cannot be read|is not a wfilter file|format")


def test_changed_fact_is_refused(saved, x):
    facts, alphas = contents(saved)
    facts["class_names"] = ["a", "b", "c", "d"]
    save_file(alphas, saved, metadata={"wfilter": json.dumps(facts)})
    assert_refused_and_untouched(saved, x, "is damaged: its digest does not match its content")


def test_file_of_something_else_is_refused(tmp_path, x):
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    assert_refused_and_untouched(path, x, "is not a wfilter file: it carries no filter facts")
    path.write_text("not even safetensors")
    assert_refused_and_untouched(path, x, "cannot be read")


def test_later_format_is_refused(saved, x):
    facts, alphas = contents(saved)
    facts["format"] = 99
    rewrite(saved, facts, alphas)
    assert_refused_and_untouched(saved, x, "has format 99, this wfilter reads formats 1 and 3")


def test_extra_target_is_refused_and_nothing_is_half_loaded(saved, x):
    facts, alphas = contents(saved)
    alphas["layer9.weight"] = torch.zeros(4, 6)
    rewrite(saved, facts, alphas)
    assert_refused_and_untouched(saved, x, r"is damaged: missing .*unexpected \['layer9.weight'")
    facts["targets"] = sorted(alphas)
    rewrite(saved, facts, alphas)
    assert_refused_and_untouched(saved, x, r"does not fit this model.*unexpected \['layer9.weight'")


def test_alphas_of_another_shape_are_refused(saved, x):
    facts, alphas = contents(saved)
    alphas["stem.weight"] = torch.zeros(4, 5)
    rewrite(saved, facts, alphas)
    assert_refused_and_untouched(saved, x, "does not fit this model")


def test_another_number_of_classes_is_refused(saved, x):
    facts, alphas = contents(saved)
    facts["num_classes"] = 5
    rewrite(saved, facts, {name: torch.zeros(5, a.shape[1]) for name, a in alphas.items()})
    assert_refused_and_untouched(saved, x, "num_classes=5, but TinyCNN gives 4 logits")


def test_a_missing_target_is_refused(saved, x):
    facts, alphas = contents(saved)
    del alphas["up.bias"]
    rewrite(saved, facts, alphas)
    assert_refused_and_untouched(saved, x, r"is damaged: missing \['up.bias'\]")


def test_load_onto_a_filtered_model_is_refused(wf, saved, x):
    with pytest.raises(RuntimeError, match="already has a filter"):
        wfilter.load(saved, wf.base, example_input=x)


def test_save_replaces_the_file_in_one_step(wf, saved, x, monkeypatch):
    before = saved.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with torch.no_grad():
        wf.alphas.zero_()
    with pytest.raises(OSError, match="disk full"):
        wf.save(saved)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]  # no temporary file left
    wf.save(saved)
    assert not wfilter.load(saved, tiny("cnn"), example_input=x).alphas.any()


def test_file_can_be_read_by_those_the_umask_allows(wf, tmp_path):
    before = os.umask(0o027)
    try:
        assert wf.save(tmp_path / "filters.safetensors").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_fingerprint_sees_names_shapes_dtypes_and_bytes():
    model = tiny("cnn")
    first = checkpoint.fingerprint(model)
    assert first == checkpoint.fingerprint(tiny("cnn"))
    assert first != checkpoint.fingerprint(tiny("cnn").float())
    assert first != checkpoint.fingerprint(randomise(tiny("cnn")))
    assert checkpoint.fingerprint(torch.nn.Linear(2, 3)) != checkpoint.fingerprint(model)


def test_fingerprint_does_not_depend_on_memory_format_or_filters(wf):
    plain = checkpoint.fingerprint(tiny("cnn"))
    assert checkpoint.fingerprint(wf.base) == plain
    assert checkpoint.fingerprint(tiny("cnn").to(memory_format=torch.channels_last)) == plain


def test_saved_filters_of_tied_weights_load_again(tmp_path, x):
    wf = apply(tiny("tied weights"), x, targets="*")
    path = wf.save(tmp_path / "tied.safetensors")
    other = wfilter.load(path, tiny("tied weights"), example_input=x)
    assert torch.equal(other.alphas, wf.alphas)


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_saved_files_may_be_read_by_whom_the_umask_allows(wf, tmp_path):
    before = os.umask(0o022)
    try:
        path = wf.save(tmp_path / "folder")
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o644}


def test_a_model_whose_input_cannot_be_guessed_asks_for_one_when_filters_are_loaded(tmp_path):
    layers = (torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * 9 * 9, 3))
    images = torch.zeros(1, 1, 11, 11)
    wf = wfilter.apply_weight_filtering(torch.nn.Sequential(*layers), example_input=images)
    path, model = wf.save(tmp_path / "own.safetensors"), wfilter.remove_weight_filtering(wf)
    with pytest.raises(ValueError, match=r"^could not guess an input.*Pass example_input=images"):
        wfilter.load(path, model)
    assert torch.equal(wfilter.load(path, model, example_input=images).alphas, wf.alphas)
