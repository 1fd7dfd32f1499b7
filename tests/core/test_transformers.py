"""The image classifiers of transformers, one small random network per family, by the whole API."""

import pytest
import torch

import wfilter
from helpers import close, randomise, shuffle_alphas
from registry import huggingface
from wfilter.cli import main as cli
from wfilter.core.outputs import logits_of
from wfilter.data import zoo

transformers = pytest.importorskip("transformers")

CLASSES = 5
LARGE = {"hgnet_v2", "timm_wrapper"}
LABELS = torch.tensor([3, -1, 0])


def small(kind):
    torch.manual_seed(0)
    return randomise(huggingface.make(kind, CLASSES)), huggingface.images(kind, 3).double()


@torch.no_grad()
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in LARGE)) for k in huggingface.FAMILIES]
)
@pytest.mark.filterwarnings("ignore")  # of constructors
def test_small_network_of_each_family_is_right_by_keyword_and_in_its_features(kind):
    model, x = small(kind)
    wf = shuffle_alphas(wfilter.apply_weight_filtering(model, example_input={"pixel_values": x}))
    assert wf.num_classes == CLASSES
    output = wf(pixel_values=x, forget=LABELS)
    assert type(output) is type(model(x))
    assert torch.equal(logits_of(wf(pixel_values=x)), logits_of(model(x)))
    for sample, row in enumerate(LABELS.tolist()):
        one = wf.bake(row) if row >= 0 else model
        close(logits_of(output)[sample], logits_of(one(x[sample : sample + 1]))[0], 1e-7)
    features = wf.features(pixel_values=x, forget=LABELS)
    assert len(features) == 3
    assert not torch.equal(features[0], wf.features(x)[0])


def test_untrain_evaluate_save_and_load_take_a_model_output(tmp_path):
    model, _ = small("vit")
    images, labels = torch.rand(20, 3, 16, 16).double(), torch.arange(20) % CLASSES
    wf = wfilter.apply_weight_filtering(model, example_input=images[:1])
    wfilter.untrain(wf, [(images, labels)], recipe="distill", steps=1)
    assert "Acc_r" in str(wfilter.evaluate(wf, [(images, labels)]))
    path = wf.save(tmp_path / "filters.safetensors")
    model, _ = small("vit")
    model.load_state_dict(wf.base.state_dict())
    loaded = wfilter.load(path, model, example_input=images[:1])
    forget = torch.arange(20) % CLASSES
    close(logits_of(loaded(images, forget)), logits_of(wf(images, forget)))


def test_the_default_recipe_takes_a_model_output_and_batches_by_the_names_of_transformers():
    torch.manual_seed(0)
    model = huggingface.make("vit", CLASSES)
    images, labels = torch.rand(60, 3, 16, 16), torch.arange(60) % CLASSES
    wf = wfilter.apply_weight_filtering(model, example_input=images[:1])
    history = wfilter.untrain(wf, [{"pixel_values": images, "labels": labels}])
    assert len(history.rows) == CLASSES
    assert "Acc_r" in str(history.verdict)


def test_class_names_of_the_config_are_taken_unless_they_only_count():
    example = torch.zeros(1, 3, 16, 16)
    model = huggingface.make("vit", 3)
    assert wfilter.apply_weight_filtering(model, example_input=example).class_names is None
    model = huggingface.make("vit", 3)
    model.config.id2label = {0: "cat", 1: "dog", 2: "cow"}
    wf = wfilter.apply_weight_filtering(model, example_input=example)
    assert wf.class_names == ("cat", "dog", "cow")
    forgotten = wf(example, forget="dog")
    assert torch.equal(forgotten.logits, wf(example, forget=1).logits)


def test_every_family_of_the_installed_version_is_known():
    assert {*huggingface.families()} <= {*huggingface.FAMILIES, *huggingface.UNSUITABLE}


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_model_output_is_exported_as_logits_that_forget(suffix, tmp_path):
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = huggingface.make("vit", CLASSES), huggingface.images("vit", 3)
    wf = shuffle_alphas(wfilter.apply_weight_filtering(model, example_input=x))
    assert wfilter.export(wf, tmp_path / f"a.{suffix}", example_input=x).largest_difference < 1e-5


def test_commands_take_a_stored_model_of_transformers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    huggingface.make("vit", 10).save_pretrained("vit")
    transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained("vit")
    spec = f"transformers:{tmp_path}/vit"
    run = ["untrain", spec, "--pretrained", "--dataset", "digits", "--size", "16"]
    run += ["--recipe", "distill", "--steps", "1", "--out", "filters", "--quiet"]
    commands = ["plan", spec], run, ["evaluate", "filters"], ["explain", "filters"]
    for words in (*commands, ["export", "filters", "--out", "a.pt2"]):
        assert cli.run(words) == 0, capsys.readouterr().err
    assert "12 targets (12 fused), 192 units" in capsys.readouterr().out
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_names_of_transformers_that_do_not_exist_are_refused():
    for name, words in {"vitt": "Closest names: vit", "gpt2": "is not known"}.items():
        with pytest.raises(ValueError, match=words):
            zoo.build(f"transformers:{name}")
    with pytest.raises(ValueError, match="wants to see is not known"):
        zoo.input_format("transformers:timm_wrapper")
    with pytest.raises(ValueError, match="names a family, which has no weights of its own"):
        zoo.build("transformers:vit", pretrained=True)
