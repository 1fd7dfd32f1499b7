"""``wfilter audit``: judge any unlearned model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from wfilter.cli.app import app
from wfilter.cli.options import (
    MODEL,
    Config,
    Data,
    Dataset,
    Debug,
    Download,
    Json,
    Output,
    Pretrained,
    Quiet,
    Size,
)


@app.command(
    epilog="Example: wfilter audit wfilter:resnet18-cifar --weights unlearned.safetensors "
    "--dataset cifar10 --classes 3 --original base.safetensors --out audit.html"
)
def audit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"A folder of filters, or {MODEL}")],
    classes: Annotated[
        list[str] | None, typer.Option(help="What was forgotten, by name or index; repeat.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Of the unlearned model; {class} stands for the class's index."),
    ] = None,
    original: Annotated[
        str | None, typer.Option(help="Weights of the model before forgetting.")
    ] = None,
    retrained: Annotated[
        str | None,
        typer.Option(help="Weights of the model trained without the class; {class} as above."),
    ] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Test images to attack.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write .html, .json, .md or .tex.")] = None,
    pretrained: Pretrained = False,
    dataset: Dataset = None,
    data: Data = None,
    size: Size = None,
    download: Download = False,
    config: Config = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what an unlearned model still knows, beside the original and a retrained one."""
    from wfilter.cli import auditing

    if out is not None:
        auditing.check_path(out)
    places = {"weights": weights, "dataset": dataset, "data": data}
    job = {**places, "pretrained": pretrained, "size": size, "download": download}
    audited = auditing.run(model, job, classes or (), original, retrained, images)
    if out is not None:
        auditing.FORMS[out.suffix](audited, out)
    Output(quiet, as_json).result(str(audited), json.loads(audited.to_json()))
