"""Run one command: what is printed when it fails, and which exit code says so."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import typer

from wfilter.cli import commands as commands  # each joins the app when it is imported
from wfilter.cli.app import app


def main() -> None:
    """The ``wfilter`` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code: 0 done, 1 it failed, 2 it was called wrongly.

    Example:
        >>> run(["plan", "wfilter:cnn-digits", "--quiet"])
        0
    """
    if "--debug" in arguments:
        return _call(arguments)
    try:
        return _call(arguments)
    except KeyboardInterrupt:
        return _complain("interrupted.", 130)
    except Exception as error:
        if hasattr(error, "format_message"):  # an error of usage, from any click that typer carries
            return _complain_of_usage(error)
        return _complain(_one_line(error), 1)


def _call(arguments: list[str]) -> int:
    command: Callable[..., Any] = typer.main.get_command(app)
    code = command(args=arguments, prog_name="wfilter", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _complain_of_usage(error: Any) -> int:
    """Say what was typed wrongly and which help to read, unless the help was just printed."""
    command = error.ctx.command_path if error.ctx else "wfilter"
    if type(error).__name__ == "NoArgsIsHelpError":
        return 2  # the help has been printed
    return _complain(f"{error.format_message().rstrip('.')}. Try {command} --help.", 2)


def _complain(message: str, code: int) -> int:
    print(f"wfilter: {message}", file=sys.stderr)
    return code


def _one_line(error: Exception) -> str:
    """The message without line breaks; an unforeseen error is named and hints at --debug."""
    if isinstance(error, OSError) and error.strerror:
        if error.filename is None:
            return f"{error.strerror.rstrip('.')}."
        return f"{error.filename}: {error.strerror}. Check the path and its permissions."
    # Lines that begin with a capital become sentences, indented ones entries of a list.
    text = re.sub(r"([^.:;,\s])\n(?=[A-Z])", r"\1. ", str(error))
    text = re.sub(r"([^.:;,\s])\n(?= )", r"\1; ", text)
    text = " ".join(text.split()) or type(error).__name__
    foreseen = (ValueError, TypeError, RuntimeError, OSError, ArithmeticError)
    if isinstance(error, foreseen):
        return text
    return f"{type(error).__name__}: {text}. Run again with --debug to see where."
