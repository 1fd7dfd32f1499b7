"""The README's blocks run as printed, and print what it says."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from wfilter.cli import main as cli

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_python_blocks_run_in_order_and_print_what_follows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(README)
    space: dict[str, object] = {}
    ran = 0
    for (kind, source), (after, expected) in zip(blocks, [*blocks[1:], ("", "")]):
        if kind != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, "README.md", "exec"), space)
        if after == "text":
            assert printed.getvalue() == expected
        ran += 1
    assert ran >= 2


def commands():
    """The words of each wfilter command in the README's shell blocks."""
    lines = [
        line for kind, text in BLOCK.findall(README) if kind == "bash" for line in text.split("\n")
    ]
    found = [part for line in lines for part in line.split(" && ") if part.startswith("wfilter ")]
    return [shlex.split(command, comments=True)[1:] for command in found]


def test_every_command_is_one_that_wfilter_has(capsys):
    assert len(commands()) >= 7
    for name, *rest in commands():
        assert cli.run([name, "--help"]) == 0
        shown = capsys.readouterr().out
        for word in rest:
            assert not word.startswith("--") or word in shown, f"{word} of wfilter {name}"


@pytest.mark.slow
def test_commands_run_in_order_on_what_the_demo_leaves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, *rest in commands():
        short = ["--model", "cnn-digits", "--no-pages"] if name == "demo" else []
        assert cli.run([name, *rest, *short, "--quiet"]) == 0, f"wfilter {name}"
    assert {"page.html", "model.pt2", "run.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("text", ["pip install -e . && wfilter demo", '".[dev]" && pytest'])
def test_install_and_test_commands_are_there(text):
    assert text in README
