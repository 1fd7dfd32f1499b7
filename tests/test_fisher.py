"""What closed gates cost, estimated once for all rows."""

import pytest
import torch
from conftest import apply, images, tiny
from test_untrain import linear, samples

from wfilter import fisher


@pytest.mark.parametrize("name", ["cnn", "attention"])
@torch.no_grad()
def test_the_cost_of_nearly_open_gates_is_the_kl_they_cause(name):
    x = images(64, 3, 8, 8)
    wf = apply(tiny(name), x[:2])
    generator = torch.Generator().manual_seed(0)
    roots = fisher.directions(wf, x.split(16), 200, generator)
    gates = 1 - 0.02 * torch.rand(1, wf.alphas.shape[1], generator=generator).to(wf.alphas)
    base, moved = wf(x).log_softmax(1), wf._gated(x, gates.expand(len(x), -1)).log_softmax(1)
    kl = (base.exp() * (base - moved)).sum(1).mean()
    cost = 0.5 * ((1 - gates) @ roots.T).square().mean()
    assert float(cost) == pytest.approx(float(kl), rel=0.1)


def test_the_estimate_does_not_depend_on_the_alphas():
    x = samples()[0]
    first, second = linear(init=3.0), linear(init=-3.0)
    a, b = (fisher.directions(w, [x], 2, torch.Generator().manual_seed(0)) for w in (first, second))
    assert torch.equal(a, b)
