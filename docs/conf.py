"""The documentation: ``sphinx-build -W -b html docs docs/_build`` makes it, offline."""

import ast
import sys
from pathlib import Path

import typer
import typer.main

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import wfilter  # noqa: E402

project = "wfilter"
author = "the wfilter authors"
copyright = "the wfilter authors"
release = version = wfilter.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "wfilter"
html_show_sphinx = False
html_extra_path = ["atlas.html"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types stay in the signature
autodoc_preserve_defaults = True
suppress_warnings = ["config.cache"]


def write_command_line(_: object) -> None:
    """The page of the commands, from typer's own description of them."""
    from wfilter.cli.main import app

    group = typer.main.get_command(app)
    pages = [
        "# Command line\n",
        "Made from the commands themselves; `wfilter COMMAND --help` prints it.\n",
    ]
    for name, command in group.commands.items():
        pages.append(f"## wfilter {name}\n\n{(command.help or '').strip()}\n")
        pages += ["| option | meaning |\n|---|---|"]
        for parameter in command.params:
            words = ", ".join(f"`{word}`" for word in parameter.opts) or f"`{parameter.name}`"
            text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
            pages.append(f"| {words} | {text} |")
        pages.append("")
    (HERE / "command-line.md").write_text("\n".join(pages), encoding="utf-8")


def write_examples(_: object) -> None:
    """The page of the examples: each script under what its docstring says of it."""
    pages = ["# Examples\n", "Short scripts that run offline; each checks its own claim.\n"]
    for script in sorted((HERE.parent / "examples").glob("*.py")):
        source = script.read_text(encoding="utf-8")
        text = ast.get_docstring(ast.parse(source)) or ""
        title, _, rest = text.partition("\n")
        body = source.split('"""', 2)[2].strip()
        pages.append(f"## {script.stem.replace('_', ' ').capitalize()}\n\n{title}\n{rest}\n")
        pages.append(f"```python\n{body}\n```\n")
    (HERE / "examples.md").write_text("\n".join(pages), encoding="utf-8")


def setup(app: object) -> None:
    """Write the made pages before the others are read."""
    app.connect("builder-inited", write_command_line)  # type: ignore[attr-defined]
    app.connect("builder-inited", write_examples)  # type: ignore[attr-defined]
