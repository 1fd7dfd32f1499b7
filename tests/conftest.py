"""What every test shares: a seed, and a tiny filtered model. The models are in `helpers`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lab
import wfilter
from helpers import apply, images, tiny


def avoid_broken_amx() -> None:
    """Keep oneDNN from tile instructions that a processor reports and a virtual machine lacks.

    A product in bfloat16 would end the whole run with an illegal instruction, so it is tried in a
    process of its own.
    """
    processor = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not processor.exists():
        return
    if "amx_bf16" in processor.read_text():
        trial = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); a @ a"
        if subprocess.run([sys.executable, "-c", trial], capture_output=True).returncode < 0:
            os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"


avoid_broken_amx()


def pytest_sessionstart() -> None:
    """Unpack the data folder, if there is one, into the formats that wfilter reads."""
    if os.environ.get("WFILTER_DATA"):
        lab.unpack()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def tiny_cnn() -> nn.Module:
    return tiny("cnn")


@pytest.fixture
def x() -> Tensor:
    return images(4, 3, 8, 8)


@pytest.fixture
def wf(tiny_cnn, x) -> wfilter.FilteredModel:
    return apply(tiny_cnn, x)
