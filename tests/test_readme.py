"""The README's Python blocks run as printed, and print what it says."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from wfilter import cli

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


def test_every_command_is_one_that_wfilter_has(capsys):
    lines = [
        line for kind, text in BLOCK.findall(README) if kind == "bash" for line in text.split("\n")
    ]
    words = [part for line in lines for part in line.split(" && ") if part.startswith("wfilter ")]
    assert words
    for command in words:
        name, *rest = shlex.split(command, comments=True)[1:]
        assert cli.run([name, "--help"]) == 0
        shown = capsys.readouterr().out
        for word in rest:
            assert not word.startswith("--") or word in shown, f"{word} in: {command}"


@pytest.mark.parametrize("text", ["pip install -e . && wfilter demo", '".[dev]" && pytest'])
def test_install_and_test_commands_are_there(text):
    assert text in README
