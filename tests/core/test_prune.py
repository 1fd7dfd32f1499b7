"""Pruned models: smaller layers, the same logits, and words for what stayed."""

import copy

import pytest
import torch
from torch import nn

import wfilter
from helpers import (
    CLASSES,
    FAMILIES,
    TinyCNN,
    close,
    close_rows,
    family,
    images,
    randomise,
    snapshot,
)
from wfilter.core.gates import HARD
from wfilter.core.prune import prune

ORDINARY = ("timm mobilenetv3", "timm vit", "torchvision swin", "timm xcit", "torchvision vit")


def conv_net(padding=1, second=3, **options):
    """Two convolutions with BatchNorm between: closed channels of the first leave constants."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, second, padding=padding, bias=False, **options),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    ]
    model = randomise(nn.Sequential(*layers))
    with torch.no_grad():
        model[1].bias += 0.5  # constants other than zero after the ReLU
    return model


def close_channels(layer, channels):
    with torch.no_grad():
        layer.weight[channels] = 0


X = images(4, 3, 8, 8)


def test_closed_channels_their_statistics_and_what_reads_them_are_gone():
    model = conv_net(padding=0, second=1)
    close_channels(model[0], [1, 4, 5])
    pruned = prune(model, X).model
    assert pruned[0].weight.shape == (5, 3, 3, 3)
    assert pruned[1].running_var.shape == pruned[1].weight.shape == (5,)
    assert pruned[3].weight.shape == (6, 5, 1, 1)
    assert (pruned[0].out_channels, pruned[1].num_features, pruned[3].in_channels) == (5, 5, 5)
    close(pruned(X), model(X), 1e-13)


def test_a_constant_behind_batch_norm_goes_into_a_new_bias():
    model = conv_net(padding=0, second=3)
    close_channels(model[0], [1, 4])
    result = prune(model, X)
    assert model[3].bias is None
    assert result.model[3].bias.shape == (6,)
    close(result.model(X), model(X), 1e-13)


def test_at_padded_borders_one_constant_channel_carries_the_others():
    model = conv_net(padding=1)
    close_channels(model[0], [1, 4, 5])
    result = prune(model, X)
    assert result.model[0].out_channels == 6
    assert result.model[3].bias is None
    assert "carries the constants at the borders" in str(result)
    for x in (X, images(2, 3, 11, 7)):  # whatever the size of the images
        close(result.model(x), model(x), 1e-13)


def test_constants_of_zero_need_no_carrier():
    model = conv_net(padding=1)
    close_channels(model[0], [1, 4, 5])
    with torch.no_grad():
        model[1].bias[[1, 4, 5]] = -3.0  # the ReLU makes them zero
    result = prune(model, X)
    assert result.model[0].out_channels == 5
    assert not result.left
    close(result.model(X), model(X), 1e-13)


def test_a_channel_that_only_happens_to_be_silent_stays():
    model = conv_net()
    with torch.no_grad():
        model[1].bias[2] = -50.0  # silent on any ordinary image, but not closed
    assert prune(model, X).model[0].out_channels == 8
    far = 1000 * X
    close(prune(model, X).model(far), model(far), 1e-13)


def test_depthwise_partners_go_too():
    torch.manual_seed(0)
    model = randomise(
        nn.Sequential(
            nn.Conv2d(3, 8, 1, bias=False),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1, groups=8, bias=False),
            nn.BatchNorm2d(16),
            nn.Conv2d(16, 5, 1),
            nn.Flatten(),
            nn.Linear(320, CLASSES),
        )
    )
    close_channels(model[0], [0, 7])
    pruned = prune(model, X).model
    assert (pruned[2].groups, pruned[2].in_channels, pruned[2].out_channels) == (6, 6, 12)
    close(pruned(X), model(X), 1e-13)


def test_a_depthwise_layer_may_be_left_with_one_group():
    torch.manual_seed(0)
    model = randomise(
        nn.Sequential(
            nn.Conv2d(3, 4, 1, bias=False),
            nn.Conv2d(4, 8, 3, groups=4, bias=False),
            nn.Conv2d(8, 5, 1),
            nn.Flatten(),
            nn.Linear(180, CLASSES),
        )
    )
    close_channels(model[0], [0, 1, 3])
    pruned = prune(model, X).model
    assert (pruned[1].groups, pruned[1].in_channels, pruned[1].out_channels) == (1, 1, 2)
    close(pruned(X), model(X), 1e-13)


def test_slopes_of_prelu_go_with_their_channels():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 1), nn.PReLU(8), nn.Conv2d(8, 6, 1), nn.PReLU(), nn.Flatten()]
    model = randomise(nn.Sequential(*layers, nn.Linear(384, CLASSES)))
    close_channels(model[0], [1, 4])
    result = prune(model, X)
    assert (result.model[1].num_parameters, result.model[3].num_parameters) == (6, 1)
    assert not result.left
    close(result.model(X), model(X), 1e-13)


class SamePadding(nn.Module):
    """Padded as TensorFlow's "same": not at all at even sizes, by one at odd ones."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 2, stride=2)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        odd = [n % 2 for n in x.shape[-2:]]
        x = self.first(x).sigmoid()
        if any(odd):
            x = nn.functional.pad(x, (0, odd[1], 0, odd[0]))
        return self.head(self.second(x).mean((2, 3)))


