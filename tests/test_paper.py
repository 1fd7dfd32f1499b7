"""The paper's tables: all of its numbers, and ours only from stored lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paper_tables
import wfilter

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
