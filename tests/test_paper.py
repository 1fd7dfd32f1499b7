"""The paper's tables: all of its numbers, and ours only from stored lines."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import paper
import paper_tables
import wfilter
from wfilter import data, zoo
from wfilter.columns import Budget, Problem, relearn
from wfilter.report import Cell, Report

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "paper.py"


def line(**changes):
    """A stored line of a filtered model that closed every gate."""
    wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="*", init=-1000.0)
    data = (torch.randn(30, 4), torch.arange(30) % 3)
    report = wfilter.evaluate(wf, data, metrics=["accuracy"])
    report = {**json.loads(report.to_json())}
    report["rows"] = {"wfilter": report["rows"]["wfilter"]}
    facts = {"dataset": "cifar10", "backbone": "resnet18", "method": "distill", "seed": 0}
    return {**facts, "rows": [0, 1, 2], "report": report, **changes}


def cells(table, *start):
    (row,) = [text for text in table.splitlines() if text.startswith(f"| {' | '.join(start)} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][len(start) :]


def test_without_lines_the_tables_have_the_papers_numbers_and_dashes():
    table = paper_tables.table1([])
    assert cells(table, "cifar10", "resnet18", "paper") == [
        "79.7 / 9.25 / 63.9 / 94.3 (9)",
        "- (not run)",
        "-",
    ]
    assert table.count("\n| ") == len(paper_tables.PAPER) + 1
    assert cells(paper_tables.table2([]), "imagenet", "vit_tiny") == [
        "0.60 / 0.04",
        "-",
        "- (not run)",
    ]


def test_a_stored_line_fills_its_cell_and_no_other():
    lines = [line(), line(seed=1)]
    table = paper_tables.table1(lines)
    theirs, ours, count = cells(table, "cifar10", "resnet18", "distill")
    report = wfilter.Report.from_json(json.dumps(lines[0]["report"]))
    assert theirs == "-"
    assert ours.startswith(f"{100 * report.value('wfilter', 'Acc_r'):.2f} / ")
    assert count == "3, 2, 30"
    assert cells(table, "cifar10", "resnet18", "paper")[1] == "- (not run)"


def relearning(epochs, cap, **changes):
    """A stored line of relearn times alone, one for each class."""
    columns = tuple(relearn(Problem(Budget(relearn_epochs=cap))))
    rows = {"wfilter": {"relearn weights": Cell(dict(enumerate(epochs)))}}
    report = Report(columns, rows, tuple(range(10)))
    return line(report=json.loads(report.to_json()), **changes)


@pytest.mark.parametrize(
    ("epochs", "cap", "printed"),
    [
        ([20] * 9 + [None], 100, "28.0 (1)"),
        ([None] * 10, 100, ">100 (10)"),
        ([5, None, 4], 30, "13.0 (1 of 3; cap 30)"),
        ([None, None], 30, ">30 (2 of 2; cap 30)"),
    ],
)
def test_relearn_times_are_printed_as_in_the_paper(epochs, cap, printed):
    assert paper_tables.relearned([relearning(epochs, cap)]) == printed


def test_relearn_times_of_seeds_are_pooled_and_a_lower_cap_is_left_out():
    lines = [relearning([10, None], 100), relearning([30, 20], 100, seed=1), relearning([1], 5)]
    assert paper_tables.relearned(lines) == "40.0 (1 of 4)"


def test_of_two_lines_with_the_same_key_the_later_counts():
    first, other, again = relearning([1], 5), relearning([1], 5, seed=1), relearning([2], 5)
    assert paper_tables.latest([first, other, again]) == [again, other]


def arguments(folder, **changes):
    given = {"dataset": "mnist", "backbone": "resnet18", "seed": 0, "originals": folder}
    return argparse.Namespace(**given, **{"random_weights": False, **changes})


def test_lacking_retrained_models_are_asked_for_with_the_originals_own_command(tmp_path):
    command = "python benchmarks/originals.py --model resnet18-mnist --lr 0.05 --out originals/"
    log = [
        {"command": "another seed", "settings": {"model": "resnet18-mnist", "seed": 1}},
        {"command": command, "settings": {"model": "resnet18-mnist", "seed": 0}},
    ]
    (tmp_path / "originals.jsonl").write_text("\n".join(map(json.dumps, log)))
    with pytest.raises(SystemExit) as stopped:
        paper.retrained(arguments(tmp_path), (3, 8))
    wanted = [f"{command} --without 3", f"{command} --without 8"]
    assert str(stopped.value).splitlines()[1:] == wanted


def test_retrained_models_are_those_trained_without_the_class(tmp_path):
    model = zoo.create("resnet18-mnist")
    save_file(model.state_dict(), tmp_path / "resnet18-mnist-s0-without3.safetensors")
    models, files = paper.retrained(arguments(tmp_path), (3,))
    assert torch.equal(models[3].conv1.weight, model.conv1.weight)
    assert files == ["resnet18-mnist-s0-without3.safetensors"]


def test_rivals_take_the_options_given_and_tell_those_they_had(monkeypatch):
    asked = []

    def method(model, forget, train, *, epochs=7, lr=0.5, seed=0):
        asked.append((forget, len(train), epochs, lr))
        return model

    monkeypatch.setitem(paper.baselines.METHODS, "random_labels", method)
    images = data.load("digits", "test")
    options = {"rival_images": 12, "rival_batch_size": 6, "rival_epochs": None, "rival_lr": 0.1}
    args = arguments(None, method="random_labels", **options)
    _, told = paper.make_subject(args, torch.nn.Identity(), images, (2, 5))
    assert asked == [(2, 2, 7, 0.1), (5, 2, 7, 0.1)]
    assert told == {"images": 12, "batch_size": 6, "epochs": 7, "lr": 0.1}


@pytest.mark.slow
@pytest.mark.skipif("WFILTER_DATA" not in os.environ, reason="WFILTER_DATA names no data folder")
@pytest.mark.parametrize("method", ["distill", "paper", "negative_gradients"])
def test_a_quick_run_goes_the_whole_way_and_stores_nothing(method, tmp_path):
    command = [sys.executable, str(SCRIPT), "--quick", "--backbone", "vgg16", "--method", method]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "paper.jsonl")],
        capture_output=True,
        text=True,
        cwd=SCRIPT.parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert "Acc_r" in done.stdout
    assert not list(tmp_path.iterdir())
