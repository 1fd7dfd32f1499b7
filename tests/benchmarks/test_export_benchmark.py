"""The benchmark of exported graphs: one command, one table."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "export.py"


@pytest.mark.slow
def test_table_has_a_line_for_every_graph_and_format(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    words = ["--models", "wfilter:cnn-digits", "--batch", "4", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["export.py", *words, "--out", str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = (tmp_path / "export.md").read_text().splitlines()
    cells = [line.split(" | ") for line in lines if line.startswith("| wfilter:cnn-digits")]
    assert [(row[2], row[3]) for row in cells] == [
        (suffix, kind) for suffix in (".pt2", ".onnx") for kind in ("plain", "labels", "sets")
    ]
    for plain, *filtered in (cells[:3], cells[3:]):
        assert float(plain[7]) == 1
        assert all(float(row[4]) > float(plain[4]) for row in filtered), "alphas take space"
