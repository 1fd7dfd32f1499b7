"""Rows that are solved, not learned: to first order, at the least cost to other images."""

import dataclasses
import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import wfilter
from helpers import apply, images, samples, tiny
from helpers import linear as linear_model
from wfilter import data, zoo
from wfilter.core.gates import HARD
from wfilter.data.batches import InMemory
from wfilter.untraining import fisher
from wfilter.untraining import solve as linear
from wfilter.untraining.loop import untrain
from wfilter.untraining.recipes import LINEAR


@pytest.mark.parametrize("name", ["cnn", "attention"])
def test_gradients_are_those_of_the_lead_of_a_class(name):
    x, rows = images(4, 3, 8, 8), torch.tensor([0, 1, 2, 1])
    wf = apply(tiny(name), x[:2])
    found, lead = linear.gradients(wf, x, rows)
    torch.testing.assert_close(lead, linear.leads(wf.base(x), rows).detach())
    step = 1e-6 * torch.randn(4, wf.alphas.shape[1], generator=torch.Generator().manual_seed(0))
    ends = [wf.run_gated(x, 1 + sign * step.to(wf.alphas)).detach() for sign in (1, -1)]
    change = (linear.leads(ends[0], rows) - linear.leads(ends[1], rows)) / 2
    torch.testing.assert_close((found * step).sum(1), change, rtol=1e-4, atol=1e-12)


def problem(whole, units=6, rows=3, count=12):
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(count, units, generator=generator, dtype=torch.float64)
    roots = torch.randn(20, units, generator=generator, dtype=torch.float64)
    information = fisher.Information(roots.T @ roots if whole else roots, whole)
    weights = {"lambda_fisher": 0.025, "lambda_alpha": 0.1}
    fall = 1 + 4 * torch.rand(count, generator=generator, dtype=torch.float64)
    return (gradient, fall, torch.arange(count) % rows, information, rows), weights


def cost(closed, gradient, fall, row, information, rows, *, lambda_fisher, lambda_alpha):
    """The problem as it is written down, one row after the other."""
    tensor = information.tensor
    matrix = tensor if information.whole else tensor.T @ tensor
    total = lambda_fisher * (closed @ matrix @ closed.T).diagonal()
    total = total + lambda_alpha * closed.square().sum(1)
    for r in range(rows):
        lacking = (fall[row == r] - gradient[row == r] @ closed[r]).clamp(min=0)
        total[r] += lacking.square().mean()
    return total / 2


@pytest.mark.parametrize("whole", [True, False])
def test_no_other_closings_cost_less(whole):
    given, weights = problem(whole)
    closed, told = linear.closings(*given, **weights)
    assert bool(((closed >= 0) & (closed <= 1)).all())
    best = cost(closed, *given, **weights)
    torch.testing.assert_close(told, best)
    generator = torch.Generator().manual_seed(1)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(50):
            noise = size * torch.randn(closed.shape, generator=generator, dtype=torch.float64)
            other = cost((closed + noise).clamp(0, 1), *given, **weights)
            assert bool((other >= best - 1e-6).all())


def test_a_gate_that_other_images_need_stays_open():
    gradient, dear = torch.ones(1, 2), fisher.Information(torch.tensor([[100.0, 0.0]]), False)
    weights, fall = {"lambda_fisher": 1.0, "lambda_alpha": 1e-3}, torch.tensor([0.5])
    closed, _ = linear.closings(gradient, fall, torch.tensor([0]), dear, 1, **weights)
    assert closed[0, 0] < 0.01 < 0.4 < closed[0, 1]


def test_images_like_a_class_are_those_of_others_with_the_highest_chance_of_it():
    base = torch.tensor([[9.0, 8.0, 0.0], [9.0, 0.0, 7.0], [0.0, 9.0, 1.0], [8.0, 0.0, 9.0]])
    labels = torch.tensor([0, 0, 1, 2])
    found = linear.examples(base, labels, alike=1)
    assert found.row[found.own].tolist() == labels.tolist()
    others = dict(zip(found.row[~found.own].tolist(), found.image[~found.own].tolist()))
    assert others == {0: 3, 1: 0, 2: 1}


def test_no_image_is_like_its_own_class():
    base, labels = torch.randn(5, 3), torch.tensor([0, 0, 0, 0, 1])
    found = linear.examples(base, labels, alike=99)
    assert not bool((labels[found.image[~found.own]] == found.row[~found.own]).any())


