"""The stopwatch: what it times is compared first, and a failure is a row."""

import json

import pytest
import torch

import wfilter
from wfilter import bench


@pytest.fixture
def wf(tiny_cnn, x):
    return bench.randomise(wfilter.apply_weight_filtering(tiny_cnn, targets="*", example_input=x))


def test_every_path_and_rival_gives_the_oracles_answer(wf, x):
    rows = bench.bench(wf, x, labels=4, rounds=1, rivals=True)
    compared = [row for row in rows if row.largest_difference is not None]
    assert {row.path for row in compared} == {
        "mixed labels",
        "per-sample weights (vmap)",
        "loop over classes",
        "4 baked copies",
    }
    assert max(row.largest_difference for row in compared) < 1e-12
    assert all(row.ratio > 0 and not row.note for row in rows)


def test_a_path_that_fails_is_a_row_with_its_reason(wf, x):
    def broken(images, forget):
        raise RuntimeError("no such adapter")

    rows = bench.bench(wf, x, rounds=1, extra={"broken": broken, "absent": "not installed"})
    notes = {row.path: row.note for row in rows if row.note}
    assert notes == {"broken": "RuntimeError: no such adapter", "absent": "not installed"}


def test_peak_memory_counts_what_a_call_holds_at_once(wf, x):
    size = 2**20 // 4

    def holds_two_mib(images, forget):
        first, second = torch.zeros(size), torch.zeros(size)
        return first + second.sum()

    rows = bench.bench(wf, x, rounds=1, memory=True, extra={"two": holds_two_mib})
    peaks = {row.path: row.peak_mib for row in rows}
    assert 3 <= peaks["two"] < 3.1  # both and the result
    assert peaks["base"] < 0.1


def test_lines_carry_the_command_and_the_environment(wf, x):
    rows = bench.bench(wf, x, rounds=1)
    lines = [json.loads(line) for line in bench.to_json_lines(rows, "bench.py --x").splitlines()]
    assert [line["path"] for line in lines] == [row.path for row in rows]
    assert all(line["command"] == "bench.py --x" and line["torch"] for line in lines)


def test_the_table_has_a_line_for_every_row(wf, x):
    rows = bench.bench(wf, x, rounds=1)
    assert len(bench.format_table(rows).splitlines()) == len(rows) + 1
