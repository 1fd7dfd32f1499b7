"""Every example runs, from its first line to the assert that proves its claim."""

import ast
import copy
import importlib
import json
import os
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from wfilter.cli import demo
from wfilter.core import rules

FOLDER = Path(__file__).parent.parent / "examples"
FAST = ("wrap_any_model", "own_training_loop", "own_layer", "bake_and_ship")
TRAIN = demo.example_problem
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@cache
def original():
    """The digits' classifier that the examples share, so that it is trained once."""
    return TRAIN(arguments=[])


@pytest.fixture
def shared_original(monkeypatch):
    def problem(description="", arguments=None):
        model, train, test = original()
        return copy.deepcopy(model), train, test

    monkeypatch.setattr(demo, "example_problem", problem)


class EndingWithThisRun(subprocess.Popen):
    """What an example starts in Python; a run that is killed must not leave a server behind."""

    def __init__(self, words, *rest, **options):
        if words[0] == sys.executable:
            words = [sys.executable, str(Path(__file__).with_name("with_parent.py")), *words]
        super().__init__(words, *rest, **options)


@pytest.fixture
def _children_end_with_this_run(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", EndingWithThisRun)


@pytest.fixture(autouse=True)
def _rules_as_before():
    before = dict(rules.RULES)
    yield
    rules.RULES.clear()
    rules.RULES.update(before)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in NAMES]
)
@pytest.mark.usefixtures("_children_end_with_this_run")
def test_example_proves_its_claim(name, shared_original, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)  # where some draw a picture
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    space = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert f"examples/{name}.py" in space["__doc__"], "the docstring gives the command"
    assert capsys.readouterr().out.strip(), "and the example prints what it found"


@pytest.mark.slow
def test_two_processes_agree():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = str(FOLDER / "two_processes.py")
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", script],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Acc_r" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_name_that_an_example_imports_is_there(name):
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("wfilter"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names), node.module


def test_each_script_asserts_something():
    for name in NAMES:
        assert "\nassert " in (FOLDER / f"{name}.py").read_text().replace("    assert", "assert")


@pytest.mark.slow
def test_notebook_runs_from_top_to_bottom(shared_original):
    notebook = json.loads((FOLDER / "first_steps.ipynb").read_text())
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert cells
    space: dict[str, object] = {}
    for cell in cells:
        exec("".join(cell["source"]), space)
