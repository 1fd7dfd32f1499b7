"""The attacks do what they say on a network with random gates."""

import pytest
import torch

import revival
import wfilter
from wfilter.core.gates import HARD


@pytest.fixture(scope="module")
def wf():
    torch.manual_seed(0)
    made = wfilter.apply_weight_filtering(
        wfilter.zoo.create("resnet18-cifar"),
        targets="layer4.*conv*.weight",
        example_input=torch.zeros(1, 3, 32, 32),
    )
    with torch.no_grad():
        made.alphas.copy_(torch.where(torch.rand(made.alphas.shape) < 0.1, -HARD, HARD))
    return made


def test_soft_gates_are_opened_again_without_any_data(wf):
    tail = revival.handed_out(wf, "soft", torch.Generator())
    zeros = revival.zeros_of(revival.handed_out(wf, "zeros", torch.Generator()))
    revival.by_scale(tail, zeros, torch.Generator())
    for name, closed in zeros.items():
        found = tail.get_parameter(name)[closed.flatten(1).all(1)].flatten(1)
        before = wf.base.get_parameter(name)[closed.flatten(1).all(1)].flatten(1)
        assert torch.cosine_similarity(found, before).min() > 0.999
        assert (found.norm(dim=1) / before.norm(dim=1) - 1).abs().max() < 0.2


def test_a_fill_changes_zeros_and_nothing_else(wf):
    before = revival.handed_out(wf, "zeros", torch.Generator())
    zeros = revival.zeros_of(before)
    assert zeros
    for attack in (revival.by_noise, revival.by_neighbours):
        tail = revival.handed_out(wf, "zeros", torch.Generator())
        attack(tail, zeros, torch.Generator().manual_seed(0))
        for name, parameter in tail.named_parameters():
            same = parameter == before.get_parameter(name)
            assert torch.equal(same, ~zeros.get(name, torch.zeros_like(same)))


@pytest.mark.slow
def test_a_pruned_model_that_was_widened_answers_as_before(wf):
    x = torch.rand(4, 256, 8, 8)
    zeros, pruned = (
        revival.handed_out(wf, kind, torch.Generator()) for kind in ("zeros", "pruned")
    )
    with torch.no_grad():
        torch.testing.assert_close(pruned(x), zeros(x), atol=1e-4, rtol=1e-4)
