"""Channels that code reads beside the layers, where that shows on rare images only: they stay."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import CLASSES, close, images, randomise
from wfilter.core.prune import prune

RARE = 300.0  # features of ordinary images are much smaller


class Rare(nn.Module):
    """No layer reads the first channel of ``first``; it is large on red images and on no others."""

    def __init__(self, look):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1)
        self.head, self.look = nn.Linear(6, CLASSES), look
        randomise(self)
        with torch.no_grad():
            self.first.weight[0] = torch.tensor([9.0, -9.0, 0.0]).view(3, 1, 1)
            self.first.bias[0] = -400
            self.second.weight[:, 0] = 0

    def forward(self, x):
        y = self.first(x)
        return self.head(self.look(y, self.second(y)).mean((2, 3)))


def red():
    x = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    x[:, 0], x[1, 0, 2, 2] = 100, 170
    return x


def any_large(y):
    return (y > 300.0).any(1, keepdim=True).to(y)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still in use
    scripted = torch.jit.script(any_large)


def overwritten(y, z):
    z = z.clone()
    z[(y > RARE).any(1, keepdim=True).expand(z.shape)] = 7.0
    return z


# fmt: off
LOOKS = {
    "the largest of all": lambda y, z: z * y.max(),
    "divided by the largest": lambda y, z: z / y.amax((1, 2, 3), keepdim=True),
    "the largest channel": lambda y, z: z * y.max(1, keepdim=True).values,
    "the three largest": lambda y, z: torch.cat([z[:, :3], y.topk(3, 1).values], 1),
    "pooled channels": lambda y, z: z * F.adaptive_max_pool3d(y, (1, *y.shape[2:])),
    "the largest by index": lambda y, z: z * y.gather(1, y.argmax(1, keepdim=True)),
    "scattered": lambda y, z: z * torch.zeros_like(y[:, :1]).scatter_reduce(
        1, torch.zeros_like(y).long(), y, "amax"),
    "where": lambda y, z: torch.where((y > RARE).any(1, keepdim=True), z, 2 * z),
    "steps": lambda y, z: z * (1 + (y > RARE).to(y).sum(1, keepdim=True)),
    "signs": lambda y, z: z * (30 + (y - RARE).sign().amax(1, keepdim=True)),
    "a mask": lambda y, z: z.masked_fill((y > RARE).any(1, keepdim=True), 1.0),
    "overwritten": overwritten,
    "a branch": lambda y, z: z + 3 if y.amax() > RARE else z,
    "a branch by any": lambda y, z: z + 3 if (y > RARE).any() else z,
    "a Python number": lambda y, z: z + max(0.0, float(y.max()) - RARE),
    "a list": lambda y, z: z + max(RARE, *y.flatten().tolist()),
    "numpy": lambda y, z: z + max(float(y.numpy().max()) - RARE, 0.0),
    "whole numbers": lambda y, z: z + (y / RARE).relu().int().sum(1, keepdim=True),
    "without NaN": lambda y, z: z * torch.nan_to_num(y).amax(1, keepdim=True),
    "quantised": lambda y, z: z * torch.fake_quantize_per_tensor_affine(
        y, 3.0, 0, -128, 127).amax(1, keepdim=True),
    "buckets": lambda y, z: z * (1 + torch.bucketize(
        y, torch.tensor([RARE]).to(y)).sum(1, keepdim=True)),
    "an einsum": lambda y, z: z * (1 + torch.einsum(
        "bchw->bhw", F.threshold(y, RARE, 0.0)).unsqueeze(1)),
    "scripted code": lambda y, z: z * (1 + scripted(y)),
}
# fmt: on


@torch.no_grad()
@pytest.mark.parametrize("name", LOOKS)
def test_what_code_reads_beside_the_layers_stays(name):
    torch.manual_seed(0)
    model = Rare(LOOKS[name])
    result = prune(model, images(2, 3, 8, 8))
    for x in (red(), images(2, 3, 8, 8)):
        close(result.model(x), model(x), 1e-12)


def test_what_no_code_reads_goes():
    torch.manual_seed(0)
    assert prune(Rare(lambda y, z: z), images(2, 3, 8, 8)).model.first.out_channels == 7


class Switched(nn.Module):
    """Closed channels that are constants but for red images."""

    def __init__(self, switch):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1)
        self.beside, self.head = nn.Conv2d(3, 1, 1), nn.Linear(6, CLASSES)
        self.switch = switch
        randomise(self)
        with torch.no_grad():
            self.first.weight[:3] = 0

    def forward(self, x):
        red = self.beside(50 * (x[:, :1] - x[:, 1:2] - 20).expand_as(x).relu())
        return self.head(self.second(self.switch(self.first(x), red.abs())).relu().mean((2, 3)))


SWITCHES = {
    "where": lambda y, red: torch.where(red > RARE, 5.0, y),
    "a mask": lambda y, red: y.masked_fill(red > RARE, 5.0),
    "a branch": lambda y, red: y.abs() + 5 if red.max() > RARE else y,
    "a step": lambda y, red: y + 5 * (red > RARE).to(y),
    "a sign": lambda y, red: y + (red - RARE).sign(),
    "the larger of two": lambda y, red: torch.fmax(y, red - RARE),
}


@torch.no_grad()
@pytest.mark.parametrize("name", SWITCHES)
def test_a_comparison_that_random_images_decide_in_one_way_makes_no_constant(name):
    torch.manual_seed(0)
    model = Switched(SWITCHES[name])
    assert not torch.equal(model(red())[0], Switched(lambda y, _: y).eval()(red())[0])
    result = prune(model, images(2, 3, 8, 8))
    for x in (red(), images(2, 3, 8, 8)):
        close(result.model(x), model(x), 1e-12)


class Small(nn.Module):
    """Code that pads maps that are small."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 3)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.first(x).sigmoid()
        if x.shape[-1] < 7:
            x = F.pad(x, (1, 1, 1, 1))
        return self.head(self.second(x).mean((2, 3)))


