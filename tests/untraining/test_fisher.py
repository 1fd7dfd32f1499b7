"""What closed gates cost, estimated once for all rows."""

import pytest
import torch

from helpers import apply, images, linear, samples, tiny
from wfilter.untraining import fisher


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ["cnn", "attention"])
@torch.no_grad()
def test_the_cost_of_nearly_open_gates_is_the_kl_they_cause(name, whole, monkeypatch):
    monkeypatch.setattr(fisher, "WHOLE", 2**14 if whole else 0)
    monkeypatch.setattr(fisher, "DRAWS" if whole else "DRAWS_OF_ROOTS", 200)
    x = images(64, 3, 8, 8)
    wf = apply(tiny(name), x[:2])
    generator = torch.Generator().manual_seed(0)
    free = torch.ones(wf.alphas.shape[1], dtype=torch.bool)
    batches = torch.arange(64).split(16)
    found = fisher.information(wf, batches, x.__getitem__, free, generator)
    assert found.whole == whole
    gates = 1 - 0.02 * torch.rand(1, wf.alphas.shape[1], generator=generator).to(wf.alphas)
    base, moved = wf(x).log_softmax(1), wf.run_gated(x, gates.expand(len(x), -1)).log_softmax(1)
    kl = (base.exp() * (base - moved)).sum(1).mean()
    cost = 0.5 * (found.times(1 - gates) * (1 - gates)).sum()
    assert float(cost) == pytest.approx(float(kl), rel=0.1)


def test_the_estimate_does_not_depend_on_the_alphas():
    x = samples()[0]
    first, second = linear(init=3.0), linear(init=-3.0)
    a, b = (
        torch.cat([*fisher.roots(w, [x], 2, torch.Generator().manual_seed(0))])
        for w in (first, second)
    )
    assert torch.equal(a, b)


def test_units_that_are_not_free_cost_nothing():
    wf, x = linear(init=3.0), samples()[0]
    free = torch.arange(wf.alphas.shape[1]) > 0
    batches = [torch.arange(len(x))]
    found = fisher.information(wf, batches, x.__getitem__, free, torch.Generator())
    assert float(found.diagonal()[0]) == 0 < float(found.diagonal()[1:].min())


def test_fewer_draws_than_gates_are_told(monkeypatch):
    monkeypatch.setattr(fisher, "WHOLE", 0)
    wf, x = linear(init=3.0), samples()[0][:1]
    free = torch.ones(wf.alphas.shape[1], dtype=torch.bool)
    with pytest.warns(UserWarning, match="is estimated from 2 draws of 1 images"):
        fisher.information(wf, [torch.arange(1)], x.__getitem__, free, torch.Generator())
