"""The probe by layer looks at the same layers of every model."""

import torch
from torch import nn

from wfilter.metrics.depth import layer_features


def network(*before_head: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU()]
    return nn.Sequential(*layers, *before_head, nn.Linear(5, 3))


def test_a_layer_added_before_the_head_does_not_shift_the_layers_looked_at():
    images, original = torch.randn(8, 4), network()
    found = layer_features(network(nn.Linear(5, 5)), images, like=original)
    wanted = layer_features(original, images)
    assert [x.shape[1] for x in found] == [7, 6, 5, 5]
    for one, other in zip(found[:3], wanted[:3]):
        torch.testing.assert_close(one, other)
    assert not torch.equal(found[3], wanted[3])  # what the head sees is the added layer's


def test_a_model_with_other_layers_has_no_depths():
    images = torch.randn(8, 4)
    assert layer_features(nn.Linear(4, 3), images, like=network()) is None
