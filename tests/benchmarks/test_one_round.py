"""One round against single runs: what a single run learns, and what the table says of both."""

import argparse

import pytest
import torch

import one_round
import wfilter
from wfilter import data
from wfilter.cli.demo import example_problem


@pytest.fixture(scope="module")
def problem():
    model, train, test = example_problem(arguments=[])
    return model, train, test.take(torch.arange(100)), test.take(torch.arange(100, 300))


def arguments(**changes):
    given = {
        "model": "cnn-digits",
        "recipe": "distill-soft",
        "batch_size": 32,
        "seed": 0,
        "set": [],
    }
    return argparse.Namespace(**given, **{"forget": 10.0, "retain": 10.0, "steps": [60], **changes})


def test_a_run_for_one_class_leaves_every_other_row_as_it_was(problem):
    model, train = problem[:2]
    wf = wfilter.apply_weight_filtering(model, example_input=train.batch(torch.arange(1))[0])
    before = wf.alphas.detach().clone()
    batches = data.batches(train, 32)
    with one_round.only_row(3):
        wfilter.untrain(wf, batches, recipe="distill-soft", steps=2)
    changed = (wf.alphas != before).any(1)
    assert changed.nonzero().flatten().tolist() == [3]
    wfilter.remove_weight_filtering(wf)


def test_the_images_of_a_single_run_have_the_share_of_its_class():
    labels = torch.arange(100) % 10
    kept = labels[one_round.with_share(labels, 3, share=0.25)]
    assert len(kept) == 40
    assert (kept == 3).sum() == 10


@pytest.mark.parametrize("row", ["all", 4])
def test_the_shortest_run_that_meets_the_bar_is_the_one_reported(problem, row):
    line = one_round.run(arguments(steps=[1, 80, 160]), row, *problem)
    assert line["met"]
    assert [tried["steps"] for tried in line["tried"]] == [1, 80]
    assert line["steps"] == 80
    assert line["acc_f"] < 10 < 80 < line["acc_r"]


def test_a_bar_that_is_not_met_is_told(problem):
    line = one_round.run(arguments(steps=[1, 2], forget=-1.0), 4, *problem)
    assert not line["met"]
    assert line["steps"] == 2


def test_the_table_gives_the_measured_ratio():
    common = {
        "model": "m",
        "recipe": "r",
        "seed": 0,
        "set": ["a=1"],
        "classes": 2,
        "parameters": 70,
    }
    figures = {"met": True, "original": 99.0, "acc_r": 98.0, "acc_f": 0.5, "acc_f_worst": 1.0}
    common |= figures | {"alphas_of_a_row": 5, "test_images": 1000, "steps": 10}
    lines = [{**common, "row": row, "cpu_seconds": s} for row, s in (("all", 4), (0, 3), (1, 5))]
    text = one_round.table(lines)
    shared = "98.00 / 0.50 (1.00) | 99.00 | 10 | 140 | 1,000 |"
    assert f"| m, r, a=1, 0 | one round | 1 of 1 | 10 | 4 | {shared}" in text
    assert f"| m, r, a=1, 0 | single classes | 2 of 2 | 20 | 8 | {shared}" in text
    assert "2 single runs take 2.00 x the time of one round; 0 of them missed the bar." in text
    assert "take" not in one_round.table(lines[:2]).split("|---|")[-1]
