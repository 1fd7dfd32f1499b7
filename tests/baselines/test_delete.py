import torch
from torch import nn

import digits
from digits import FORGET, train
from wfilter import baselines


def test_the_teacher_is_the_original_without_the_class():
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    images, labels = torch.randn(8, 3).double(), torch.arange(4).repeat(2)
    changed = baselines.delete(model, [0, 1], [(images, labels)], epochs=1, lr=0.1)
    forgotten = images[labels < 2]
    logits = model(forgotten)
    p = torch.cat([torch.zeros(4, 2), logits[:, 2:].softmax(1)], 1).detach()
    loss = -(p * logits.log_softmax(1)).sum(1).mean()  # the teacher's entropy has no gradient
    (gradient,) = torch.autograd.grad(loss, model.weight)
    torch.testing.assert_close(changed.weight, model.weight - 0.1 * gradient)


def test_the_retain_half_is_not_needed():
    changed = baselines.delete(digits.trained_cnn(), FORGET, train())
    noise = [
        (torch.where((y != FORGET).view(-1, 1, 1, 1), torch.randn_like(x), x), y)
        for x, y in train()
    ]
    same = baselines.delete(digits.trained_cnn(), FORGET, noise)
    for a, b in zip(changed.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)
