"""``wfilter audit``: judge any unlearned model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from wfilter.cli.app import command
from wfilter.cli.options import MODEL, Images, Pretrained, Size, Talk


@command(
    epilog="Example: wfilter audit wfilter:resnet18-cifar --weights unlearned.safetensors "
    "--dataset cifar10 --classes 3 --original base.safetensors --out audit.html"
)
def audit(
    *,
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
    size: Size = None,
    source: Images,
    talk: Talk,
) -> None:
    """Say what an unlearned model still knows, beside the original and a retrained one."""
    from wfilter.cli import auditing

    if out is not None:
        auditing.check_path(out)
    job = {"weights": weights, "pretrained": pretrained, "size": size, **vars(source)}
    audited = auditing.run(model, job, classes or (), original, retrained, images)
    if out is not None:
        auditing.FORMS[out.suffix](audited, out)
    talk.output.result(str(audited), json.loads(audited.to_json()))
