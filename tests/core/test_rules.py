"""Each kind of layer, gated per sample, against weights multiplied by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import reference
import wfilter
from helpers import CLASSES, apply, close, images, randomise
from wfilter.core.rules import RULES, register

LABELS = torch.tensor([3, -1, 0, 1])


class Wrapped(nn.Module):
    """A layer between an input and a head that fits whatever it gives."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer = layer
        self.double()
        self.head = nn.Linear(self.features(torch.zeros(2, *shape).double()).shape[1], CLASSES)

    def features(self, x):
        out = self.layer(x)
        return torch.tanh(out[0] if isinstance(out, tuple) else out).flatten(1)

    def forward(self, x):
        return self.head(self.features(x))


LAYERS = {
    "conv1d": (nn.Conv1d(4, 6, 3), (4, 9)),
    "conv2d": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 6, 6)),
    "conv2d reflect": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (4, 6, 6)),
    "conv2d without bias": (nn.Conv2d(4, 6, 3, bias=False), (4, 6, 6)),
    "conv2d grouped": (nn.Conv2d(4, 6, 3, groups=2), (4, 6, 6)),
    "conv2d depthwise": (nn.Conv2d(4, 4, 3, groups=4), (4, 6, 6)),
    "conv3d": (nn.Conv3d(2, 3, 2), (2, 4, 4, 4)),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3), (4, 5)),
    "transposed 2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (4, 3, 3)),
    "transposed 2d grouped": (nn.ConvTranspose2d(4, 6, 3, groups=2), (4, 3, 3)),
    "transposed 3d": (nn.ConvTranspose3d(2, 3, 2), (2, 3, 3, 3)),
    "linear": (nn.Linear(5, 7), (5,)),
    "linear on channels last": (nn.Linear(5, 7), (3, 2, 5)),
    "layer norm": (nn.LayerNorm(5), (3, 5)),
    "layer norm without bias": (nn.LayerNorm(5, bias=False), (3, 5)),
    "layer norm over three axes": (nn.LayerNorm([4, 3, 3]), (4, 3, 3)),
    "layer norm over equal axes": (nn.LayerNorm([3, 3, 3]), (3, 3, 3)),
    "rms norm": (nn.RMSNorm(5), (3, 5)),
    "group norm": (nn.GroupNorm(2, 4), (4, 3, 3)),
    "batch norm": (nn.BatchNorm2d(4), (4, 3, 3)),
    "instance norm": (nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
    "prelu": (nn.PReLU(4), (4, 3, 3)),
    "transformer layer": (nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), (4, 6)),
}


@pytest.mark.parametrize("granularity", ["out", "element"])
@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_layer_gated_per_sample_equals_its_weights_multiplied_by_hand(kind, granularity):
    layer, shape = LAYERS[kind]
    model = randomise(Wrapped(copy.deepcopy(layer), shape))
    x = images(4, *shape) - 0.3
    wf = apply(model, x, targets="layer.*", granularity=granularity)
    expected = reference.logits(wf, x, LABELS)
    assert (expected - model(x)).abs().amax(1)[[0, 2, 3]].min() > 1e-6
    close(wf(x, forget=LABELS), expected)
    row = reference.filtered_copy(wf, [2])(x)
    close(wf(x, forget=2), row)
    with wf.forgetting(2):
        close(wf(x), row)
    close(wf.bake(2)(x), row)


@pytest.mark.parametrize("granularity", ["out", "element"])
@torch.no_grad()
def test_bias_has_gates_of_its_own(granularity):
    model = randomise(Wrapped(nn.Conv2d(4, 6, 3), (4, 6, 6)))
    x = images(4, 4, 6, 6)
    for targets in ("layer.weight", "layer.bias"):
        wf = apply(model, x, targets=targets, granularity=granularity)
        close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))
        wfilter.remove_weight_filtering(wf)


