import pytest
import torch
from torch import nn

import digits
from digits import FORGET, train
from wfilter import baselines
from wfilter.baselines.batches import Task


def test_bad_teaching_draws_the_retained_samples_before_it_makes_batches():
    model = digits.trained_cnn()
    task = Task.of(model, FORGET, train())
    torch.manual_seed(0)
    drawn = [labels for _, labels in task.sample(0.3, batch_size=32)]
    labels = digits.data()[0][1]
    forgotten = int((labels == FORGET).sum())
    assert int((torch.cat(drawn) == FORGET).sum()) == forgotten
    kept = len(torch.cat(drawn)) - forgotten
    assert kept / (len(labels) - forgotten) == pytest.approx(0.3, abs=0.05)
    assert {len(y) for y in drawn[:-1]} == {32}
    order = labels.sort().indices  # most batches of two have none to forget and may draw nothing
    pairs = digits.batches(tuple(part[order] for part in digits.data()[0]), 2)
    changed = baselines.bad_teaching(model, FORGET, pairs, retain_share=0.01, batch_size=16)
    assert all(parameter.isfinite().all() for parameter in changed.parameters())


def test_bad_teaching_learns_from_the_right_teacher():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    images, labels = torch.randn(12, 3), torch.tensor([0, 1] * 6)

    def ignorant():
        blank = nn.Linear(3, 2)
        nn.init.zeros_(blank.weight)
        nn.init.zeros_(blank.bias)
        return blank

    settings = {"factory": ignorant, "retain_share": 1.0, "epochs": 1, "lr": 1e-3}
    changed = baselines.bad_teaching(model, 0, [(images, labels)], **settings)
    p = torch.where(labels[:, None] == 0, torch.full((12, 2), 0.5), model(images).softmax(1))
    loss = (p * (p.log() - model(images).log_softmax(1))).sum(1).mean()
    gradient = torch.autograd.grad(loss, model.weight)[0]
    # Adam's first step is the rate times the sign of the gradient
    torch.testing.assert_close(changed.weight, model.weight - 1e-3 * gradient.sign())
