"""The benchmark of exported graphs: one command, one table."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "export.py"


@pytest.mark.slow
def test_table_has_a_line_for_every_engine_and_kind_of_batch(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    words = ["--models", "wfilter:cnn-digits", "--batch", "4", "--rounds", "2"]
    words += ["--engines", "eager", "graph", "onnx"]
    monkeypatch.setattr(sys, "argv", ["export.py", *words, "--out", str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = (tmp_path / "export.md").read_text().splitlines()
    cells = [line.split(" | ") for line in lines if line.startswith("| cnn-digits")]
    kinds = "plain", "labels", "sets"
    assert [(row[2], row[3]) for row in cells] == [
        (engine, kind) for engine in ("eager", "graph", "onnx") for kind in kinds
    ]
    for plain, *filtered in (cells[3:6], cells[6:9]):
        assert float(plain[7]) == 1
        assert all(float(row[4]) > float(plain[4]) for row in filtered), "alphas take space"
