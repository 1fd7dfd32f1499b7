"""The attacks do what they say on a network with random gates."""

import copy

import pytest
import torch
import torch.nn.functional as F

import revival
import revival_attacks as attacks
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


FORGET = {1, 3, 8}


def closed_rows(zeros):
    return {name: closed.flatten(1).all(1) for name, closed in zeros.items()}


def test_soft_gates_are_opened_again_without_any_data(wf):
    tail = revival.handed_out(wf, "soft", FORGET)
    zeros = attacks.zeros_of(revival.handed_out(wf, "zeros", FORGET))
    attacks.by_scale(tail, zeros, torch.Generator())
    whole = attacks.Tail(wf.base)
    for name, closed in closed_rows(zeros).items():
        found, before = (t.get_parameter(name)[closed].flatten(1) for t in (tail, whole))
        assert torch.cosine_similarity(found, before).min() > 0.999
        assert (found.norm(dim=1) / before.norm(dim=1) - 1).abs().max() < 0.2


def test_a_fill_changes_zeros_and_nothing_else(wf):
    before = revival.handed_out(wf, "zeros", FORGET)
    zeros = attacks.zeros_of(before)
    assert zeros
    for attack in (attacks.by_noise, attacks.by_neighbours):
        tail = revival.handed_out(wf, "zeros", FORGET)
        attack(tail, zeros, torch.Generator().manual_seed(0))
        for name, parameter in tail.named_parameters():
            same = parameter == before.get_parameter(name)
            assert torch.equal(same, ~zeros.get(name, torch.zeros_like(same)))


def test_rows_by_least_squares_lower_the_loss_and_change_closed_rows_only():
    torch.manual_seed(0)
    tail = attacks.Tail(wfilter.zoo.create("cnn_small-cifar").eval()).eval().requires_grad_(False)
    with torch.no_grad():
        tail.body[16].weight[:40] = 0
    x, y = torch.rand(20, 3, 32, 32), torch.arange(20) % 10
    before, zeros = copy.deepcopy(tail), attacks.zeros_of(tail)
    attacks.new_rows(tail, zeros, x, y, torch.Generator().manual_seed(0))
    for name, parameter in tail.named_parameters():
        same = parameter == before.get_parameter(name)
        assert torch.equal(same, ~zeros.get(name, torch.zeros_like(same)))
    with torch.no_grad():
        loss = [float(F.cross_entropy(model(x), y)) for model in (before, tail)]
    assert loss[1] < loss[0]


def test_a_new_head_learns_the_images_it_is_given():
    torch.manual_seed(0)
    tail = attacks.Tail(wfilter.zoo.create("cnn_small-cifar").eval()).eval()
    x, y = torch.rand(10, 3, 32, 32), torch.arange(10)
    attacks.new_head(tail, x, y)
    assert (tail(x).argmax(1) == y).float().mean() > 0.8


@pytest.mark.slow
def test_a_pruned_model_that_was_widened_answers_as_before(wf):
    x = torch.rand(4, 256, 8, 8)
    zeros, pruned = (revival.handed_out(wf, kind, FORGET) for kind in ("zeros", "pruned"))
    with torch.no_grad():
        torch.testing.assert_close(pruned(x), zeros(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_attacker_gets_so_many_images_of_each_class_others_with_another_seed(seed):
    images = [(torch.full((1,), i), i % 10) for i in range(200)]
    x, y = revival.pick(images, dict.fromkeys(range(10), 2), seed)
    assert y.bincount().tolist() == [2] * 10
    assert (x[:, 0] % 10 == y).all()
    assert torch.equal(x[:, 0], torch.arange(20)) == (seed == 0)


def line(**changed):
    same = {"tests": 1300, "steps": 12, "attack": "noise", "shots": 0, "model": "zeros"}
    return {**same, "acc_f": 10.0, "acc_r": 90.0, **changed}


def test_a_table_is_the_mean_of_its_seeds_and_says_how_far_they_are_apart():
    made = revival.tables([line(), line(seed=1, acc_f=20.0), line(tests=195, acc_f=70.0)])
    assert "| noise | 0 | 15 / 90 |" in made
    assert "Means of seeds 0, 1: their Acc_f is 10 points apart in the median" in made
    assert "## resnet18-cifar, 195 test images" in made
    assert "| noise | 0 | 70 / 90 |" in made
