"""What closed gates cost, estimated once for all rows."""

import dataclasses
import json

import pytest
import torch
from conftest import apply, images, tiny
from safetensors import safe_open
from test_untrain import linear, run, samples

from wfilter import fisher, losses
from wfilter.recipes import DISTILL_FEW, PAPER
from wfilter.untrain import InMemory, Run

FEW = dataclasses.replace(DISTILL_FEW, blend=0.0, fisher_images=16)


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
    cost = losses.closing_cost(gates, roots)
    assert float(cost) == pytest.approx(float(kl), rel=0.1)
    assert losses.closing_cost(torch.ones_like(gates), roots) == 0


def test_the_estimate_does_not_depend_on_the_alphas():
    x = samples()[0]
    first, second = linear(init=3.0), linear(init=-3.0)
    a, b = (fisher.directions(w, [x], 2, torch.Generator().manual_seed(0)) for w in (first, second))
    assert torch.equal(a, b)


def test_what_is_kept_suffers_less_under_a_larger_weight():
    moved = []
    x, _ = samples(64)
    for weight in (0.1, 10.0, 1000.0):
        recipe = dataclasses.replace(FEW, lambda_fisher=weight)
        wf, _ = run(recipe=recipe, steps=30, data=InMemory(*samples(64), batch_size=16))
        with torch.no_grad():
            base = wf(x).log_softmax(1)
            rows = [wf(x, forget=row).log_softmax(1) for row in range(4)]
        moved.append(sum(float((base.exp() * (base - r)).sum(1).mean()) for r in rows))
    assert moved[0] > moved[1] > moved[2]


def test_a_run_with_it_resumes_to_the_same_alphas(tmp_path):
    recipe = dataclasses.replace(FEW, blend=0.5)
    whole, _ = run(recipe=recipe, steps=10)
    plain, steps = Run._step, []

    def stopping(self, batch):
        steps.append(1)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return plain(self, batch)

    file = tmp_path / "run.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_step", stopping)
        _, history = run(recipe=recipe, steps=10, checkpoint=file)
    assert history.stopped == "interrupted at step 5"
    resumed, _ = run(recipe=recipe, steps=10, checkpoint=file, resume=True)
    assert torch.equal(resumed.alphas, whole.alphas)


def test_an_interruption_before_the_first_step_loses_nothing(tmp_path, monkeypatch):
    file = tmp_path / "run.safetensors"
    whole, _ = run(recipe=FEW, steps=10, data=InMemory(*samples(), 8))
    run(recipe=FEW, steps=10, data=InMemory(*samples(), 8), checkpoint=file, checkpoint_every=4)

    def interrupt(self, images, generator):
        raise KeyboardInterrupt

    stored = json.loads(safe_open(file, "pt").metadata()["untrain"])
    assert (stored["step"], stored["epoch"], stored["position"]) == (8, 1, 4)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_changed", interrupt)
        run(recipe=FEW, steps=10, data=InMemory(*samples(), 8), checkpoint=file, resume=True)
    stored = json.loads(safe_open(file, "pt").metadata()["untrain"])
    assert (stored["step"], stored["epoch"], stored["position"]) == (8, 1, 4)
    resumed, _ = run(
        recipe=FEW, steps=10, data=InMemory(*samples(), 8), checkpoint=file, resume=True
    )
    assert torch.equal(resumed.alphas, whole.alphas)


def test_images_of_several_labels_are_refused():
    data = InMemory(samples()[0], torch.ones(32, 4).bool(), 32)
    with pytest.raises(ValueError, match="these images have several labels each"):
        run(recipe=FEW, data=data)


def test_batches_that_can_be_read_only_once_are_refused():
    with pytest.raises(TypeError, match="train can be read only once"):
        run(recipe=FEW, data=iter([samples()]))


def test_it_is_refused_where_it_has_no_meaning():
    with pytest.raises(ValueError, match="a term of the distill objective"):
        dataclasses.replace(PAPER, lambda_fisher=1.0)
