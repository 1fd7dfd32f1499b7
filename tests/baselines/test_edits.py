import pytest
import torch
from torch import nn

from wfilter import baselines


@pytest.mark.parametrize("name", ["projection", "leace", "esc", "cse"])
def test_a_change_of_the_features_needs_a_linear_head(name):
    model = nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten())
    with pytest.raises(ValueError, match="needs a linear layer with 4 outputs"):
        baselines.METHODS[name](model, 0, [(torch.rand(4, 1, 8, 8), torch.arange(4))])
