"""``wfilter bake``: fold some rows into plain weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from wfilter.cli.app import command
from wfilter.cli.options import FiltersAt, Network, Talk


@command(epilog="Example: wfilter bake wfilter-demo/cnn-digits --forget 3,5 --out no35.safetensors")
def bake(
    *,
    filters: FiltersAt,
    forget: Annotated[list[str], typer.Option(help="Classes, by name or index.")],
    out: Annotated[Path, typer.Option(help="A file: .safetensors, .pt2 or .onnx.")],
    snap: Annotated[
        float, typer.Option(help="Make gates below this exactly 0, above 1 - this exactly 1.")
    ] = 0.0,
    prune: Annotated[
        bool, typer.Option("--prune", help="Take out the channels that closed gates silenced.")
    ] = False,
    network: Network,
    talk: Talk,
) -> None:
    """Fold the gates of some classes into the weights: a plain model that needs no wfilter."""
    from wfilter.cli import baking, jobs

    opened = jobs.open_filters(filters, **vars(network))
    classes = jobs.parse_classes(opened.wf, forget)
    needs_images = prune or out.suffix != ".safetensors"
    baked = baking.bake(
        opened.wf,
        classes,
        out,
        snap,
        pruned=prune,
        architecture=opened.job.model,
        example_input=opened.example if needs_images else None,
    )
    talk.output.result(str(baked), asdict(baked))