@torch.no_grad()
def test_code_that_treats_small_images_in_another_way_is_seen():
    torch.manual_seed(0)
    model = randomise(Small())
    model.first.weight[:3] = 0
    result = prune(model, images(2, 3, 8, 8))
    for edge in (5, 6, 8, 20):
        close(result.model(images(2, 3, edge, edge)), model(images(2, 3, edge, edge)), 1e-12)


@torch.no_grad()
def test_a_relu_by_comparison_costs_only_what_it_acts_on():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 6, 1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES))
    model[2].register_forward_hook(lambda _, given, x: x * (x > 0))
    randomise(model)
    model[0].weight[:2], model[2].weight[:2] = 0, 0
    result = prune(model, images(2, 3, 8, 8))
    assert (result.model[0].out_channels, result.model[2].out_channels) == (6, 8)
    close(result.model(red()), model(red()), 1e-12)


class Heads(nn.Module):
    """Attention whose weights are read beside the projection: the largest over the heads."""

    def __init__(self, dim=8, heads=4):
        super().__init__()
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.head, self.num_heads = nn.Linear(dim, CLASSES), heads
        self.look = lambda logits: 1.0

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        parts = self.qkv(tokens).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        logits = parts[0] @ parts[1].transpose(-2, -1)
        mixed = (logits.softmax(-1) @ parts[2]).transpose(1, 2).flatten(2)
        return self.head(self.proj(mixed).mean(1) * self.look(logits))


@torch.no_grad()
def test_a_head_stays_whose_attention_is_read_by_code():
    torch.manual_seed(0)
    model = randomise(nn.Sequential(Heads()))
    qkv = model[0].qkv
    qkv.weight[16:18], qkv.bias[16:18] = 0, 0
    qkv.weight[[0, 1, 8, 9]] *= 0.1  # its own attention is the largest on rare images only
    qkv.bias[[0, 1]], qkv.bias[[8, 9]] = 3, -3
    assert prune(model, images(2, 8, 3, 3)).model[0].num_heads == 3
    model[0].look = lambda logits: 1 + logits.amax((1, 2, 3))[:, None].relu()
    small = prune(model, images(2, 8, 3, 3)).model
    assert small[0].num_heads == 4