@torch.no_grad()
def test_closed_convolution_before_batch_norm_leaves_a_constant_not_zero(x):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    wf = apply(randomise(model), x, targets="0.*")
    wf.alphas.fill_(-wfilter.core.gates.HARD)
    inside = []
    handle = model[1].register_forward_hook(lambda module, args, out: inside.append(out))
    wf(x, forget=LABELS)
    handle.remove()
    norm = model[1]
    constant = norm.bias - norm.weight * norm.running_mean / (norm.running_var + norm.eps).sqrt()
    close(inside[-1][0], constant.view(-1, 1, 1).expand(4, 6, 6))
    assert constant.abs().min() > 0


class Cross(nn.Module):
    """A learned query attends to the pixels: cross-attention, keys of another width if asked."""

    def __init__(self, width=3, key_width=None):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, width))
        self.attention = nn.MultiheadAttention(
            width, 1, kdim=key_width, vdim=key_width, batch_first=True
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        pixels = x.flatten(2).transpose(1, 2)
        return self.head(self.attention(self.query.expand(len(x), -1, -1), pixels, pixels)[0][:, 0])


@pytest.mark.parametrize(("width", "key_width"), [(3, None), (6, 3)])
@torch.no_grad()
def test_cross_attention_is_exact_and_auto_takes_its_projections(x, width, key_width):
    model = randomise(Cross(width, key_width))
    wf = apply(model, x)
    assert any("weight" in target.name for target in wf.targets)
    close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))
    wfilter.remove_weight_filtering(wf)
    wf = apply(model, x, targets="attention.*")
    close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn", "need_weights", "mask"])
@torch.no_grad()
def test_unusual_self_attention_is_still_right(option, x):
    class Unusual(nn.Module):
        def __init__(self):
            super().__init__()
            options = {option: True} if option.startswith("add") else {}
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x):
            tokens = x.flatten(1).view(len(x), 24, 8)
            mask = torch.ones(24, 24).triu(1).bool() if option == "mask" else None
            out, weights = self.attention(tokens, tokens, tokens, attn_mask=mask)
            if option == "need_weights":
                out = out + weights.sum(1, keepdim=True).transpose(1, 2)
            return self.head(out.mean(1))

    wf = apply(randomise(Unusual()), x, targets="*")
    close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))


@torch.no_grad()
def test_recurrent_layer_is_right_for_one_class_and_in_mixed_batches(x):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(24, 6, batch_first=True)
            self.head = nn.Linear(6, CLASSES)

        def forward(self, x):
            return self.head(self.lstm(x.flatten(1).view(len(x), 8, 24))[0][:, -1])

    wf = apply(randomise(Recurrent()), x, targets="lstm.*")
    by_hand = copy.deepcopy(wf.base)
    for name, alpha in wf.alpha.items():
        parameter = by_hand.get_parameter(name)
        parameter.mul_(torch.sigmoid(alpha[2]).view(-1, *[1] * (parameter.ndim - 1)))
    close(wf(x, forget=2), by_hand(x))
    close(wf.bake(2)(x), by_hand(x))
    with wf.forgetting(2):
        close(wf(x), by_hand(x))
    assert "one sample at a time" in wf.plan[0].why  # vmap has no rule for it
    close(wf(x, forget=torch.full((4,), 2)), by_hand(x))


def test_registered_function_takes_the_fused_path(x):
    class Einsum(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.randn(6, 192))
            self.head = nn.Linear(6, CLASSES)

        def forward(self, x):
            return self.head(torch.einsum("bi,oi->bo", x.flatten(1), self.mix).tanh())

    before = wfilter.find_targets(Einsum(), "mix", example_input=x.float())
    assert before[0].path == "exact"
    assert "einsum, which has no rule" in before[0].why
    register(torch.einsum, weight=(2, "weight"))
    try:
        wf = apply(randomise(Einsum()), x, targets="mix")
        assert wf.plan[0].path == "fused"
        with torch.no_grad():
            close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))
    finally:
        RULES.pop(torch.einsum)


def test_register_refuses_what_is_not_a_function():
    with pytest.raises(TypeError, match="register takes a torch function, not str"):
        register("einsum", weight=(2, "weight"))


