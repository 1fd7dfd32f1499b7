import os
import urllib.request
from urllib.error import URLError

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torchvision.models import VGG, ResNet

from wfilter import data, zoo

needs_data = pytest.mark.skipif(
    not os.environ.get("WFILTER_DATA"), reason="WFILTER_DATA does not name the data folder"
)


def random_images(spec, count=2):
    inputs = zoo.input_format(spec)
    return torch.rand(count, inputs.channels, inputs.size, inputs.size)


@pytest.mark.parametrize("name", zoo.names())
def test_every_backbone_classifies_images_of_its_size(name):
    model = zoo.create(name, num_classes=7)
    with torch.inference_mode():
        logits = model(random_images(f"wfilter:{name}"))
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()
    assert not model.training
    assert isinstance(model, VGG | ResNet | VisionTransformer | nn.Sequential)


@pytest.mark.parametrize(
    ("name", "alphas_per_class"),
    [("vgg16-mnist", 8448), ("vgg16-cifar", 8448), ("resnet18-mnist", 4800),
     ("resnet18-cifar", 4800), ("vit_tiny-mnist", 13824), ("vit_tiny-cifar", 13824),
     ("vit_small-mnist", 27648)],
)  # fmt: skip
def test_backbones_have_as_many_filtered_units_as_the_papers(name, alphas_per_class):
    units = 0
    for path, module in zoo.create(name).named_modules():
        if path.endswith("qkv") or (isinstance(module, nn.Conv2d) and "patch_embed" not in path):
            units += sum(len(parameter) for parameter in module.parameters())
    assert units == alphas_per_class


def test_the_same_seed_gives_the_same_model():
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(zoo.create("vit-digits").state_dict())
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])


@pytest.mark.parametrize(
    ("spec", "kind"),
    [("wfilter:cnn-digits", "VGG"), ("timm:test_vit", "VisionTransformer"),
     ("torchvision:squeezenet1_1", "SqueezeNet")],
)  # fmt: skip
def test_a_model_is_built_by_its_full_name_with_the_head_asked_for(spec, kind):
    model = zoo.build(spec, num_classes=4)
    assert type(model).__name__ == kind
    assert not model.training
    with torch.inference_mode():
        assert model(random_images(spec)).shape == (2, 4)


def test_without_a_number_of_classes_the_head_is_the_librarys_own():
    assert zoo.build("timm:test_vit").num_classes == 1000
    assert zoo.build("wfilter:vit-digits").num_classes == 10


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_own_models.py").write_text(
        "from torch import nn\n"
        "def linear(num_classes=3): return nn.Sequential(nn.Flatten(), nn.Linear(4, num_classes))\n"
        "def fixed(): return nn.Linear(4, 2)\n"
        "def number(): return 3\n"
        "def greedy(depth): return nn.Linear(4, depth)\n"
    )
    monkeypatch.chdir(tmp_path)


def test_a_function_in_the_working_directory_makes_a_model(own_module):
    assert zoo.build("my_own_models:linear", num_classes=5)(torch.rand(1, 4)).shape == (1, 5)
    assert zoo.build("my_own_models:linear")(torch.rand(1, 4)).shape == (1, 3)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("linaer", {}, r"function of my_own_models 'linaer' is not known. Closest names: linear"),
        ("number", {}, r"my_own_models:number returned int. Expected an nn.Module"),
        ("greedy", {}, r"greedy cannot be called with no arguments: missing .* 'depth'"),
        ("fixed", {"num_classes": 3}, r"fixed cannot be called with num_classes alone"),
        (
            "linear",
            {"pretrained": True},
            r"pretrained=True works for timm:, torchvision: and transformers:",
        ),
    ],
)
def test_a_function_that_makes_no_model_is_refused(own_module, name, settings, message):
    with pytest.raises(ValueError, match=message):
        zoo.build(f"my_own_models:{name}", **settings)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("timm:vit_tny_patch16_224", "Closest names: vit_tiny_patch16_224"),
        ("timm:vit_tiny_patch16_224.none", r"could not be made: Invalid pretrained tag \(none\)"),
        ("torchvision:resnet81", "Closest names: resnet18"),
        ("torchvision:raft_large", "torchvision model 'raft_large' is not known"),
        ("wfilter:resnet18-cifar100", "Closest names: resnet18-cifar"),
        ("resnet18-cifar", "lacks its source. Write wfilter:resnet18-cifar"),
        ("resnet18", "Write timm:resnet18, torchvision:resnet18, "),
        ("no_such_package.models:make", "'no_such_package.models' is neither timm"),
    ],
)
def test_an_unknown_model_lists_what_to_write_instead(spec, message):
    with pytest.raises(ValueError, match=message):
        zoo.build(spec)


def test_a_head_of_no_classes_is_refused():
    with pytest.raises(ValueError, match="num_classes=0 is not a number of classes"):
        zoo.create("cnn-digits", 0)


