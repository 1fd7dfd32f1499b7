"""One version, stated in one place; `.ci/wheel` builds the wheel and uses it."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import wfilter
from wfilter.cli import main as cli

ROOT = Path(__file__).parents[1]
# Import name -> what is declared for it. Ray Serve brings its own web framework along.
DECLARED_AS = {"PIL": "pillow", "sklearn": "scikit-learn"} | dict.fromkeys(
    ("ray", "fastapi", "starlette", "pydantic"), "ray[serve]"
)


def imported_packages(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def test_every_package_that_is_imported_is_declared():
    packages = {
        name for path in (ROOT / "wfilter").rglob("*.py") for name in imported_packages(path)
    }
    foreign = packages - set(sys.stdlib_module_names) - {"wfilter"}
    assert {"torch", "einops"} <= foreign
    declared = (ROOT / "pyproject.toml").read_text()
    assert [n for n in foreign if f'"{DECLARED_AS.get(n, n)}>=' not in declared] == []


def test_the_version_has_one_source_and_everything_else_agrees(capsys):
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {wfilter.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest.group(1) == wfilter.__version__
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"wfilter {wfilter.__version__}\n"


def test_importing_wfilter_loads_neither_torch_nor_a_module_of_its_own():
    heavy = "[m for m in sys.modules if m.startswith(('torch', 'wfilter.'))]"
    code = f"import sys, wfilter; print({heavy})"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert found.stdout == "[]\n"


def test_every_python_that_is_claimed_is_in_the_script_that_tries_them():
    claimed = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    script = (ROOT / ".ci/pythons").read_text()
    assert claimed == re.search(r"PYTHONS:-([\d. ]+)}", script).group(1).split()
    try:
        requires = metadata.metadata("wfilter")["Requires-Python"]
    except metadata.PackageNotFoundError:  # run from a checkout without being installed
        return
    assert requires == f">={claimed[0]}"
