import pytest
import torch

import wfilter
from helpers import apply, images, rerouted, tiny
from wfilter.files.export import Exported


def filtered(name="cnn", **options):
    x = images(4, 3, 8, 8, dtype=torch.float32)
    targets = "attention.in_proj*" if name == "attention" else "*"
    return apply(tiny(name).float(), x, targets=targets, **options), x


@pytest.mark.parametrize("forget", ["labels", "sets"])
@pytest.mark.parametrize("name", ["cnn", "attention", "batch-major windows"])
def test_exported_program_answers_mixed_batches_as_the_model_does(name, forget, tmp_path):
    wf, _ = filtered(name)
    found = wfilter.export(wf, tmp_path / "a.pt2", forget=forget, example_input=images(1, 3, 8, 8))
    program = torch.export.load(found.path).module()
    x = images(6, 3, 8, 8, dtype=torch.float32)
    labels = torch.tensor([0, -1, 3, 3, 1, 2])
    chosen = labels if forget == "labels" else torch.rand(6, 4) < 0.4
    with torch.no_grad():
        torch.testing.assert_close(program(x, chosen), wf(x, forget=chosen), atol=1e-5, rtol=1e-4)
    assert found.inputs == ("images", "forget")


def test_per_sample_weights_export_too(tmp_path):
    wf, x = filtered("bypassed module", granularity="element")
    assert wfilter.export(wf, tmp_path / "a.pt2", example_input=x).largest_difference < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("forget", ["labels", "sets"])
