"""The comparison of all methods: one command, a table, and nothing measured twice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wfilter import Report

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare.py"
SIZES = """--classes 3 --methods logit_mask --untrain-steps 2 --test-images 60 --sample-images 60
    --train-images 64 --probe-images 64 --relearn-samples 16 --relearn-epochs 1
    --shots 1 --shot-steps 1 --curve-images 1 --curve-steps 1"""


def compare(folder, *more):
    kept = ["--out", str(folder), "--keep", str(folder)]
    command = [sys.executable, str(SCRIPT), *SIZES.split(), *kept, *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parents[1])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif("WFILTER_DATA" not in os.environ, reason="WFILTER_DATA names no data folder")
def test_comparison_writes_its_table_and_goes_on_where_it_stopped(tmp_path):
    alone = compare(tmp_path, "--rivals-only")  # as a second process would
    assert "logit_mask 3:" in alone
    assert not list(tmp_path.glob("filters-*"))
    first = compare(tmp_path)
    assert "wfilter" in first
    assert "logit_mask 3:" not in first
    report = Report.from_json(tmp_path / "compare_cifar10_resnet18.json")
    assert set(report.methods) == {"original", "random network", "wfilter", "logit_mask"}
    assert report.value("logit_mask", "Acc_f") == 0
    text = (tmp_path / "compare_cifar10_resnet18.md").read_text()
    assert "the first 60 test images" in " ".join(text.split())
    assert "Not yet measured" not in text
    made = next(tmp_path.glob("filters-*.safetensors")).stat().st_mtime_ns
    assert compare(tmp_path, "--table") == ""
    assert next(tmp_path.glob("filters-*.safetensors")).stat().st_mtime_ns == made
    assert (tmp_path / "compare_cifar10_resnet18.md").read_text() == text
