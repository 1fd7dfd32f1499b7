import torch
from torch import nn
from torch.nn import functional as F

import digits
from digits import FORGET, train
from wfilter import baselines


def test_the_penalty_falls_to_zero_epoch_by_epoch():
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).double()
    images, labels = torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
    settings = {"gamma": 0.3, "epochs": 3, "lr": 0.1}
    changed = baselines.l1_sparse(model, 0, [(images, labels)], **settings)
    weight, velocity = model.weight.detach().clone().requires_grad_(), 0
    for gamma in (0.3, 0.2, 0.1):
        loss = F.cross_entropy(images[1::2] @ weight.T, labels[1::2]) + gamma * weight.abs().sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        velocity = 0.9 * velocity + gradient + 5e-4 * weight.detach()
        weight = (weight - 0.1 * velocity).detach().requires_grad_()
    torch.testing.assert_close(changed.weight, weight)


def test_weights_are_smaller_than_after_fine_tuning_alone():
    sizes = []
    for method in (baselines.l1_sparse, baselines.fine_tuning):
        changed = method(digits.trained_cnn(), FORGET, train(), lr=0.1, epochs=3)
        sizes.append(sum(float(p.detach().abs().sum()) for p in changed.parameters()))
    assert sizes[0] < sizes[1]
