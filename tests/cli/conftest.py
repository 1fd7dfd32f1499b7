"""Weights and a folder of filters, made once for all tests of the command line."""

import pytest
import torch
from safetensors.torch import save_file

from commands import untrain_words
from wfilter import zoo
from wfilter.cli import main as cli


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "base.safetensors"
    save_file(zoo.create("cnn-digits").state_dict(), path)
    return path


@pytest.fixture(scope="session")
def run(weights, tmp_path_factory):
    """A folder that untrain wrote."""
    folder = tmp_path_factory.mktemp("run") / "filters"
    assert cli.run([*untrain_words(weights), "--out", str(folder), "--quiet"]) == 0
    return folder
