"""What the head sees, for each sample, or a refusal where no sample has features of its own."""

import pytest
import torch
from torch import nn

from helpers import CLASSES, apply, images


class Net(nn.Module):
    """A layer and a head; ``use`` gets the model and the images."""

    def __init__(self, use, width=5):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.head = nn.Linear(width, CLASSES)
        self.use = use
        self.double()

    def forward(self, x):
        return self.use(self, x)

    def body(self, x):
        return self.conv(x).mean((2, 3)).relu()


def flipped(model, x):
    return model.head(model.body(torch.cat([x, x.flip(3)]))).view(2, len(x), -1).mean(0)


def framed(model, x):
    frames = torch.stack([x, x.flip(3)], 1).flatten(0, 1)
    return model.head(model.body(frames)).view(len(x), 2, -1).mean(1)


def positions_first(model, x):
    return model.head(model.conv(x).flatten(2).permute(2, 0, 1)[:4]).mean(0)


@torch.no_grad()
@pytest.mark.parametrize("use", [flipped, framed, positions_first])
@pytest.mark.parametrize("forget", [None, 1, torch.tensor([0, 1, -1, 3])])
def test_features_are_refused_where_a_sample_has_several_or_none_of_its_own(use, forget):
    x = images(4, 3, 8, 8)
    wf = apply(Net(use), x)
    with pytest.raises(RuntimeError, match="features per sample are not defined"):
        wf.features(x, forget=forget)


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_layer_with_as_many_outputs_as_classes_is_no_head_where_it_feeds_one(scale):
    x = images(4, 3, 8, 8)
    wf = apply(Net(lambda model, x: model.head(model.body(x)) * scale, width=CLASSES), x)
    torch.testing.assert_close(wf.features(x), wf.base.body(x))
    both = Net(lambda model, x: (model.head(model.body(x)) + model.head(x[:, 0, 0, :5])) / 2)
    assert apply(both, x).features(x).shape == (4, 10)


def with_a_later_layer(model, x):
    logits = model.head(model.body(x))
    model.later(x.mean((2, 3)))
    return logits


@torch.no_grad()
@pytest.mark.parametrize("count", [0, 2])
def test_features_are_the_heads_though_the_first_images_were_none_or_nan(count):
    x = images(4, 3, 8, 8)
    net = Net(with_a_later_layer)
    net.later = nn.Linear(3, CLASSES).double()
    wf = apply(net, x, targets="conv*")
    assert wf.features(torch.full_like(x, torch.nan)[:count]).shape == (count, 5)
    torch.testing.assert_close(wf.features(x), wf.base.body(x))


@torch.no_grad()
def test_a_new_inspection_finds_the_head_of_a_model_that_was_changed():
    x = images(4, 3, 8, 8)
    net = Net(lambda model, x: model.head(model.body(x)))
    wf = apply(net, x, targets="conv*")
    wf.features(x)
    net.later = nn.Linear(5, CLASSES).double()
    net.use = lambda model, x: model.later(model.head(model.body(x)).repeat(1, 2)[:, :5])
    wf.inspect(x)
    torch.testing.assert_close(wf.features(x), wf.base.head(wf.base.body(x)).repeat(1, 2)[:, :5])
