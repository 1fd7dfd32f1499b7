"""The documentation: ``sphinx-build -W -b html docs docs/_build`` makes it, offline."""

import re
import sys
from pathlib import Path

import typer
import typer.main

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import gallery  # noqa: E402

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
html_static_path = ["site.css"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"  # furo's own choice underlines every import
html_title = "wfilter"
html_show_sphinx = False
html_extra_path = ["atlas.html"]
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
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


PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\.svg\)")


def add_dark_pictures(_: object, page: str, source: list[str]) -> None:
    """Where a picture has a twin for dark pages, ``NAME-dark.svg``: both, each on its ground."""
    folder = (HERE / page).parent

    def both(found: re.Match[str]) -> str:
        alt, name = found.groups()
        if not (folder / f"{name}-dark.svg").exists():
            return found.group()
        light, dark = (f"![{alt}]({name}{end}.svg)" for end in ("", "-dark"))
        return f"{light}{{.only-light}}{dark}{{.only-dark}}"

    source[0] = PICTURE.sub(both, source[0])


def setup(app: object) -> None:
    """Write the made pages before the others are read."""
    app.connect("builder-inited", write_command_line)  # type: ignore[attr-defined]
    app.connect("builder-inited", gallery.write_pages)  # type: ignore[attr-defined]
    app.connect("source-read", add_dark_pictures)  # type: ignore[attr-defined]
