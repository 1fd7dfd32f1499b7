"""Relearning counts as it should and leaves the model as it was."""

import copy

import pytest
import torch

import digits
from wfilter import baselines, metrics


def forgetful_cnn(label=3):
    """The trained network with the head vector of one class gone."""
    model = copy.deepcopy(digits.trained_cnn())
    with torch.no_grad():
        model[-1].weight[label] = 0
        model[-1].bias[label] = -20
    return model


def test_relearning_counts_epochs_and_puts_everything_back():
    train, test = digits.data()
    model = forgetful_cnn().train()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    result = metrics.relearn_time(
        model, 3, train, digits.batches(test), target=0.9, lr=0.05, samples=200, max_epochs=20
    )
    assert not result.failed
    assert result.accuracies[0] == 0
    assert result.accuracies[-1] >= 0.9 > result.accuracies[-2]
    assert result.epochs == len(result.accuracies) - 1 >= 1
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert [parameter.requires_grad for parameter in model.parameters()][:2] == [False, True]


def test_only_the_parameters_given_are_trained():
    train, test = digits.data()
    model, seen = forgetful_cnn(), []

    def forward(images):
        seen.append((model[0].weight.clone(), model[-1].bias.detach().clone()))
        return model(images)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train), 32)
    metrics.relearn_time(
        model, 3, loader, digits.batches(test), target=2.0, forward=forward,
        parameters=[model[-1].bias], samples=64, max_epochs=2, lr=1.0,
    )  # fmt: skip
    assert torch.equal(seen[0][0], seen[-1][0])
    assert not torch.equal(seen[0][1], seen[-1][1])


def test_a_class_that_never_comes_back_is_a_failure_and_one_never_lost_takes_no_epoch():
    train, test = digits.data()
    masked = baselines.logit_mask(digits.trained_cnn(), 3, digits.batches(train))
    settings = {"target": 0.9, "samples": 64, "max_epochs": 2}
    never = metrics.relearn_time(masked, 3, train, digits.batches(test), **settings)
    assert never.failed
    assert len(never.accuracies) == 3
    at_once = metrics.relearn_time(digits.trained_cnn(), 3, train, digits.batches(test), **settings)
    assert at_once.epochs == 0
    assert str(metrics.relearn_summary([never, at_once])) == "50 (1)"
    assert str(metrics.relearn_summary([never, never])) == "> 100 (2)"


def test_relearning_is_the_same_for_the_same_seed():
    train, test = digits.data()

    def last_logits(seed):
        model, seen = forgetful_cnn(), []

        def forward(images):
            seen.append(model(images))
            return seen[-1]

        metrics.relearn_time(
            model, 3, train, digits.batches(test), forward=forward,
            target=2.0, samples=200, max_epochs=3, lr=0.05, seed=seed,
        )  # fmt: skip
        return seen[-1].detach()

    first, again, other = map(last_logits, (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_more_shots_bring_more_back():
    train, test = digits.data()
    result = metrics.few_shot_relearn(
        forgetful_cnn(), 3, train, digits.batches(test), shots=(1, 10), steps=30, lr=0.02
    )
    assert result[10][1] > 0.5
    assert result[10][1] >= result[1][1]
    assert result[10][0] > 0.8


def test_relearning_refuses_what_it_cannot_use():
    (images, labels), test = digits.data()
    model, rest = digits.trained_cnn(), labels != 3
    with pytest.raises(ValueError, match="class 3 has no samples"):
        metrics.relearn_time(model, 3, (images, labels), [(images[rest], labels[rest])], target=0.9)
    with pytest.raises(TypeError, match="without length or items"):
        metrics.relearn_time(model, 3, iter([]), digits.batches(test), target=0.9)
    with pytest.raises(ValueError, match="nothing to train"):
        metrics.relearn_time(
            model, 3, (images, labels), digits.batches(test), target=0.9, parameters=[]
        )
    with pytest.raises(ValueError, match="for 999 shots"):
        metrics.few_shot_relearn(model, 3, (images, labels), digits.batches(test), shots=[999])
