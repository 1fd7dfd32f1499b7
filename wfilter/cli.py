"""The command line: each command a thin layer over the library's functions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="wfilter",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Filters that make an image classifier forget any class, chosen at run time.",
    epilog="Start with: wfilter demo",
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


@dataclass(frozen=True)
class Output:
    """Where a command's words go: notes for people, one result for people or programs."""

    quiet: bool = False
    json: bool = False

    def note(self, text: str) -> None:
        """Say how things are going."""
        if not (self.quiet or self.json):
            print(text, flush=True)

    def result(self, text: str, facts: object) -> None:
        """Give what the command was called for."""
        if self.json:
            print(json.dumps(facts, default=str), flush=True)
        elif not self.quiet:
            print(text, flush=True)

    @property
    def progress(self) -> bool | None:
        """Progress bars: never when quiet, else on a terminal."""
        return False if self.quiet or self.json else None


@app.command(epilog="Example: wfilter plan timm:vit_tiny_patch16_224 --exclude 'blocks.0.*'")
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="timm:NAME, torchvision:NAME, "
                                         "wfilter:NAME or package.module:function.")],
    targets: Annotated[list[str] | None, typer.Option(help="What to filter: globs over parameter "
                                                      "names, or 're:' patterns.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="What not to filter.")] = None,
    granularity: Annotated[str, typer.Option(help="One gate per 'out' unit or 'element'.")] = "out",
    num_classes: Annotated[int | None, typer.Option(help="Outputs of the head.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Show which parameters of a model would be filtered, and how. Changes nothing."""
    from wfilter import find_targets, zoo

    network = zoo.build(model, num_classes=num_classes)
    rows = find_targets(network, targets or "auto", exclude or (), granularity=granularity)
    facts = [vars(row) for row in rows]
    Output(quiet, as_json).result(str(rows), {"model": model, "targets": facts})


@app.command(epilog="Example: wfilter demo --out /tmp/demo")
def demo(
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("wfilter-demo"),
    models: Annotated[list[str] | None, typer.Option("--model", help="Only this network.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Of training the originals.")] = None,
    steps: Annotated[int | None, typer.Option(help="Of untraining.")] = None,
    pages: Annotated[bool, typer.Option(help="Draw pictures and HTML pages.")] = True,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train two small networks on digits and let them forget every class, without any download."""
    from wfilter import demo as show

    output = Output(quiet, as_json)
    outcomes = show.demo(
        out,
        models=models or show.MODELS,
        epochs=epochs,
        steps=show.STEPS if steps is None else steps,
        pages=pages,
        say=output.note,
        progress=output.progress,
    )
    facts = [outcome.to_dict() for outcome in outcomes]
    output.result(show.farewell(out, outcomes, pages), facts)


def main() -> None:
    """The ``wfilter`` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; its exit code: 0 done, 1 it could not be done, 2 it was called wrongly.

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
        if hasattr(error, "format_message"):  # typer's own, whichever click it carries
            return _complain(f"{error.format_message()} Try wfilter --help.", 2)
        return _complain(_one_line(error), 1)


def _call(arguments: list[str]) -> int:
    command: Callable[..., Any] = typer.main.get_command(app)
    code = command(args=arguments, prog_name="wfilter", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _complain(message: str, code: int) -> int:
    print(f"wfilter: {message}", file=sys.stderr)
    return code


def _one_line(error: Exception) -> str:
    """The message without line breaks; errors that nobody foresaw are named and said to be ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}. Check the path and its permissions."
    foreseen = (ValueError, TypeError, RuntimeError, OSError, ArithmeticError)
    if isinstance(error, foreseen):
        return text
    return f"{type(error).__name__}: {text}. Run again with --debug to see where."
