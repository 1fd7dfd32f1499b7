"""Tiny models, seeded, float64, with weights and statistics at which every parameter counts."""

import dataclasses
import threading
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wfilter
from wfilter.core.feature_rows import FeatureRows
from wfilter.core.outputs import read_inputs

CLASSES = 4


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """In place: float64, eval mode, no zero-initialised head, bias or statistic left."""
    generator = torch.Generator().manual_seed(seed)
    model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.05 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("running_var"):
                buffer.mul_(0.5 + torch.rand(buffer.shape, generator=generator))
    return model


def close_rows(model: nn.Module, share: float = 0.4, seed: int = 0) -> nn.Module:
    """In place: the rows of a share of all convolutions and linear layers but the last are zero."""
    generator = torch.Generator().manual_seed(seed)
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    with torch.no_grad():
        for layer in layers[:-1]:
            layer.weight[torch.rand(len(layer.weight), generator=generator) < share] = 0
    return model


def images(batch: int, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(batch, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def apply(model: nn.Module, x: Tensor, *, seed: int = 2, **options) -> wfilter.FilteredModel:
    """Filters with random alphas, so that classes and units differ."""
    wf = wfilter.apply_weight_filtering(model, example_input=x, **options)
    return shuffle_alphas(wf, seed)


def shuffle_alphas(wf: wfilter.FilteredModel, seed: int = 2) -> wfilter.FilteredModel:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(wf.alphas.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        wf.alphas.copy_(2 * noise)
    return wf


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(model: nn.Module, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Equal up to ``tolerance`` of the largest expected entry."""
    scale = max(float(expected.detach().abs().max()), 1e-30)
    torch.testing.assert_close(actual / scale, expected / scale, atol=tolerance, rtol=0.0)


def run_in_threads(work, count=8):
    errors = []

    def guarded(index):
        try:
            work(index)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# ---- tiny models --------------------------------------------------------------------------------


class TinyCNN(nn.Module):
    """Plain, grouped and transposed convolutions, with and without bias, and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        x = self.depthwise(self.norm(self.stem(x)).relu())
        return self.head(self.up(x).relu().mean((2, 3)))


class Attention(nn.Module):
    """Tokens, ``nn.MultiheadAttention`` (whose out_proj module is never called), class token."""

    def __init__(self, batch_first: bool = True):
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.position
        if not self.batch_first:
            tokens = tokens.transpose(0, 1)
        mixed = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        mixed = mixed if self.batch_first else mixed.transpose(0, 1)
        return self.head(self.norm(mixed[:, 0]))


class Folded(nn.Module):
    """Folds 4 windows of each sample into the batch axis, batch-major (Swin) or minor."""

    def __init__(self, major: bool = True):
        super().__init__()
        self.major = major
        self.inner = nn.Linear(48, 6)
        self.outer = nn.Linear(6, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        windows = F.unfold(x, 4, stride=4).transpose(1, 2)  # (batch, 4, 48)
        if not self.major:
            windows = windows.transpose(0, 1)
        shape = windows.shape[:2]
        tokens = self.outer(self.inner(windows.flatten(0, 1)).tanh()).unflatten(0, shape)
        return self.head(tokens.tanh().mean(1 if self.major else 0))


class Bypassed(nn.Module):
    """Reads a module's weight instead of calling it, as BEiT and SwinV2 do."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(192, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(F.linear(x.flatten(1), weight=self.qkv.weight, bias=self.qkv.bias).tanh())


class Twice(nn.Module):
    """Calls one layer twice, the second time on its own output."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x):
        return self.head(self.shared(self.shared(x).tanh()).mean((2, 3)))


class RunOnce(nn.Module):
    """Runs one layer for the whole batch (SwinV2's ``cpb_mlp``), another per sample."""

    def __init__(self):
        super().__init__()
        self.register_buffer("grid", torch.rand(64, 2))
        self.bias = nn.Linear(2, 3)
        self.conv = nn.Conv2d(3, 3, 1)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x):
        table = self.bias(self.grid).t().reshape(1, 3, 8, 8)
        return self.head((self.conv(x) * table).tanh().mean((2, 3)))


class Tied(nn.Module):
    """Two layers that share one weight but not their bias."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(192, 192)
        self.second = nn.Linear(192, 192)
        self.second.weight = self.first.weight
        self.head = nn.Linear(192, CLASSES)

    def forward(self, x):
        return self.head(self.second(self.first(x.flatten(1)).tanh()).tanh())


class TwoNames(nn.Module):
    """One module reachable by two names."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(192, 192)
        self.alias = self.body
        self.head = nn.Linear(192, CLASSES)

    def forward(self, x):
        return self.head(self.alias(self.body(x.flatten(1)).tanh()).tanh())


TINY = {
    "cnn": (TinyCNN, "*"),
    "attention": (Attention, "*"),
    "sequence-first attention": (partial(Attention, batch_first=False), "*"),
    "batch-major windows": (partial(Folded, major=True), "*"),
    "batch-minor windows": (partial(Folded, major=False), "*"),
    "bypassed module": (Bypassed, "*"),
    "layer called twice": (Twice, "*"),
    "layer run once": (RunOnce, "*"),
    "tied weights": (Tied, "*"),
    "module with two names": (TwoNames, "*"),
}


def tiny(name: str) -> nn.Module:
    torch.manual_seed(0)
    return randomise(TINY[name][0]())


def linear(classes=4, width=16, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, classes))
    return wfilter.apply_weight_filtering(model, targets="0.*", **options)


def samples(number=32, classes=4):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(number, 6, generator=generator), torch.arange(number) % classes


# ---- families from timm and torchvision ---------------------------------------------------------


def _timm(name: str, **options):
    def make():
        import timm

        return timm.create_model(name, num_classes=10, **options)

    return make


def _torchvision(name: str, *args, **options):
    def make():
        from torchvision import models

        return getattr(models, name)(*args, num_classes=10, **options)

    return make


def _swin_v2():
    from torchvision.models import swin_transformer

    return swin_transformer.SwinTransformer(
        [4, 4],
        32,
        [2, 2],
        [2, 4],
        [4, 4],
        num_classes=10,
        block=swin_transformer.SwinTransformerBlockV2,
        downsample_layer=swin_transformer.PatchMergingV2,
    )


SWIN = ([4, 4], 32, [2, 2], [2, 4], [4, 4])
MAXVIT = {
    "input_size": (64, 64),
    "stem_channels": 16,
    "partition_size": 2,
    "block_channels": [16, 32],
    "block_layers": [1, 1],
    "head_dim": 8,
    "stochastic_depth_prob": 0.0,
}

# name -> constructor, image size
FAMILIES = {
    "torchvision resnet18": (_torchvision("resnet18"), 32),
    "torchvision vit": (_torchvision("VisionTransformer", 32, 8, 2, 4, 64, 128), 32),
    "torchvision swin": (_torchvision("SwinTransformer", *SWIN), 64),
    "torchvision swin v2": (_swin_v2, 64),
    "torchvision googlenet": (_torchvision("googlenet", init_weights=False), 32),
    "torchvision maxvit": (_torchvision("MaxVit", **MAXVIT), 64),
    "timm vit": (_timm("vit_tiny_patch16_224", img_size=64, depth=2), 64),
    "timm swin": (
        _timm("swin_tiny_patch4_window7_224", img_size=56, depths=(2, 2), num_heads=(3, 6)),
        56,
    ),
    "timm swin v2": (
        _timm("swinv2_tiny_window8_256", img_size=64, depths=(2, 2), num_heads=(3, 6)),
        64,
    ),
    "timm beit": (_timm("beit_base_patch16_224", img_size=64, depth=2, embed_dim=96), 64),
    "timm eva02": (_timm("eva02_tiny_patch14_224", img_size=56, depth=2), 56),
    "timm convnext": (_timm("convnext_atto"), 32),
    "timm mobilenetv3": (_timm("mobilenetv3_small_050"), 32),
    "timm efficientnet": (_timm("efficientnet_b0"), 32),
    "timm mixer": (_timm("mixer_s32_224", img_size=64), 64),
    "timm maxvit": (_timm("maxvit_pico_rw_256", img_size=64), 64),
    "timm nf_resnet": (_timm("nf_resnet26"), 32),
    "timm bit": (_timm("resnetv2_50x1_bit"), 32),
    "timm mobilevit": (_timm("mobilevit_xxs"), 64),
    "timm tnt": (_timm("tnt_s_patch16_224", img_size=64, depth=2), 64),
    "timm xcit": (_timm("xcit_nano_12_p16_224", depth=2, img_size=64), 64),
    "timm levit": (_timm("levit_128s", img_size=64), 64),
    "timm coat": (_timm("coat_tiny", img_size=64), 64),
    "timm davit": (_timm("davit_tiny", depths=(1, 1, 1, 1)), 64),
    "timm efficientvit": (_timm("efficientvit_m0", img_size=64), 64),
}
SLOW = {
    "timm maxvit",
    "timm bit",
    "timm coat",
    "timm davit",
    "timm efficientnet",
    "timm nf_resnet",
    "torchvision googlenet",
    "torchvision resnet18",
}


def family(name: str) -> tuple[nn.Module, Tensor]:
    """A small model of the family and four images it takes."""
    make, size = FAMILIES[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constructors: meshgrid, deprecated names
        model = make()
    return randomise(model), images(4, 3, size, size)


def family_params(names=FAMILIES):
    return [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in names]


# ---- feature rows ------------------------------------------------------------------------------

LABELS = torch.tensor([2, -1, 0, 2])
# The tiny model "cnn" answers 2 throughout and "bypassed module" 0: samples 0 and 2, or 0 and 3,
# forget their answer.
SETS = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]).bool()


def random_rows(
    classes: int, width: int, *, seed: int = 7, shared: bool = False, head: str = ""
) -> FeatureRows:
    """Feature rows of random numbers, in float64, with two factors."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    waves = 2 * (2 + width)
    return FeatureRows(
        normal(classes, width),
        normal(1 if shared else classes, 2, width),
        normal(classes, width).abs() + 0.1,
        normal(waves, width),
        normal(waves, 2 + width) / waves**0.5,
        0.2 + 0.8 * torch.rand(classes, generator=draw, dtype=torch.float64),
        head=head,
    )


def rerouted(name: str = "cnn", *, shared: bool = False, **options):
    """A filtered tiny model with random feature rows, and images."""
    x = images(4, 3, 8, 8)
    wf = apply(tiny(name), x, **options)
    head = wf.head(read_inputs(x, {}))
    wf.feature_rows = random_rows(CLASSES, head.width, shared=shared, head=str(head.weights[0]))
    return wf, x


def random_pairs(samples=300, classes=5, seed=0):
    """Logits and, drawn apart from them, labels and classes to forget."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(classes, (samples,), generator=generator) for _ in range(2)]
    logits = torch.randn(samples, classes, generator=generator)
    return logits, *draw


QUICK = dataclasses.replace(wfilter.RECIPES["distill"], depth=1.0, expansion=2)


def untrained(wf=None, **options):
    """A few steps of untraining: the filtered model and its history."""
    wf = wf or linear()
    options = {"recipe": QUICK, "steps": 6, **options}
    data = options.pop("data", wfilter.InMemory(*samples(), batch_size=8))
    return wf, wfilter.untrain(wf, data, **options)
