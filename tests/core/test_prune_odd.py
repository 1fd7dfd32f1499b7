"""Networks of odd parts, pruned: the same logits at every size they take, or the layer stays."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import CLASSES, close_rows, images, randomise
from wfilter.core.prune import prune

SIZES = ((8, 8), (9, 9), (11, 7), (16, 16), (40, 40))


class Odd(nn.Module):
    """A stem, some layers and a head, called as ``run`` says."""

    def __init__(self, run, width, **layers):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.head, self.run = nn.Linear(width, CLASSES), run

    def forward(self, x):
        return self.head(self.run(self, self.stem(x)).mean((2, 3)))


def conv(given=8, made=8, edge=3, **options):
    return nn.Conv2d(given, made, edge, **{"padding": edge // 2, **options})


def chain(*layers, width=6):
    """Layers one after the other, given the stem's eight channels."""
    return lambda: Odd(lambda net, x: net.layers(x), width, layers=nn.Sequential(*layers))


def padded(mode):
    two = conv(8, 6, padding=2, dilation=2, padding_mode=mode)
    return chain(nn.BatchNorm2d(8), nn.Sigmoid(), conv(padding_mode=mode), nn.ReLU(), two)


def residual(net, x):
    for layer, norm in ((net.a, net.p), (net.b, net.q)):
        x = x + norm(layer(x.relu()))
    return x


def squeezed(net, x):
    weights = net.expand(net.reduce(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
    return net.last(x * weights)


def joined(net, x):
    a, b = net.a(x).relu(), net.b(x).sigmoid()
    c = net.c(torch.cat([a, b], 1))
    return torch.cat([c, a, net.d(c)], 1)


def shuffled(net, x):
    batch, channels, height, width = x.shape
    x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(x.shape)
    return net.last(x)


def gated(net, x):
    a, b = net.a(x.relu()).chunk(2, 1)
    return net.last(a * b.sigmoid())


def added_in_place(net, x):
    y = net.a(x)
    y += x
    return net.b(y.relu_()).add_(y).mul_(0.5)


def one_bias():
    net = Odd(lambda net, x: net.b(net.a(x).relu()), 8, a=conv(edge=1), b=conv(edge=1))
    net.b.bias = net.a.bias
    return net


def counted(net, x):
    x = x.sigmoid()
    return net.last(x / x.shape[1])


# fmt: off
NETS = {
    **{f"padding {mode}": padded(mode) for mode in ("zeros", "reflect", "replicate", "circular")},
    "a layer called twice": lambda: Odd(
        lambda net, x: net.b(net.a(net.a(x.relu()).relu())), 6, a=conv(), b=conv(8, 6, 1)),
    "a bias in two layers": one_bias,
    "groups": chain(nn.ReLU(), conv(8, 12, groups=4), nn.BatchNorm2d(12), nn.ReLU(),
                    conv(12, 8, 1, groups=2), conv(8, 6)),
    "depthwise": chain(nn.BatchNorm2d(8), nn.ReLU(), conv(8, 16, groups=8), nn.BatchNorm2d(16),
                       nn.SiLU(), conv(16, 6, stride=2)),
    "concatenated": lambda: Odd(
        joined, 14, a=conv(8, 5), b=conv(8, 4, 1), c=conv(9, 6), d=conv(6, 3, 1)),
    "squeeze and excite": lambda: Odd(
        squeezed, 6, reduce=conv(8, 4, 1), expand=conv(4, 8, 1), last=conv(8, 6)),
    "PReLU": chain(nn.PReLU(8), conv(), nn.PReLU(), conv(8, 6)),
    "GroupNorm": chain(nn.GroupNorm(4, 8), nn.ReLU(), conv(8, 6), nn.GroupNorm(6, 6)),
    "InstanceNorm": chain(nn.InstanceNorm2d(8), nn.ReLU(), conv(8, 6),
                          nn.InstanceNorm2d(6, affine=True, track_running_stats=True), nn.GELU()),
    "BatchNorm without affine": chain(nn.BatchNorm2d(8, affine=False), nn.Sigmoid(), conv(8, 6)),
    "a chain of residuals": lambda: Odd(
        residual, 8, a=conv(bias=False), b=conv(), p=nn.BatchNorm2d(8), q=nn.BatchNorm2d(8)),
    "added in place": lambda: Odd(added_in_place, 8, a=conv(), b=conv(edge=1)),
    "ConvTranspose": chain(nn.Sigmoid(), nn.ConvTranspose2d(8, 6, 3, 2, 1, 1), nn.Sigmoid(),
                           nn.ConvTranspose2d(6, 8, 2, groups=2), conv(8, 6)),
    "shuffled channels": lambda: Odd(shuffled, 6, last=conv(8, 6)),
    "a gated linear unit": lambda: Odd(gated, 6, a=conv(8, 12), last=conv(6, 6)),
    "averages that count padding": chain(nn.Sigmoid(), nn.AvgPool2d(3, 1, 1), conv(8, 6)),
    "padding with a number": chain(nn.Sigmoid(), nn.ConstantPad2d(1, 2.0), conv(8, 6)),
    "a mean over channels": lambda: Odd(
        lambda net, x: net.last(x - x.mean(1, keepdim=True)), 6, last=conv(8, 6)),
    "channels sorted by size": lambda: Odd(
        lambda net, x: net.last(x.sort(1).values), 6, last=conv(8, 6)),
    "channels rolled and turned": lambda: Odd(
        lambda net, x: net.last(x.roll(1, 1) + x.flip(1)), 6, last=conv(8, 6)),
    "a number of channels that is read": lambda: Odd(counted, 6, last=conv(8, 6)),
    "normalised channels": lambda: Odd(
        lambda net, x: net.last(F.normalize(x, dim=1)), 6, last=conv(8, 6)),
}
# fmt: on


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("seed", [0, 1])
def test_odd_parts_are_cut_exactly_or_stay(name, seed):
    torch.manual_seed(seed)
    model = close_rows(randomise(NETS[name]()), 0.5, seed)
    result = prune(model, images(2, 3, 8, 8))
    assert result.cuts or result.left
    for height, width in SIZES:
        x = images(3, 3, height, width, seed=seed)
        expected = model(x)
        error = (result.model(x) - expected).abs().max() / expected.abs().max()
        assert error < 1e-10, (height, width, str(result))
