"""The benchmark of terms on the features: each gives a gradient, and the table has them all."""

import argparse
import dataclasses

import pytest
import torch

import deep
import deep_ideas
import wfilter

TERMS = {idea: make for idea, (_, make) in deep.IDEAS.items() if make is not None}


@pytest.mark.parametrize("idea", TERMS)
def test_every_term_is_finite_and_moves_the_features(idea):
    torch.manual_seed(0)
    logits = 3 * torch.eye(4)[torch.arange(12) % 4] + torch.randn(12, 4) / 10
    base, sample = torch.randn(12, 6), torch.arange(12)
    forget = torch.zeros(12).long() if idea.startswith("rows") else (sample % 4) * (sample < 6)
    features = torch.randn(12, 6, requires_grad=True)
    term = TERMS[idea]()(features, base, logits, sample, forget)
    term.backward()
    assert torch.isfinite(term)
    assert torch.isfinite(features.grad).all()
    assert features.grad.abs().sum() > 0


def test_look_alikes_leave_nothing_to_do_at_their_own_target():
    logits = torch.tensor([[9.0, 5.0, 0.0], [0.0, 99.0, 0.0], [0.0, 0.0, 99.0]])
    base = torch.tensor([[0.0], [2.0], [9.0]])
    there = torch.tensor([[2.0], [9.0]])  # the first looks like class 1; the other is retained
    term = deep_ideas.alike(there, base, logits, torch.tensor([0, 2]), torch.tensor([0, 1]))
    assert term < 0.01


def test_the_table_has_a_line_for_each_idea_weight_and_kind_of_gate():
    figures = dict.fromkeys(deep.FIGURES, 50.0) | {"by_row": {"probe_f": [40.0, 60.0]}}
    lines = [
        {"gates": gates, "idea": "alike", "deep": weight, "rows": [0, 3], **figures}
        for gates, weight in (("soft", 1.0), ("soft", 1.0), ("hard", 1.0), ("soft", 3.0))
    ]
    assert deep.table(lines).splitlines()[2:] == [
        "| soft | alike | 1 | 10 | 2 | 50.0 | 50.0 | 50.0 | 40 to 60 | 50.0 |",
        "| hard | alike | 1 | 10 | 1 | 50.0 | 50.0 | 50.0 | 40 to 60 | 50.0 |",
        "| soft | alike | 3 | 10 | 1 | 50.0 | 50.0 | 50.0 | 40 to 60 | 50.0 |",
    ]


def test_runs_of_a_few_rows_have_a_line_apart_from_those_of_all():
    old = {"gates": "soft", "idea": "rows-alike", "rows": [0, 3]}
    counts = [deep.rows_trained(line) for line in (old, old | {"trained": 10}, {"gates": "-"})]
    assert counts == ["2", "10", "-"]


def test_every_idea_makes_a_recipe():
    args = argparse.Namespace(hard=True, deep=5.0)
    for idea in deep.IDEAS:
        dataclasses.replace(wfilter.RECIPES["distill-soft"], **deep.changes_of(idea, args))
