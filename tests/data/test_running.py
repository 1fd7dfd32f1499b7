"""A model that is run over batches is left as it was."""

import torch
from torch import nn

from wfilter.data.running import evaluating, seeded


def test_each_modules_mode_and_the_random_state_come_back():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)).train()
    model[1].eval()
    state = torch.random.get_rng_state()
    with evaluating(model), seeded(3):
        assert not model[0].training
        torch.rand(1)
    assert model.training
    assert model[0].training
    assert not model[1].training
    assert torch.equal(state, torch.random.get_rng_state())
