"""The documentation: ``sphinx-build -W -b html docs docs/_build`` makes it, offline."""

import re
import sys
from pathlib import Path
from typing import Any

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
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "figures"]
html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"  # furo's own choice underlines every import
html_title = "wfilter"
html_show_sphinx = False
smartquotes = False  # two dashes are an option, not a dash
html_extra_path = ["atlas.html"]
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autosummary_generate = False  # tables of links only
autodoc_typehints = "none"  # types stay in the signature
autodoc_preserve_defaults = True
suppress_warnings = ["config.cache"]


def option_line(parameter: Any) -> str:
    """A line of a command's table: the words, what they mean, what they are by default."""
    words = ", ".join(f"`{word}`" for word in parameter.opts) or f"`{parameter.name}`"
    text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    default = parameter.default
    said = default not in (None, "", False) and not callable(default)
    return f"| {words} | {text} {f'Default: `{default}`.' if said else ''} |"


def write_command_line(_: object) -> None:
    """The page of the commands, from typer's own description of them."""
    from wfilter.cli.main import app

    group = typer.main.get_command(app)
    pages = [
        "# Command line\n",
        "Made from the commands themselves; `wfilter COMMAND --help` prints it, and "
        "`python -m wfilter` is the same as `wfilter`.\n",
    ]
    for name, command in group.commands.items():
        pages.append(f"## wfilter {name}\n\n{(command.help or '').strip()}\n")
        example = " ".join((command.epilog or "").split()).removeprefix("Example: ")
        pages += [f"```bash\n{example}\n```\n"] if example else []
        pages += ["| option | meaning |\n|---|---|", *map(option_line, command.params), ""]
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
