"""The gallery: run the examples, keep what they print and draw, and make pages of it.

    python docs/gallery.py              # all of them, about six minutes on one free core
    python docs/gallery.py own_layer    # only this one

Each script runs in a process and an empty folder of its own. What it prints, the picture it draws
and a line of `runs.json` (a hash of the script, versions, CPU seconds) are stored in
`docs/gallery/`. Building the site only reads them, so it stays a matter of seconds; a script that
has changed since is shown without output and picture until it is run again.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
STORED = HERE / "gallery"
RUNS = STORED / "runs.json"
PAGES = HERE / "examples"
FIRST = ("wrap_any_model", "untrain_digits", "explain_a_class", "mixed_tenants", "bake_and_ship")


def names() -> list[str]:
    """Every example: those to begin with, then the others by name."""
    found = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    return [*FIRST, *(name for name in found if name not in FIRST)]


def digest(name: str) -> str:
    """Of a script's source."""
    return hashlib.sha256((EXAMPLES / f"{name}.py").read_bytes()).hexdigest()[:16]


def runs() -> dict[str, dict[str, object]]:
    """What is stored of each example's last run."""
    return json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.exists() else {}


def stored_run(name: str) -> dict[str, object] | None:
    """Of the script as it is now; ``None`` if it has changed, or never ran here."""
    line = runs().get(name)
    return line if line and line["script"] == digest(name) else None


def drawn(name: str) -> bool:
    """Whether there is a picture that this script drew."""
    return stored_run(name) is not None and (STORED / f"{name}.png").exists()


def run(name: str) -> dict[str, object]:
    """Run one example and store its output and picture; stops where the example fails."""
    import torch

    import wfilter

    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / f"{name}.py")],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(HERE.parent), "COLUMNS": "96"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
        # Ray tells of its own shutdown in between; that is not what the example prints.
        lines = [x for x in done.stdout.splitlines(keepends=True) if "(raylet)" not in x]
        (STORED / f"{name}.txt").write_text("".join(lines), encoding="utf-8")
        for picture in Path(folder).glob(f"{name}.png"):
            shutil.copy(picture, STORED / picture.name)
    took = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    return {
        "script": digest(name),
        "version": wfilter.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_seconds": round(took),
    }


def run_all(chosen: Iterable[str]) -> None:
    """Run examples one after the other, and note each as soon as it has ended."""
    STORED.mkdir(exist_ok=True)
    for name in chosen:
        line = run(name)
        print(f"{name}: {line['cpu_seconds']} CPU seconds", flush=True)
        text = json.dumps({**runs(), name: line}, indent=1, sort_keys=True)
        RUNS.write_text(text + "\n", encoding="utf-8")


def title(name: str) -> str:
    """What a script is called on the site."""
    return name.replace("_", " ").capitalize()


def parts(name: str) -> tuple[str, str, str]:
    """A script's first sentence, the rest of its docstring, and its code."""
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    first, _, rest = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    return first, rest.strip("\n"), source.split('"""', 2)[2].strip()


def page(name: str) -> str:
    """One example: what it shows, its picture, its code and what it printed."""
    first, rest, code = parts(name)
    text = [f"# {title(name)}\n", first, f"\n{rest}\n"]
    if drawn(name):
        text.append(f"![What {name}.py draws](../gallery/{name}.png)\n")
    text.append(f"```python\n{code}\n```\n")
    line = stored_run(name)
    if line:
        printed = (STORED / f"{name}.txt").read_text(encoding="utf-8").rstrip()
        text.append(f"It printed\n\n```text\n{printed}\n```\n")
        text.append(
            f"with wfilter {line['version']}, torch {line['torch']} and Python {line['python']}, "
            f"in {line['cpu_seconds']} CPU seconds; `python docs/gallery.py {name}` runs it.\n"
        )
    return "\n".join(text)


def index() -> str:
    """All examples, each with its picture."""
    text = [
        "# Examples\n",
        "Short scripts that run offline on real images. Each ends by checking its own claim; the "
        "tests run them all.\n",
        ":::::{container} cards\n",
    ]
    for name in names():
        picture = f"![](gallery/{name}.png)\n\n" if drawn(name) else ""
        link = f"[{title(name)}](examples/{name}.md)"
        text.append(f"::::{{container}} card\n{picture}**{link}**\n\n{parts(name)[0]}\n::::\n")
    text.append(":::::\n\n```{toctree}\n:hidden:")
    text += [f"examples/{name}" for name in names()]
    return "\n".join([*text, "```\n"])


def write_pages(_: object = None) -> None:
    """The index and a page for each example, for Sphinx to read."""
    PAGES.mkdir(exist_ok=True)
    (HERE / "examples.md").write_text(index(), encoding="utf-8")
    for name in names():
        (PAGES / f"{name}.md").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    run_all(sys.argv[1:] or names())
