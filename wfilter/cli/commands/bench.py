"""``wfilter bench``: time a mixed batch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from wfilter.cli.app import app
from wfilter.cli.options import Classes, Debug, Device, Json, Model, Output, Quiet, Size


@app.command(epilog="Example: wfilter bench timm:resnet18 --batch-size 32 --rivals")
def bench(
    model: Model,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in the batch.")] = 32,
    labels: Annotated[int, typer.Option(min=1, help="Different classes the batch forgets.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 9,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile all paths.")] = False,
    rivals: Annotated[bool, typer.Option(help="Also time the alternatives.")] = False,
    num_classes: Classes = None,
    size: Size = None,
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time a mixed batch against the plain model on this machine."""
    from wfilter.cli import jobs
    from wfilter.evaluation.bench import bench, format_table

    wf, images = jobs.random_filters(jobs.Job(model, num_classes=num_classes, size=size),
                                     batch_size, device)  # fmt: skip
    rows = bench(
        wf, images, name=model, labels=labels, rounds=rounds, compiled=compiled, rivals=rivals
    )
    Output(quiet, as_json).result(format_table(rows), [asdict(row) for row in rows])