def test_weights_out_of_reach_are_refused_before_timm_retries(monkeypatch):
    def no_network(*_, **__):
        raise URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: pytest.fail("timm was asked"))
    with pytest.raises(ValueError, match=r"cannot be reached \(no network\).*--weights"):
        zoo.build("timm:test_vit", pretrained=True)


def test_weights_in_the_cache_need_no_network(monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("network"))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "a file")
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: nn.Identity())
    zoo.build("timm:test_vit", pretrained=True)


def test_a_head_for_torchvisions_pretrained_weights_is_refused():
    with pytest.raises(ValueError, match="leave num_classes out"):
        zoo.build("torchvision:resnet18", num_classes=3, pretrained=True)


def test_input_facts_of_an_unknown_source_are_asked_for():
    with pytest.raises(ValueError, match=r"'my.models:make' wants to see is not known"):
        zoo.input_format("my.models:make")


def test_input_facts_come_from_the_library():
    imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert zoo.input_format("torchvision:resnet18") == zoo.InputFormat(224, 3, *imagenet)
    assert zoo.input_format("timm:test_vit").size == 160
    assert zoo.input_format("wfilter:resnet18-cifar") == zoo.InputFormat(32, 3)


def test_half_precision_weights_are_loaded_as_float32(tmp_path):
    source, model = zoo.create("cnn-digits"), zoo.create("cnn-digits")
    halves = {k: v.half() if v.is_floating_point() else v for k, v in source.state_dict().items()}
    save_file(halves, tmp_path / "w.safetensors")
    assert zoo.load_weights(model, tmp_path / "w.safetensors") is model
    for key, value in model.state_dict().items():
        assert value.dtype == source.state_dict()[key].dtype
        assert torch.equal(value, halves[key].to(value.dtype))


def test_weights_that_do_not_fit_are_refused_and_change_nothing(tmp_path):
    model = zoo.create("cnn-digits")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    save_file(zoo.create("cnn-digits", 7).state_dict(), tmp_path / "seven.safetensors")
    save_file(zoo.create("vit-digits").state_dict(), tmp_path / "vit.safetensors")
    with pytest.raises(ValueError, match=r"classifier.0.weight is \(7, 128\) in .*\n.*num_classes"):
        zoo.load_weights(model, tmp_path / "seven.safetensors")
    with pytest.raises(ValueError, match=r"does not fit VGG.\nOnly in the model: classifier.0"):
        zoo.load_weights(model, tmp_path / "vit.safetensors")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_file_that_holds_no_weights_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none.safetensors is not a file"):
        zoo.build("wfilter:cnn-digits", weights=tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"bad.safetensors is not a safetensors file"):
        zoo.build("wfilter:cnn-digits", weights=tmp_path / "bad.safetensors")


def test_weights_are_looked_for_in_the_data_folder_and_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = [tmp_path / "weights", tmp_path / "cache" / "wfilter" / "weights"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "wfilter-vgg16-cifar.safetensors").touch()
    monkeypatch.setenv("WFILTER_DATA", str(tmp_path))
    assert zoo.weights_path("wfilter:vgg16-cifar").parent == folders[0]
    monkeypatch.delenv("WFILTER_DATA")
    assert zoo.weights_path("wfilter:vgg16-cifar").parent == folders[1]
    words = r"no weights for timm:vit: .*timm-vit.safetensors does not exist.*WFILTER_DATA"
    with pytest.raises(FileNotFoundError, match=words):
        zoo.weights_path("timm:vit")


def accuracy(spec, dataset):
    model = zoo.build(spec, weights=zoo.weights_path(spec))
    with torch.inference_mode():
        hits = [model(x).argmax(1) == labels for x, labels in data.batches(dataset, 100)]
    return 100 * torch.cat(hits).float().mean().item()


@needs_data
@pytest.mark.parametrize("name", ["resnet18-cifar", "vgg16-cifar"])
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_given_cifar10_weights_classify_test_images(name, count):
    images = data.load("cifar10", "test").take(torch.arange(count))
    assert accuracy(f"wfilter:{name}", images) >= (88 if count == 100 else 92)


@needs_data
@pytest.mark.slow
def test_the_given_vit_weights_classify_imagenet():
    images = data.load("imagenet", "test").take(torch.arange(0, 1000, 5))
    assert accuracy("timm:vit_tiny_patch16_224", images) >= 68


def test_the_old_name_of_the_input_format_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match="zoo.input_facts is now zoo.input_format"):
        old = zoo.input_facts("wfilter:cnn-digits")
    with pytest.warns(DeprecationWarning, match="zoo.InputFacts is now zoo.InputFormat"):
        assert isinstance(old, zoo.InputFacts)
    with pytest.raises(AttributeError, match="no attribute 'input'"):
        zoo.input  # noqa: B018
