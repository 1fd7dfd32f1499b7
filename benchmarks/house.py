"""Count how large and how orderly the code is, at any commit, from what git stores of it.

    python benchmarks/house.py fbccfe6 HEAD

prints a table of the commits and appends a JSON line for each to ``results/house.jsonl``; seconds,
and nothing of the package is run but ``import wfilter``. Code lines are those without docstrings,
comments and blank lines. A function's length counts from below its docstring. An import breaks the
order if it points down the first table of CONTRIBUTING.md's "Where things are" *of that commit*,
whose text says that imports point up. Tests are counted as functions, before parametrisation.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, append_line, origin

LONG = 40  # lines of a function
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LOADED = "import sys, wfilter; print(sum(name.startswith('wfilter.') for name in sys.modules))"


def code_lines(text: str) -> int:
    """Lines that hold anything but comments and docstrings."""
    tree = ast.parse(text)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT and token.string:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function below its docstring."""
    rest = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return node.end_lineno - rest[0].lineno + 1 if rest else 0


def order(guide: str) -> dict[str, int]:
    """Row of each file and folder in the guide's first table: ``{"rules": 3, "baselines": 12}``."""
    table = guide.split("## Where things are")[1].split("|---|---|\n")[1].split("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()]
    return {
        name: place
        for place, cell in enumerate(cells)
        for name in re.findall(r"`(\w+)(?:\.py|/)`", cell)
    }


def imports(tree: ast.Module) -> Iterator[tuple[str, str, bool]]:
    """Our own modules that a file imports: first part of the name, the name, hidden or not."""
    blocks = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.If))]
    top = {id(node) for block in blocks for node in block}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("wfilter."):
            for alias in node.names:
                parts = [*str(node.module).split("."), alias.name]
                yield parts[1], alias.name, id(node) not in top


def measure(tree: Path) -> dict[str, Any]:
    """All counts of a checked-out commit."""
    rows = order((tree / "CONTRIBUTING.md").read_text())
    texts = {p.relative_to(tree / "wfilter"): p.read_text() for p in tree.glob("wfilter/**/*.py")}
    parsed = {path: ast.parse(text) for path, text in texts.items()}
    functions = [n for t in parsed.values() for n in ast.walk(t) if isinstance(n, FUNCTIONS)]
    edges = [
        (path, *edge)
        for path, module in parsed.items()
        if len(path.parts) > 1 or path.stem in rows  # the package itself may read all
        for edge in imports(module)
    ]
    against = [
        (path, to)
        for path, to, _, _ in edges
        if rows.get(path.parts[0].removesuffix(".py"), 0) < rows.get(to, 0)
    ]
    tests = [p.read_text() for p in tree.glob("tests/**/*.py")]
    loaded = subprocess.run(
        [sys.executable, "-c", LOADED], cwd=tree, env={"PYTHONPATH": str(tree)}, capture_output=True
    )
    return {
        "files": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "code lines": sum(map(code_lines, texts.values())),
        "longest file": max(len(text.splitlines()) for text in texts.values()),
        f"functions over {LONG} lines": sum(length(node) > LONG for node in functions),
        "imports of our own": len(edges),
        "imports against the order": len(set(against)),
        "imports hidden in functions": sum(hidden for *_, hidden in edges),
        "imports of underscore names": sum(bool(re.match("_[^_]", n)) for _, _, n, _ in edges),
        "modules loaded by import wfilter": int(loaded.stdout or -1),
        "code lines of tests": sum(map(code_lines, tests)),
        "tests": sum(
            isinstance(node, FUNCTIONS) and node.name.startswith("test_")
            for text in tests
            for node in ast.walk(ast.parse(text))
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="+")
    parser.add_argument("--out", type=Path, default=RESULTS / "house.jsonl")
    args = parser.parse_args()
    counted = {}
    for commit in args.commits:
        show = ["git", "log", "-1", "--format=%h", commit]
        name = subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()
        archive = subprocess.run(["git", "archive", commit], capture_output=True, check=True)
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
                tar.extractall(folder, filter="data")
            counted[name] = measure(Path(folder))
        append_line(args.out, {"house": name, **counted[name], **origin()})
    print("| |", " | ".join(counted), "|")
    print("|---|" + "---:|" * len(counted))
    for key in next(iter(counted.values())):
        print("|", key, "|", " | ".join(f"{numbers[key]:,}" for numbers in counted.values()), "|")


if __name__ == "__main__":
    main()