def test_padding_that_depends_on_the_size_is_seen_whatever_the_example():
    torch.manual_seed(0)
    model = randomise(SamePadding())
    close_channels(model.first, [1, 2, 5])
    for edge in (8, 9):
        result = prune(model, images(2, 3, edge, edge))
        for height, width in ((8, 8), (9, 9), (9, 8), (12, 15)):
            x = images(2, 3, height, width)
            close(result.model(x), model(x), 1e-13)


def test_a_weight_computed_from_others_leaves_the_rest_to_be_cut():
    torch.manual_seed(0)
    first = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 1))
    layers = [nn.Conv2d(8, 6, 1), nn.Conv2d(6, 5, 1), nn.Flatten(), nn.Linear(320, CLASSES)]
    model = randomise(nn.Sequential(first, *layers))
    close_channels(model[1], [2, 3])
    result = prune(model, X)
    assert (result.model[0].out_channels, result.model[1].out_channels) == (8, 4)
    close(result.model(X), model(X), 1e-13)


def test_grouped_convolutions_stay_and_are_named():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.ReLU(), nn.Conv2d(8, 6, 1)]
    model = randomise(nn.Sequential(*layers, nn.Conv2d(6, 4, 1), nn.Flatten(), nn.Linear(256, 4)))
    close_channels(model[1], [0, 5])
    close_channels(model[3], [2])
    result = prune(model, X)
    assert result.model[3].out_channels == 5
    assert [left.why for left in result.left] == [
        "1.weight has 2 groups, which must stay of one size"
    ]
    close(result.model(X), model(X), 1e-13)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.inner = nn.Conv2d(8, 6, 3, padding=1)
        self.back = nn.Conv2d(6, 8, 1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.back(self.inner(x).relu())).mean((2, 3)))


def test_of_a_residual_stream_only_channels_closed_everywhere_go():
    torch.manual_seed(0)
    model = randomise(Residual())
    close_channels(model.stem, [1, 2, 3])
    close_channels(model.back, [2, 3, 4])
    close_channels(model.inner, [0])
    result = prune(model, X)
    assert result.model.stem.out_channels == 7  # one carries the constant of the other
    assert result.model.inner.out_channels == 5
    assert any(left.name == "stem.weight" and "reads it" in left.why for left in result.left)
    close(result.model(X), model(X), 1e-13)


def test_a_channel_that_nobody_reads_any_more_goes_too():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    randomise(model)
    with torch.no_grad():
        model[2].weight[:, 1] = 0
    assert prune(model).model[0].out_features == 5


def test_a_layer_that_is_closed_altogether_keeps_one_channel():
    model = conv_net(padding=0)
    close_channels(model[0], list(range(8)))
    result = prune(model, X)
    assert result.model[0].out_channels == 1
    close(result.model(X), model(X), 1e-13)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.second(self.scale * self.first(x).relu())


def test_one_number_for_all_channels_does_not_keep_them():
    torch.manual_seed(0)
    model = randomise(Scaled())
    close_channels(model.first, [1, 2])
    x = images(2, 4)
    assert prune(model, x).model.first.out_features == 6
    close(prune(model, x).model(x), model(x), 1e-13)


class Fixed(nn.Module):
    """Code that insists on a width."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        return self.second(self.first(x).view(len(x), 8).tanh())


class Counted(nn.Module):
    """Code that reads how many features there are."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x).tanh()
        return self.second(x / x.shape[1])


@pytest.mark.parametrize(("made", "why"), [(Fixed, "is invalid"), (Counted, "logits move")])
def test_what_cannot_be_cut_exactly_stays_and_is_named(made, why):
    torch.manual_seed(0)
    model = randomise(made())
    close_channels(model.first, [1, 2])
    result = prune(model, images(2, 4))
    assert result.model.first.out_features == 8
    assert result.cuts == ()
    (left,) = result.left
    assert (left.name, left.units) == ("first.weight", 2)
    assert why in left.why
    assert torch.equal(result.model(images(2, 4)), model(images(2, 4)))