@torch.no_grad()
def test_weights_read_through_views_and_slices_are_exact(x):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(192, 6)
            self.head = nn.Linear(6, CLASSES)

        def forward(self, x):
            x = x.flatten(1)
            left = F.linear(x, self.layer.weight[:3], self.layer.bias[:3])
            return self.head(torch.cat([left, x @ self.layer.weight.T[:, 3:]], 1).tanh())

    wf = apply(randomise(Views()), x, targets="layer.*")
    assert {row.path for row in wf.plan} == {"exact"}
    close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))


class Odd(nn.Module):
    """A weight used by a function that has its units on another axis, or as an input too."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(3, 3, 3, bias=False)
        self.up = nn.ConvTranspose2d(3, 3, 3, bias=False)
        self.table = nn.Parameter(torch.rand(3, 3))
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x):
        if self.kind == "kernel used transposed":
            return self.head(F.conv_transpose2d(self.conv(x).tanh(), self.conv.weight).mean((2, 3)))
        if self.kind == "transposed kernel used plainly":
            return self.head(F.conv2d(x, self.up.weight).tanh().mean((2, 3)))
        mixed = F.linear(x.mean((2, 3)), self.table)
        if self.kind == "weight used as an input":
            return self.head(mixed) + self.head(self.table).mean()
        if self.kind == "weight used as keys":
            keys = self.table[None].expand(len(x), -1, -1)
            return self.head(F.scaled_dot_product_attention(mixed[:, None], keys, keys)[:, 0])
        if self.kind == "weight used as a number":
            return self.head(mixed * self.table[0, 0].item() + self.table.sum())
        place = x.new_zeros(len(x), 3)
        place[:, 0] = mixed[:, 0]
        place[:, 1:] = self.table[0, 1:]
        return self.head(place)


ODD = {
    "kernel used transposed": "conv.weight",
    "transposed kernel used plainly": "up.weight",
    "weight used as an input": "table",
    "weight used as keys": "table",
    "weight written into a tensor": "table",
}


@pytest.mark.parametrize("kind", ODD)
@torch.no_grad()
def test_weight_used_otherwise_than_its_rule_says_is_exact(kind, x):
    wf = apply(randomise(Odd(kind)), x, targets=ODD[kind])
    assert wf.plan[0].path == "exact"
    close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))
    close(wf(x, forget=2), reference.logits(wf, x, torch.full((4,), 2)))


class OddBias(nn.Module):
    """``F.linear`` with a weight and a bias of these shapes, before a head."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(weight)), nn.Parameter(torch.rand(bias))
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x):
        h = x.mean((2, 3))[:, None].expand(-1, 3, -1)  # (batch, 3, 3)
        out = F.linear(h, self.weight, self.bias)
        return self.head(torch.tanh(out if out.ndim == 2 else out.mean(1)))


@pytest.mark.parametrize(
    ("weight", "bias", "targets"),
    [
        ((3,), (), ["weight"]),
        ((3, 3), (), ["weight"]),
        ((3, 3), (3, 3), ["weight"]),
        ((3, 3), (3, 3), ["bias"]),
        ((3, 3), (3, 3), ["weight", "bias"]),
        ((3, 3), (1, 3), ["weight", "bias"]),
    ],
)
@torch.no_grad()
def test_a_bias_without_an_entry_for_each_unit_is_exact(weight, bias, targets, x):
    wf = apply(randomise(OddBias(weight, bias)), x, targets=targets)
    assert {row.path for row in wf.plan} == {"exact"}
    close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))
    close(wf(x, forget=2), reference.logits(wf, x, torch.full((4,), 2)))


@torch.no_grad()
def test_weight_read_as_a_number_is_right_one_sample_at_a_time_in_mixed_batches(x):
    wf = apply(randomise(Odd("weight used as a number")), x, targets="table")
    close(wf(x, forget=2), reference.logits(wf, x, torch.full((4,), 2)))
    close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))
