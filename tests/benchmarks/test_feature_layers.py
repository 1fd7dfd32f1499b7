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
    feature_layers.fold_at(model, 0, 3, seen, labels)
    statistics = FeatureStatistics(10, 12)
    statistics.add(seen, labels)
    edit = folded(fit_rows(statistics), nn.Linear(12, 10), torch.arange(10) == 3)[0]
    x = torch.randn(2, 12, 6, 6)
    wanted = before(edit(x.movedim(1, -1)).movedim(-1, 1))
    torch.testing.assert_close(model[1](x), wanted, atol=1e-4, rtol=1e-4)
