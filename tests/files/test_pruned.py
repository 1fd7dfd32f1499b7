"""Pruned models in files: rebuilt by name, or into a model that is given."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import wfilter
from helpers import close, images


def close_rows(model):
    with torch.no_grad():
        for layer in list(model.modules()):
            if isinstance(layer, nn.Conv2d):
                layer.weight[::3] = 0
    return model


@pytest.fixture
def pruned():
    torch.manual_seed(0)
    model = close_rows(wfilter.zoo.create("cnn-digits"))
    return wfilter.prune(model, torch.zeros(1, 1, 8, 8))


def test_a_pruned_model_is_rebuilt_by_name_from_its_file(pruned, tmp_path):
    x = images(5, 1, 8, 8, dtype=torch.float32)
    path = wfilter.save_pruned(pruned, tmp_path / "a.safetensors", "wfilter:cnn-digits")
    again = wfilter.load_pruned(path)
    assert torch.equal(again(x), pruned.model(x))
    assert str(again) == str(pruned.model)


def test_a_file_without_a_name_is_loaded_into_the_architecture_given(pruned, tmp_path):
    x = images(5, 1, 8, 8, dtype=torch.float32)
    path = wfilter.save_pruned(pruned, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="names no architecture"):
        wfilter.load_pruned(path)
    again = wfilter.load_pruned(path, wfilter.zoo.create("cnn-digits"))
    assert torch.equal(again(x), pruned.model(x))


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_a_graph_of_a_pruned_model_answers_as_it_does_and_needs_no_architecture(
    suffix, pruned, tmp_path
):
    if suffix == ".onnx":
        pytest.importorskip("onnxruntime")
    x = images(5, 1, 8, 8, dtype=torch.float32)
    path = tmp_path / f"small{suffix}"
    wfilter.export(pruned.model, path, example_input=x[:1])
    whole = tmp_path / f"whole{suffix}"
    wfilter.export(wfilter.zoo.create("cnn-digits").eval(), whole, example_input=x[:1])
    assert path.stat().st_size < 0.7 * whole.stat().st_size
    close(wfilter.load_exported(path)(x), pruned.model(x), 1e-5)


def test_a_bias_that_took_up_constants_is_rebuilt_too(tmp_path):
    def make():
        layers = [nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1, bias=False)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 3)).eval()

    model = make()
    with torch.no_grad():
        model[0].weight[:2] = 0
        model[1].bias += 1
    pruned = wfilter.prune(model, torch.zeros(1, 1, 8, 8))
    path = wfilter.save_pruned(pruned, tmp_path / "a.safetensors")
    x = images(5, 1, 8, 8, dtype=torch.float32)
    close(wfilter.load_pruned(path, make())(x), model(x), 1e-5)


def test_feature_rows_that_were_baked_in_are_rebuilt_too(tmp_path):
    torch.manual_seed(0)
    base = close_rows(wfilter.zoo.create("cnn-digits")).eval()
    wf = wfilter.apply_weight_filtering(base, example_input=torch.zeros(1, 1, 8, 8))
    x = images(200, 1, 8, 8, dtype=torch.float32)
    wfilter.untrain(wf, wfilter.InMemory(x, torch.arange(200) % 10), recipe="reroute")
    pruned = wfilter.prune(wf.bake(3), x[:1])
    path = wfilter.save_pruned(pruned, tmp_path / "a.safetensors", "wfilter:cnn-digits")
    again = wfilter.load_pruned(path)
    assert torch.equal(again(x), pruned.model(x))
    assert str(again) == str(pruned.model)


@pytest.mark.parametrize("name", ["resnetv2_50x1_bit", "nf_resnet26"])
def test_standardised_convolutions_are_rebuilt_as_the_plain_ones_they_became(name, tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    x = images(2, 3, 64, 64, dtype=torch.float32)
    wf = wfilter.apply_weight_filtering(
        timm.create_model(name, num_classes=10).eval(), 10, example_input=x[:1]
    )
    with torch.no_grad():
        closed = torch.rand(wf.alphas.shape) < 0.3
        wf.alphas.copy_(torch.where(closed, -1000.0, 0.5))
    pruned = wfilter.prune(wf.bake(1), x[:1])
    path = wfilter.save_pruned(pruned, tmp_path / "a.safetensors", f"timm:{name}", 10)
    assert torch.equal(wfilter.load_pruned(path)(x), pruned.model(x))


def test_another_architecture_is_refused(pruned, tmp_path):
    path = wfilter.save_pruned(pruned, tmp_path / "a.safetensors", "wfilter:cnn-digits")
    with pytest.raises(ValueError, match="does not fit Sequential"):
        wfilter.load_pruned(path, nn.Sequential(nn.Linear(2, 2)))


def test_a_file_of_something_else_is_refused(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="holds no pruned model"):
        wfilter.load_pruned(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        wfilter.load_pruned(tmp_path / "b.safetensors")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        wfilter.load_pruned(tmp_path / "c.safetensors")


def test_the_suffix_must_fit(pruned, tmp_path):
    with pytest.raises(ValueError, match="must end in"):
        wfilter.save_pruned(pruned, tmp_path / "a.pt")


class Scaled(nn.Module):
    """Scales that the code makes and no file holds."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("scales", torch.linspace(1, 2, 8), persistent=False)

    def forward(self, x):
        return self.second(self.first(x).relu() * self.scales)


@torch.no_grad()
def test_buffers_that_no_state_dict_holds_are_rebuilt_where_they_were_cut(tmp_path):
    model = Scaled().eval()
    model.first.weight[:5] = 0
    pruned = wfilter.prune(model, torch.zeros(1, 4))
    assert "scales: 8 -> 3" in str(pruned)
    again = wfilter.load_pruned(wfilter.save_pruned(pruned, tmp_path / "a.safetensors"), Scaled())
    x = images(5, 4, dtype=torch.float32)
    assert torch.equal(again(x), pruned.model(x))
    close(again(x), model(x), 1e-6)


@torch.no_grad()
def test_layers_that_share_a_weight_share_the_smaller_one():
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)]
    model = nn.Sequential(*layers, nn.Linear(8, 3)).eval()
    model[4].weight = model[2].weight
    for layer in (model[0], model[2], model[4]):
        layer.weight[:5], layer.bias[:5] = 0, 0
    pruned = wfilter.prune(model, torch.zeros(1, 4))
    assert pruned.model[2].weight is pruned.model[4].weight
    assert pruned.model[2].weight.shape == (3, 3)
    assert pruned.parameters[1] == sum(p.numel() for p in pruned.model.parameters())
    x = images(5, 4, dtype=torch.float32)
    close(pruned.model(x), model(x), 1e-6)
