import torch
from torch import nn
from torch.nn import functional as F

import digits
from digits import FORGET, accuracies, train
from wfilter import baselines


def test_fine_tuning_never_sees_the_class_and_the_digit_fades():
    changed = baselines.fine_tuning(digits.trained_cnn(), FORGET, train(), lr=0.1, epochs=3)
    noise = [
        (torch.where((y == FORGET).view(-1, 1, 1, 1), torch.randn_like(x), x), y)
        for x, y in train()
    ]
    same = baselines.fine_tuning(digits.trained_cnn(), FORGET, noise, lr=0.1, epochs=3)
    for a, b in zip(changed.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)
    assert accuracies(changed)[1] < accuracies(digits.trained_cnn())[1]


def test_a_step_goes_down_the_loss_of_the_retain_half():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    images, labels = torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
    changed = baselines.fine_tuning(model, 0, [(images, labels)], epochs=1, lr=0.1)
    loss = F.cross_entropy(model(images[1::2]), labels[1::2])
    (gradient,) = torch.autograd.grad(loss, model.weight)
    torch.testing.assert_close(
        changed.weight, model.weight - 0.1 * (gradient + 5e-4 * model.weight)
    )
