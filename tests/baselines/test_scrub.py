import copy

import torch
from torch import nn
from torch.nn import functional as F

from wfilter import baselines


def test_scrub_climbs_the_divergence_and_then_descends_on_the_labels():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    images, labels = torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
    settings = {"alpha": 0.5, "gamma": 0.25, "temperature": 2.0, "lr": 0.1}
    teacher, weight, bias = copy.deepcopy(model), *map(torch.clone, model.parameters())
    changed = baselines.scrub(model, 0, [(images, labels)], epochs=1, max_epochs=1, **settings)

    def divergence(x):
        now, before = F.linear(x, weight, bias) / 2, teacher(x) / 2
        p = before.softmax(1)
        return 4 * (p * (p.log() - now.log_softmax(1))).sum(1).mean()

    def labelled(x, y):
        return 0.5 * divergence(x) + 0.25 * F.cross_entropy(F.linear(x, weight, bias), y)

    velocity = [torch.zeros_like(weight), torch.zeros_like(bias)]
    for loss in (lambda: -divergence(images[::2]), lambda: labelled(images[1::2], labels[1::2])):
        gradients = torch.autograd.grad(loss(), [weight, bias])
        decayed = [g + 5e-4 * p for g, p in zip(gradients, (weight, bias), strict=True)]
        velocity = [0.9 * v + g for v, g in zip(velocity, decayed, strict=True)]
        weight, bias = weight - 0.1 * velocity[0], bias - 0.1 * velocity[1]
    torch.testing.assert_close(changed.weight, weight)
    torch.testing.assert_close(changed.bias, bias)