class Shared(nn.Module):
    """One layer read twice, with other constants each time."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        return self.second(x.relu()) + self.second(x.sigmoid())


def test_a_layer_used_twice_with_different_constants_stays():
    torch.manual_seed(0)
    model = randomise(Shared())
    close_channels(model.first, [1, 2])
    x = images(2, 4)
    close(prune(model, x).model(x), model(x), 1e-13)


def test_pruning_leaves_the_model_given_as_it_was():
    model = close_rows(randomise(TinyCNN()))
    before, width = snapshot(model), model.stem.out_channels
    prune(model, X)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.stem.out_channels == width


def test_the_filtered_model_bakes_and_prunes_in_one_call():
    wf = wfilter.apply_weight_filtering(conv_net(), num_classes=CLASSES, example_input=X)
    with torch.no_grad():
        wf.alphas.copy_(torch.where(torch.rand(wf.alphas.shape) < 0.4, -HARD, HARD))
    small = wf.bake({0, 2}, prune=True, example_input=X)
    assert small[0].out_channels < 8
    close(small(X), wf(X, forget={0, 2}), 1e-12)
    close(small(X), wf.bake({0, 2})(X), 1e-12)


def test_a_pruned_model_keeps_dtype_and_gradient_flags():
    model = conv_net(padding=0).float()
    model[0].weight.requires_grad_(False)
    close_channels(model[0], [1])
    pruned = prune(model, X.float()).model
    assert {p.dtype for p in pruned.parameters()} == {torch.float32}
    assert not pruned[0].weight.requires_grad
    assert pruned[3].weight.requires_grad
    torch.testing.assert_close(pruned(X.float()), model(X.float()))


def test_an_input_that_cannot_be_guessed_is_asked_for():
    class Odd(Fixed):
        def forward(self, x):
            assert x.shape[1:] == (4, 5)
            return super().forward(x[:, :, 0])

    with pytest.raises(ValueError, match="Pass example_input"):
        prune(Odd().eval())


def test_a_head_whose_values_are_closed_goes():
    model, x = family("timm vit")
    attention = model.blocks[1].attn
    with torch.no_grad():
        attention.qkv.weight[2 * 192 + 64 : 2 * 192 + 128] = 0  # the values of the middle head
    result = prune(model, x)
    small = result.model.blocks[1].attn
    assert (small.num_heads, small.attn_dim, small.qkv.out_features) == (2, 128, 384)
    assert small.proj.in_features == 128
    assert result.attributes["blocks.1.attn"] == {"num_heads": 2, "attn_dim": 128}
    assert not result.left
    close(result.model(x), model(x), 1e-12)


def families():
    slow = [pytest.mark.slow]
    return [pytest.param(n, marks=[] if n in ORDINARY else slow) for n in FAMILIES]


WHOLE = {"timm bit": "read by group_norm"}  # of which nothing can be cut, and why


@torch.no_grad()  # some keep what they computed, and could not be copied with its gradient
@pytest.mark.parametrize("name", families())
def test_a_pruned_family_has_fewer_parameters_and_the_same_logits(name):
    model, x = family(name)
    wf = wfilter.apply_weight_filtering(model, example_input=x)
    whole = close_rows(wf.bake(set()))
    result = prune(whole, x)
    if name in WHOLE:
        assert {left.why for left in result.left} == {WHOLE[name]}
        assert result.parameters[1] == result.parameters[0]
    else:
        assert result.parameters[1] < 0.95 * result.parameters[0]
    close(result.model(x), whole(x), 1e-10)
    assert copy.deepcopy(result.model)(x).shape == (4, 10)


class Positions(nn.Module):
    """Rotary positions as timm's Gemma makes them: in float32, whatever the model is in."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("frequencies", torch.rand(4))

    def forward(self, x):
        steps = torch.arange(1, device=x.device).float()
        angles = self.frequencies[:, None].float() @ steps[None]
        return self.last(self.first(x).relu()) * angles.cos().to(x.dtype).mean()


def test_a_model_that_computes_in_another_precision_can_be_followed():
    model = Positions().eval()
    with torch.no_grad():
        model.first.weight[:5] = 0
        model.first.bias[:5] = 0
    pruned = prune(model, torch.zeros(1, 4))
    assert pruned.model.first.out_features == 3


class Counting(nn.Module):
    """Gives NaN as soon as a channel is missing."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, CLASSES)

    def forward(self, x):
        h = self.conv(x).relu()
        return self.head((h if h.shape[1] == 6 else h * torch.nan).mean((2, 3)))


def test_a_cut_after_which_logits_are_nan_is_refused():
    model = randomise(Counting())
    with torch.no_grad():
        model.conv.weight[2] = model.conv.bias[2] = 0
    pruned = prune(model, X)
    assert pruned.model.conv.out_channels == 6
    assert "without it the logits move by inf of their size" in str(pruned)


@torch.no_grad()
def test_forgotten_logits_far_below_all_others_hide_no_change():
    class Shifted(Counting):
        def forward(self, x):
            h = self.conv(x).relu()
            return self.head(h.mean((2, 3))) + (0 if h.shape[1] == 6 else 1e-7)

    model = randomise(Shifted())
    model.head.weight[1], model.head.bias[1] = 0, -1e4
    model.conv.weight[2] = model.conv.bias[2] = 0
    assert prune(model, X).model.conv.out_channels == 6