def blobs(count=120):
    """Images of four classes that a linear layer tells apart, and one that was trained to."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 4
    x = 3 * torch.eye(4)[labels].repeat(1, 4) + torch.randn(count, 16, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    torch.manual_seed(0)
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(150):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimiser.step()
    return model.eval(), x, labels


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_row_forgets_its_class_and_keeps_the_others(seed):
    model, x, labels = blobs()
    wf = wfilter.apply_weight_filtering(model, targets="0.*", example_input=x[:1])
    history = untrain(wf, InMemory(x[:40], labels[:40]), recipe="linear", seed=seed)
    assert history.stopped == "solved"
    assert history.records[-1].forget_accuracy <= 0.05
    assert math.isfinite(history.records[-1].loss)
    x, labels = x[40:], labels[40:]  # not seen
    with torch.no_grad():
        assert (wf(x, forget=labels).argmax(1) == labels).float().mean() < 0.2
        assert (wf(x, forget=(labels + 1) % 4).argmax(1) == labels).float().mean() > 0.9


def test_labels_are_not_needed_and_loaders_serve_as_well():
    model, x, _ = blobs()
    answers = model(x).argmax(1)
    found = []
    for train in (InMemory(x, answers), InMemory(x), [(x[:50],), x[50:]]):
        wf = wfilter.apply_weight_filtering(model, targets="0.*", example_input=x[:1])
        untrain(wf, train, recipe="linear")
        found.append(wf.alphas.detach().clone())
        wfilter.remove_weight_filtering(wf)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_rows_in_parts_are_the_rows_in_one(monkeypatch):
    model, x, labels = blobs()
    wf = wfilter.apply_weight_filtering(model, targets="0.*", example_input=x[:1])
    untrain(wf, InMemory(x, labels), recipe="linear")
    whole = wf.alphas.detach().clone()
    monkeypatch.setattr(linear, "ENTRIES", 1)
    history = untrain(wf, InMemory(x, labels), recipe="linear")
    assert [record.step for record in history.records] == [1, 2, 3, 4]
    torch.testing.assert_close(wf.alphas.detach().sigmoid(), whole.sigmoid())


def test_shallow_targets_stay_open_where_the_recipe_says_so():
    model, x, labels = blobs()
    wf = wfilter.apply_weight_filtering(model, targets="*", example_input=x[:1])
    untrain(wf, InMemory(x, labels), recipe=dataclasses.replace(LINEAR, depth=0.5))
    assert bool((wf.alpha["0.weight"] == HARD).all())
    assert bool((wf.alpha["2.weight"] < HARD).any())


def test_it_is_solved_where_gradients_are_off_and_by_the_seed_alone():
    model, x, labels = blobs()
    found = []
    few = dataclasses.replace(LINEAR, fisher_images=20)
    loader = DataLoader(TensorDataset(x, labels), 30, shuffle=True)
    for seed in (1, 2):
        torch.manual_seed(seed)
        wf = wfilter.apply_weight_filtering(model, targets="0.*", example_input=x[:1])
        with torch.no_grad():
            untrain(wf, loader, recipe=few)
        found.append(wf.alphas.detach().clone())
        wfilter.remove_weight_filtering(wf)
    assert torch.equal(*found)


def test_batches_of_a_set_are_read_whole_and_in_its_own_order():
    digits = data.load("digits", "test")
    model = zoo.create("cnn-digits")
    found = []
    for train in (
        InMemory(*digits.batch(torch.arange(len(digits)))),
        data.batches(digits, 50, shuffle=True, drop_last=True),
    ):
        wf = wfilter.apply_weight_filtering(model, example_input=torch.rand(1, 1, 8, 8))
        untrain(wf, train, recipe=LINEAR)
        found.append(wf.alphas.detach().clone())
        wfilter.remove_weight_filtering(wf)
    assert torch.equal(*found)


def test_what_would_be_wrong_is_refused():
    model, x, labels = blobs()
    wf = wfilter.apply_weight_filtering(model, targets="0.*", example_input=x[:1])
    before = wf.alphas.detach().clone()
    broken = x.clone()
    broken[7] = math.nan
    with pytest.raises(FloatingPointError, match="Look at the images of these classes"):
        untrain(wf, InMemory(broken, labels), recipe="linear")
    few, alone = labels < 3, dataclasses.replace(LINEAR, alike=0)
    with pytest.raises(ValueError, match="no image of class 3"):
        untrain(wf, InMemory(x[few], labels[few]), recipe=alone)
    with pytest.raises(ValueError, match="Give all or none"):
        untrain(wf, [(x[:50], labels[:50]), x[50:]], recipe="linear")
    with pytest.raises(ValueError, match="train has no batches"):
        untrain(wf, InMemory(x[:0], labels[:0]), recipe="linear")
    assert torch.equal(wf.alphas, before)


@pytest.mark.parametrize(
    "option", [{"steps": 3}, {"epochs": 1}, {"checkpoint": "x"}, {"amp": True}, {"compile": True}]
)
def test_what_steers_steps_is_refused(option):
    with pytest.raises(ValueError, match=r"has no meaning for recipe 'linear', which takes no ste"):
        untrain(linear_model(), InMemory(*samples()), recipe="linear", **option)


def test_several_labels_and_gates_per_element_are_refused():
    train = InMemory(samples()[0], torch.ones(32, 4).bool())
    with pytest.raises(ValueError, match="recipe 'linear' is for one answer per image"):
        untrain(linear_model(), train, recipe="linear")
    wf = wfilter.apply_weight_filtering(
        torch.nn.Linear(4, 3), targets="weight", granularity="element"
    )
    with pytest.raises(ValueError, match="granularity='element'"):
        untrain(wf, InMemory(*samples()), recipe="linear")


def test_weights_of_the_linear_objective_are_positive():
    with pytest.raises(ValueError, match="must be positive"):
        dataclasses.replace(LINEAR, lambda_fisher=0.0)
    with pytest.raises(ValueError, match="alike=-1 not negative"):
        dataclasses.replace(LINEAR, alike=-1)
