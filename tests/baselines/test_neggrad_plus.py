import pytest
import torch
from torch import nn
from torch.nn import functional as F

import digits
from digits import FORGET, accuracies, train
from wfilter import baselines


def test_a_step_weighs_descent_on_one_half_against_ascent_on_the_other():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    images, labels = torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
    settings = {"retain_weight": 0.75, "epochs": 1, "lr": 0.1}
    changed = baselines.neggrad_plus(model, 0, [(images, labels)], **settings)
    retain = F.cross_entropy(model(images[1::2]), labels[1::2])
    forget = F.cross_entropy(model(images[::2]), labels[::2])
    (gradient,) = torch.autograd.grad(0.75 * retain - 0.25 * forget, model.weight)
    torch.testing.assert_close(
        changed.weight, model.weight - 0.1 * (gradient + 5e-4 * model.weight)
    )


def test_the_forget_half_starts_again_until_the_retain_half_is_through():
    changed = baselines.neggrad_plus(digits.trained_cnn(), FORGET, train(), epochs=2)
    retain, forget = accuracies(changed)
    assert forget < 0.5
    assert retain > 0.6


def test_a_weight_that_leaves_one_half_out_is_refused():
    for weight in (0, 1, 1.5):
        with pytest.raises(ValueError, match="is outside 0 < w < 1"):
            baselines.neggrad_plus(digits.trained_cnn(), FORGET, train(), retain_weight=weight)
