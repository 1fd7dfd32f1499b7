import torch
from torch import nn
from torch.nn import functional as F

from wfilter import baselines


def test_ssd_dampens_by_the_papers_formula():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    images, labels = torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
    changed = baselines.ssd(model, 0, [(images, labels)], selection=1.5, dampening=0.5)

    def fisher(x, y):
        loss = F.cross_entropy(F.linear(x, model.weight, model.bias), y)
        return [g**2 for g in torch.autograd.grad(loss, [model.weight, model.bias])]

    whole, forgotten = fisher(images, labels), fisher(images[::2], labels[::2])
    selected = 0
    for before, after, all_, mine in zip(
        model.parameters(), changed.parameters(), whole, forgotten, strict=True
    ):
        for old, new, i, f in zip(*(t.flatten() for t in (before, after, all_, mine)), strict=True):
            factor = min(0.5 * i / f, 1.0) if f > 1.5 * i else 1.0
            selected += factor != 1.0
            torch.testing.assert_close(new, old * factor)
    assert 0 < selected < 8
