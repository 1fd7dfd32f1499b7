"""The GPU code of mixed batches, run on the CPU by Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretended_gpu import why_not

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BAD_LABEL = """
import torch, interpreted
wf, images = interpreted.make("cnn")
try:
    interpreted.lowered_answer(wf, images, torch.tensor([3, {label}, 9]))
except Exception as error:
    print("index out of bounds" in repr(error))
"""


def interpret(*command):
    """In a process of its own: triton asks for the interpreter when it is imported."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    here = [str(BENCHMARKS), str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(here)}
    command = [sys.executable, *command]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "vit", "resnet18", "swin"])
def test_the_lowered_kernels_answer_as_eager_does(name):
    printed = interpret(str(BENCHMARKS / "interpreted.py"), name)
    found = json.loads(printed.removeprefix(name))
    assert set(found) == {"labels", "sets"}
    for row in found.values():
        assert row["from eager"] < 2e-6
        assert row["from the base model"] > 1e-3  # gates that did nothing would be seen


@pytest.mark.slow
@pytest.mark.parametrize("label", [-2, 10])
def test_a_bad_label_on_the_device_stops_the_kernel_that_makes_the_gates(label):
    assert interpret("-c", BAD_LABEL.format(label=label)).strip() == "True"
