"""What all benchmarks do: where results lie, what they depend on, JSON lines, recipe settings."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import wfilter
from wfilter import Recipe
from wfilter.cli.settings import make_recipe, parse_changes

RESULTS = Path(__file__).parent / "results"


def commit() -> str:
    """The short name of the commit that is checked out, or ``"unknown"``."""
    answer = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS.parent, capture_output=True, text=True
    )
    return answer.stdout.strip() or "unknown"


def told_command() -> str:
    """The command that was given; folders that are elsewhere for others by their usual names."""
    command = shlex.join(["python", *sys.argv])
    for name, folder in (("$WFILTER_DATA", os.environ.get("WFILTER_DATA")), ("~", Path.home())):
        command = command.replace(str(folder), name) if folder else command
    return command


def origin() -> dict[str, Any]:
    """What every stored line ends with: command, commit, versions and machine."""
    return {"command": told_command(), "commit": commit(), **wfilter.bench.environment()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All JSON lines of a file; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """One more JSON line at the end of a file, which need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:  # one write: a second run may add lines, too
        file.write(json.dumps(line).encode() + b"\n")


def add_table(parser: argparse.ArgumentParser, file: Path) -> None:
    """``--table`` and ``--out``, for `write_table`."""
    parser.add_argument("--table", action="store_true", help="write the table of all stored lines")
    parser.add_argument("--out", type=Path, default=file, help="file of the stored lines")


def write_table(args: argparse.Namespace, table: Callable[[list[dict[str, Any]]], str]) -> None:
    """The table of all lines stored so far, beside them, if ``--table`` asks for it."""
    if args.table:
        args.out.with_suffix(".md").write_text(table(read_lines(args.out)))


def add_set(parser: argparse.ArgumentParser) -> None:
    """``--set margin=2``: a recipe with settings changed, for every script that untrains."""
    parser.add_argument("--set", action="append", default=[], help="recipe setting, name=value")


def changed(recipe: str, settings: Sequence[str]) -> Recipe:
    """The recipe of that name with ``name=value`` settings, as on wfilter's command line."""
    return make_recipe(recipe, parse_changes(settings))
