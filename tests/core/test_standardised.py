"""Weights that a model rescales before use: gated where they act, or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import CLASSES, apply, close, images, randomise

LABELS = torch.tensor([3, -1, 0, 1])


def by_batch_norm(weight):
    flat = weight.reshape(1, len(weight), -1)
    return F.batch_norm(flat, None, None, training=True, eps=1e-8).reshape_as(weight)


def by_mean_and_spread(weight):
    centred = weight - weight.mean((1, 2, 3), keepdim=True)
    return centred / centred.std((1, 2, 3), keepdim=True)


def by_length(weight):
    return F.normalize(weight.flatten(1)).view_as(weight)


class Rescaled(nn.Conv2d):
    """Somebody's own standardisation; it also looks at the weight's kind, which is no use of it."""

    def __init__(self, rescale, *args):
        super().__init__(*args)
        self.rescale = rescale

    def forward(self, x):
        x = x.to(self.weight.dtype, copy=True) if self.weight.requires_grad else x
        assert self.weight.dtype == x.dtype
        assert self.weight.shape[1] == x.shape[1]
        return F.conv2d(x, self.rescale(self.weight), self.bias)


class Net(nn.Module):
    """A rescaled convolution, and after it a plain one of the same shape that is no target."""

    def __init__(self, rescale):
        super().__init__()
        self.first, self.second = Rescaled(rescale, 3, 3, 3), nn.Conv2d(3, 3, 3)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x):
        assert self.first.weight.dtype == x.dtype
        x = self.second(self.second(x.tanh())) + self.first(self.first(x).tanh())
        return self.head(x.tanh().mean((2, 3)))


def gated_by_hand(model, x, gate):
    """Scale what the rescaled convolution gives, but for its bias."""

    def scale(module, args, output):
        bias = module.bias.view(-1, 1, 1)
        return (output - bias) * gate.view(-1, 1, 1) + bias

    hook = model.first.register_forward_hook(scale)
    try:
        return model(x)
    finally:
        hook.remove()


@torch.no_grad()
@pytest.mark.parametrize("rescale", [by_batch_norm, by_mean_and_spread, by_length])
def test_a_convolution_that_rescales_its_weight_is_gated_where_it_acts(rescale):
    x = images(4, 3, 12, 12)
    wf = apply(randomise(Net(rescale)), x, targets="first.weight")
    assert wf.plan[0].path == "fused"
    for row in (0, 3):
        right = gated_by_hand(wf.base, x, wf.gates(row)["first.weight"])
        assert not torch.allclose(right, wf(x), rtol=1e-2)
        close(wf(x, forget=row), right)
        close(wf.bake(row)(x), right)
        sample = LABELS.tolist().index(row)
        close(wf(x, forget=LABELS)[sample], right[sample])
    assert wf.verify(x, LABELS)["fused"] < 1e-12


class Elsewhere(nn.Module):
    """Rescales a layer's weight outside of that layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = F.conv2d(x, by_mean_and_spread(self.conv.weight), self.conv.bias)
        return self.head(x.tanh().mean((2, 3)))


class LinearOnes(nn.Linear):
    def forward(self, x):
        return F.linear(x, F.normalize(self.weight), self.bias)


@pytest.mark.parametrize("kind", ["elsewhere", "linear"])
def test_a_weight_rescaled_in_another_way_is_refused(kind):
    model, name = Elsewhere(), "conv"
    if kind == "linear":
        model, name = nn.Sequential(nn.Flatten(), LinearOnes(192, 5), nn.Linear(5, CLASSES)), "1"
    x = images(4, 3, 8, 8)
    with pytest.raises(ValueError, match=rf"{name}\.weight is rescaled by the model before use"):
        apply(randomise(model), x, targets="*")
    apply(model, x, targets="*.bias")
