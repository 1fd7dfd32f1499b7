"""The command ``wfilter`` itself, which every command joins."""

from __future__ import annotations

from typing import Annotated

import typer

from wfilter import __version__

app = typer.Typer(
    name="wfilter",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: wfilter demo",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"wfilter {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Filters that make an image classifier forget any class, chosen at run time."""