@pytest.mark.parametrize("name", ["cnn", "attention"])
def test_onnx_graph_answers_mixed_batches_as_the_model_does(name, forget, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    wf, _ = filtered(name)
    found = wfilter.export(wf, tmp_path / "a.onnx", forget=forget, example_input=images(1, 3, 8, 8))
    session = onnxruntime.InferenceSession(str(found.path), providers=["CPUExecutionProvider"])
    x = images(6, 3, 8, 8, dtype=torch.float32)
    labels = torch.tensor([0, -1, 3, 3, 1, 2])
    chosen = labels if forget == "labels" else torch.rand(6, 4) < 0.4
    (answers,) = session.run(None, {"images": x.numpy(), "forget": chosen.numpy()})
    with torch.no_grad():
        expected = wf(x, forget=chosen)
    torch.testing.assert_close(torch.from_numpy(answers), expected, atol=1e-5, rtol=1e-4)


def test_onnx_of_a_small_model_is_checked_in_onnxruntime_and_refuses_labels_out_of_range(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    wf, x = filtered("bypassed module")
    found = wfilter.export(wf, tmp_path / "a.onnx", example_input=x)
    assert found.largest_difference < 1e-5
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(found.path), options)
    for bad in (-2, 4):  # ONNX counts negative indices from the end
        with pytest.raises(Exception, match="out of data bounds"):
            session.run(None, {"images": x.numpy(), "forget": torch.full((4,), bad).numpy()})


def test_baked_model_exports_as_any_plain_model(tmp_path):
    wf, x = filtered("bypassed module")
    found = wfilter.export(wf.bake(forget=2), tmp_path / "a.pt2", example_input=x)
    assert found.inputs == ("images",)
    with torch.no_grad():
        answers = torch.export.load(found.path).module()(x)
        torch.testing.assert_close(answers, wf(x, forget=2), atol=1e-5, rtol=1e-4)


def test_model_that_cannot_be_traced_is_named_with_the_reason(tmp_path):
    class Picky(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1 if float(x.sum()) > 0 else 2)

    with pytest.raises(ValueError, match=r"torch\.export cannot trace this model"):
        wfilter.export(Picky(4, 3), tmp_path / "a.pt2", example_input=torch.ones(1, 4))


def test_a_graph_that_differs_is_an_error(tmp_path, monkeypatch):
    module = __import__("sys").modules["wfilter.files.export"]
    wf, x = filtered("bypassed module")
    wrong = lambda path: lambda images, forget: torch.ones(len(images), 4) * 9  # noqa: E731
    monkeypatch.setattr(module, "load_exported", wrong)
    with pytest.raises(RuntimeError, match="differs from the model by"):
        wfilter.export(wf, tmp_path / "a.pt2", example_input=x)


def test_a_graph_whose_logits_are_nan_differs(tmp_path, monkeypatch):
    module = __import__("sys").modules["wfilter.files.export"]
    wf, x = filtered("bypassed module")
    wrong = lambda path: lambda images, forget: torch.full((len(images), 4), torch.nan)  # noqa: E731
    monkeypatch.setattr(module, "load_exported", wrong)
    with pytest.raises(RuntimeError, match="differs from the model by inf"):
        wfilter.export(wf, tmp_path / "a.pt2", example_input=x)


def test_forgotten_logits_far_below_all_others_hide_no_difference(tmp_path, monkeypatch):
    module = __import__("sys").modules["wfilter.files.export"]
    wf, x = rerouted()
    read = module.load_exported
    shifted = lambda path: lambda *inputs: read(path)(*inputs) + 0.05  # noqa: E731
    monkeypatch.setattr(module, "load_exported", shifted)
    with pytest.raises(RuntimeError, match="differs from the model by 5"):
        wfilter.export(wf, tmp_path / "a.pt2", example_input=x)


def test_logits_of_minus_infinity_export_and_nan_is_refused(tmp_path):
    model = torch.nn.Linear(4, 3)
    masked = torch.nn.Sequential(model, _Masked())
    facts = wfilter.export(masked, tmp_path / "a.pt2", example_input=torch.ones(1, 4))
    assert facts.largest_difference < 1e-6
    with torch.no_grad():
        model.weight[0] = torch.nan
    with pytest.raises(ValueError, match="logits of this model contain NaN"):
        wfilter.export(model, tmp_path / "b.pt2", example_input=torch.ones(1, 4))


class _Masked(torch.nn.Module):
    def forward(self, logits):
        return logits.masked_fill(torch.arange(3) == 1, -torch.inf)


def test_filters_that_a_call_would_refuse_are_not_exported(tmp_path):
    wf, x = filtered()
    wf.pin_open([wf.targets[0].name])
    wf.alphas.data[2, 0] = 1
    with pytest.raises(RuntimeError, match="is pinned open"):
        wfilter.export(wf, tmp_path / "a.pt2", example_input=x)
    wf.alphas.data[2, 0] = torch.nan
    with pytest.raises(ValueError, match="contain NaN"):
        wfilter.export(wf, tmp_path / "a.pt2", example_input=x)
    wfilter.remove_weight_filtering(wf)
    with pytest.raises(RuntimeError, match="filters of this model were removed"):
        wfilter.export(wf, tmp_path / "a.pt2", example_input=x)
    assert not (tmp_path / "a.pt2").exists()


def test_mistakes_are_named(tmp_path):
    wf, x = filtered("bypassed module")
    with pytest.raises(ValueError, match=r"neither \.pt2 nor \.onnx"):
        wfilter.export(wf, tmp_path / "a.pth")
    with pytest.raises(ValueError, match="forget='rows' is unknown"):
        wfilter.export(wf, tmp_path / "a.pt2", forget="rows")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        wfilter.export(wf, tmp_path / "no" / "a.pt2", example_input=x)
    with (
        wf.forgetting(1),
        pytest.raises(RuntimeError, match="export inside a forgetting block"),
    ):
        wfilter.export(wf, tmp_path / "a.pt2", example_input=x)


def test_facts_print_in_one_line(tmp_path):
    text = str(Exported(tmp_path / "a.pt2", ("images", "forget"), 2**20, 1e-7))
    assert "1.0 MiB, inputs images, forget; largest difference from the model 1.0e-07" in text
