import os
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import wfilter
from helpers import apply, images, tiny
from wfilter.core.compiling import has_compiler
from wfilter.files.exported import Takes, is_compiled

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
LABELS = torch.tensor([0, -1, 2, 2, 1])

# Runs a package in a Python that has neither wfilter nor the model's class.
ELSEWHERE = """
import sys, torch
package = torch._inductor.aoti_load_package(sys.argv[1])
torch.save(package(*torch.load(sys.argv[2])), sys.argv[3])
assert "wfilter" not in sys.modules
"""


class Small(nn.Module):
    """Two linear maps; its code is in this test alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small filtered model and its package."""
    torch.manual_seed(0)
    wf = wfilter.apply_weight_filtering(Small(), targets="*", example_input=torch.rand(2, 6))
    with torch.no_grad():
        wf.alphas.normal_(0, 3)
    path = tmp_path_factory.mktemp("package") / "small.pt2"
    return wf, wfilter.export(wf, path, example_input=torch.rand(1, 6), aoti=True)


@needs_compiler
@torch.no_grad()
def test_a_compiled_package_answers_as_the_model_at_any_batch_size(small):
    wf, written = small
    assert written.inputs == ("images", "forget")
    assert written.largest_difference < 1e-6
    program = wfilter.load_exported(written.path)
    for batch in (1, 2, 3, 7):
        x, labels = torch.rand(batch, 6), torch.randint(-1, 4, (batch,))
        torch.testing.assert_close(program(x, labels), wf(x, forget=labels))


@needs_compiler
def test_a_compiled_package_runs_without_wfilter_and_without_the_models_code(small, tmp_path):
    wf, written = small
    x, answers = torch.rand(5, 6), tmp_path / "answers.pt"
    torch.save((x, LABELS), tmp_path / "inputs.pt")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", ELSEWHERE, written.path, tmp_path / "inputs.pt", answers]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)
    with torch.no_grad():
        torch.testing.assert_close(torch.load(answers), wf(x, forget=LABELS))


@needs_compiler
def test_a_compiled_package_refuses_what_its_code_would_misread(small):
    program = wfilter.load_exported(small[1].path)
    x = torch.rand(5, 6)
    for wrong, words in {
        (x.double(), LABELS): "takes (batch, 6) and torch.float32",
        (torch.rand(5, 7), LABELS): "takes (batch, 6)",
        (x, LABELS.int()): "dtype int32",
        (x, LABELS[:2]): "2 entries for a batch of 5",
        (x, LABELS + 2): "forget=4 is outside 0..3",
        (x, LABELS - 1): "forget=-2 is outside 0..3",
        (x, torch.ones(5, 4).bool()): "exported for int64 labels",
        (x,): "takes images and forget, but got 1 inputs",
    }.items():
        with pytest.raises((TypeError, ValueError)) as error:
            program(*wrong)
        assert words in str(error.value)


@needs_compiler
@torch.no_grad()
def test_a_compiled_package_reads_inputs_of_any_strides(small):
    wf, written = small
    x = torch.rand(6, 5).T
    found = wfilter.load_exported(written.path)(x, LABELS)
    torch.testing.assert_close(found, wf(x, forget=LABELS))


def test_a_package_of_others_is_refused_since_its_inputs_are_unknown(tmp_path, monkeypatch):
    path = tmp_path / "a.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data/aotinductor/model/a.so", b"")
    loaded = SimpleNamespace(loader=SimpleNamespace(get_metadata=lambda: {"AOTI_PLATFORM": "x"}))
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: loaded)
    with pytest.raises(ValueError, match="was not written by wfilter"):
        wfilter.load_exported(path)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("forget", ["labels", "sets"])
@pytest.mark.parametrize("name", ["cnn", "attention", "batch-major windows"])
@torch.no_grad()
def test_compiled_packages_of_all_kinds_of_layers_answer_as_the_model(name, forget, tmp_path):
    x = images(5, 3, 8, 8, dtype=torch.float32)
    targets = "attention.in_proj*" if name == "attention" else "*"
    wf = apply(tiny(name).float(), x, targets=targets)
    written = wfilter.export(wf, tmp_path / "a.pt2", forget=forget, example_input=x, aoti=True)
    program = wfilter.load_exported(written.path)
    chosen = LABELS if forget == "labels" else torch.rand(5, 4) < 0.4
    expected = wf(x, forget=chosen)
    last = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(program(x, chosen), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(program(last, chosen), expected, atol=1e-5, rtol=1e-4)


@needs_compiler
@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_package_of_a_baked_model_takes_images_alone(small, tmp_path):
    wf, x = small[0], torch.rand(5, 6)
    path = tmp_path / "baked.pt2"
    written = wfilter.export(wf.bake(forget=2), path, example_input=x, aoti=True)
    assert written.inputs == ("images",)
    program = wfilter.load_exported(path)
    torch.testing.assert_close(program(x), wf(x, forget=2))
    with pytest.raises(TypeError, match="takes images alone, but got 2 inputs"):
        program(x, LABELS)


def test_graphs_are_told_from_packages(tmp_path):
    wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
    path = wfilter.export(wf, tmp_path / "graph.pt2").path
    assert not is_compiled(path)
    answer = wfilter.load_exported(path)(torch.ones(2, 4), torch.tensor([2, -1]))
    assert not answer.requires_grad


def test_what_a_package_takes_survives_its_note():
    takes = Takes((3, 8, 8), "torch.float32", "cpu", classes=4, sets=True)
    assert Takes.read(takes.write()) == takes
    meta = torch.ones(2, 3, 8, 8, device="meta"), torch.ones(2, 4, device="meta").bool()
    with pytest.raises(ValueError, match="runs on cpu"):
        takes.checked(*meta)


def test_mistakes_are_named(tmp_path, monkeypatch):
    wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
    with pytest.raises(ValueError, match=r"aoti=True writes a \.pt2 package"):
        wfilter.export(wf, tmp_path / "a.onnx", aoti=True)
    with pytest.raises(FileNotFoundError, match="Write it with wfilter export"):
        wfilter.load_exported(tmp_path / "a.pt2")
    with pytest.raises(ValueError, match=r"neither \.pt2 nor \.onnx"):
        wfilter.load_exported(tmp_path / "a.pth")
    module = sys.modules["wfilter.files.export"]
    monkeypatch.setattr(module, "has_compiler", lambda: False)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler"):
        wfilter.export(wf, tmp_path / "a.pt2", aoti=True)
