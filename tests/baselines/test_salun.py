import pytest
import torch
from torch import nn
from torch.nn import functional as F

import digits
from digits import FORGET, train
from wfilter import baselines
from wfilter.baselines.salun import saliency


def test_salun_moves_only_the_salient_half():
    model = digits.trained_cnn()
    changed = baselines.salun(model, FORGET, train(), epochs=1, steps=2)
    same = [
        (a == b).flatten() for a, b in zip(model.parameters(), changed.parameters(), strict=True)
    ]
    assert torch.cat(same).double().mean() == pytest.approx(0.5, abs=0.01)


def test_salient_weights_are_those_with_the_largest_gradient_of_the_forget_half():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    images, labels = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    masks = saliency(model, [(images[::2], labels[::2])], share=0.25)
    loss = F.cross_entropy(model(images[::2]), labels[::2])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    size = torch.cat([gradient.flatten() for gradient in gradients]).abs()
    chosen = torch.cat([mask.flatten() for mask in masks])
    assert int(chosen.sum()) == 2
    assert size[chosen].min() >= size[~chosen].max()
