"""Insertion and deletion curves against curves computed by hand."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from helpers import random_rows
from wfilter import metrics
from wfilter.core.folding import folded
from wfilter.metrics.training import unmasked


def test_relearning_takes_off_the_bias_by_which_a_folded_row_rules_a_class_out():
    images, labels = torch.eye(3).repeat(5, 1), torch.arange(3).repeat(5)
    head = nn.Linear(3, 3)
    head.weight.data.copy_(5 * torch.eye(3))
    rows = random_rows(3, 3).float()
    rows.means.copy_(torch.eye(3))
    baked = nn.Sequential(*folded(rows, head, torch.tensor([False, True, False])))
    assert baked(images).argmax(1).ne(1).all()
    again = metrics.few_shot_relearn(
        unmasked(baked), 1, (images, labels), [(images, labels)], shots=(5,), lr=0.5
    )
    assert again[5] == (1.0, 1.0)


def test_relearning_from_few_images_takes_the_rate_that_serves_the_attacker():
    images, labels = torch.eye(2).repeat(5, 1), torch.arange(2).repeat(5)
    blank = nn.Linear(2, 2, bias=False)
    nn.init.constant_(blank.weight, 0.5)
    blank.weight.data[1] -= 0.3
    weak, strong, both = (
        metrics.few_shot_relearn(blank, 1, (images, labels), [(images, labels)], shots=(1,), lr=lr)
        for lr in (1e-6, 0.1, (1e-6, 0.1, 1e-5))
    )
    assert weak[1][1] < strong[1][1]
    assert both == strong


def test_insertion_and_deletion_equal_a_curve_computed_by_hand():
    gates = {"a": torch.tensor([0.0, 0.8, 0.2, 0.9]), "b": torch.tensor([0.5, 0.1])}
    given = {name: gate.clone() for name, gate in gates.items()}

    def mean_gate(gates):
        return float((gates["a"].sum() + gates["b"].sum()) / 6)

    # steps of a half open a[0], a[2] and b[1], then the rest
    insertion = metrics.curve(mean_gate, gates, steps=2)
    assert insertion.shares == (0.0, 0.5, 1.0)
    assert insertion.values == pytest.approx([2.5 / 6, (1 + 0.8 + 1 + 0.9 + 0.5 + 1) / 6, 1.0])
    assert insertion.auc == pytest.approx((2.5 / 6 / 2 + 5.2 / 6 + 0.5) / 2)
    deletion = metrics.curve(mean_gate, gates, kind="deletion", steps=2)
    assert deletion.values == pytest.approx([1.0, 0.5, 0.0])
    assert all(torch.equal(gates[name], given[name]) for name in gates)


def test_the_area_equals_numpys_trapezoid():
    values = np.random.default_rng(0).random(21).tolist()
    assert metrics.normalised_auc(values) == pytest.approx(np.trapezoid(values, dx=1 / 20))


def test_gate_order_beats_the_random_control_when_the_gates_are_right():
    gates = {"a": torch.ones(100)}
    gates["a"][torch.randperm(100, generator=torch.Generator().manual_seed(99))[:10]] = 0.0
    important = gates["a"] == 0

    def confidence(gates):
        return float(gates["a"][important].mean())

    by_gate, by_chance = (
        metrics.curve(confidence, gates, order=order).auc for order in ("gate", "random")
    )
    assert by_gate > 0.9 > 0.7 > by_chance > 0.3
    orders = [metrics.random_order(gates["a"], seed) for seed in (0, 0, 1)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


def test_relative_confidence_is_a_ratio_of_means():
    now, before = torch.randn(2, 8, 3)
    expected = now.softmax(1)[:, 1].mean() / before.softmax(1)[:, 1].mean()
    assert metrics.relative_confidence(now, before, 1) == pytest.approx(float(expected), rel=1e-5)


def test_curves_refuse_nan_and_nothing():
    with pytest.raises(ValueError, match="the curve contains NaN"):
        metrics.normalised_auc([0.0, math.nan])
    with pytest.raises(ValueError, match="has no area"):
        metrics.normalised_auc([0.0])
    with pytest.raises(ValueError, match="gates contain NaN"):
        metrics.curve(lambda gates: 0.0, {"a": torch.tensor([math.nan])})
    with pytest.raises(ValueError, match="steps=0 over 1 targets"):
        metrics.curve(lambda gates: 0.0, {"a": torch.ones(1)}, steps=0)
    with pytest.raises(ValueError, match="kind='insert'"):
        metrics.curve(lambda gates: 0.0, {"a": torch.ones(1)}, kind="insert")
