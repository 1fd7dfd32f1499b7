"""Edits of channels that are folded into the next layer's weights."""

import torch
from torch import nn

import feature_layers
from wfilter.core.folding import folded
from wfilter.untraining.fitting import FeatureStatistics, fit_rows


@torch.no_grad()
def test_a_folded_convolution_equals_the_edit_of_every_place_before_it():
    torch.manual_seed(0)
    labels = torch.arange(400) % 10
    seen = torch.randn(400, 12) + 3 * torch.eye(10, 12)[labels]
    model = nn.Sequential(nn.GELU(), nn.Conv2d(12, 5, 3, bias=False))
    before = model[1]
    edit = feature_layers.fold_at(model, ("1",), 3, seen, labels)
    statistics = FeatureStatistics(10, 12)
    statistics.add(seen, labels)
    wanted_edit = folded(fit_rows(statistics), nn.Linear(12, 10), torch.arange(10) == 3)[0]
    torch.testing.assert_close(edit.weight, wanted_edit.weight)
    x = torch.randn(2, 12, 6, 6)
    wanted = before(edit(x.movedim(1, -1)).movedim(-1, 1))
    torch.testing.assert_close(model[1](x), wanted, atol=1e-4, rtol=1e-4)


def test_what_is_read_is_averaged_over_positions_and_noted_by_place():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 5, 2), nn.Flatten())
    images = torch.randn(6, 3, 2, 2)
    seen, logits = feature_layers.channel_means(model, {"1": ("2",)}, images)
    torch.testing.assert_close(seen["1"], model[:2](images).mean((2, 3)))
    torch.testing.assert_close(logits, model(images))
    assert not model[2]._forward_pre_hooks
