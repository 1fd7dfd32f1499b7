"""``wfilter demo``: everything at once, on digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wfilter.cli.app import app
from wfilter.cli.options import Debug, Json, Output, Quiet


@app.command(epilog="Example: wfilter demo --out /tmp/demo")
def demo(
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("wfilter-demo"),
    models: Annotated[list[str] | None, typer.Option("--model", help="Only this network.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Of training the originals.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of untraining.")] = None,
    pages: Annotated[bool, typer.Option(help="Draw pictures and HTML pages.")] = True,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train two small networks on digits and let them forget every class, without any download."""
    from wfilter.cli import demo as show

    output = Output(quiet, as_json)
    outcomes = show.demo(
        out,
        models=models or show.MODELS,
        epochs=epochs,
        steps=steps,
        pages=pages,
        say=output.note,
        progress=output.progress,
    )
    output.result(show.farewell(out, outcomes, pages), [one.to_dict() for one in outcomes])
