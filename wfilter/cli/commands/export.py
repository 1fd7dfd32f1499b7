"""``wfilter export``: write the filtered model as a graph."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from wfilter.cli.app import command
from wfilter.cli.options import FiltersAt, Network, Talk


@command(epilog="Example: wfilter export wfilter-demo/cnn-digits --out model.onnx")
def export(
    *,
    filters: FiltersAt,
    out: Annotated[Path, typer.Option(help="A file ending in .pt2 or .onnx.")],
    forget: Annotated[
        str, typer.Option(help="What the graph takes: 'labels' or 'sets'.")
    ] = "labels",
    baked: Annotated[
        list[str] | None, typer.Option("--bake", help="Export the model baked for these classes.")
    ] = None,
    aoti: Annotated[
        bool, typer.Option("--aoti", help="Machine code for this kind of processor, in a .pt2.")
    ] = False,
    network: Network,
    talk: Talk,
) -> None:
    """Write the filtered model as one graph with images and forget as inputs."""
    from wfilter.cli import jobs
    from wfilter.files.export import export

    opened = jobs.open_filters(filters, **vars(network))
    model = opened.wf.bake(jobs.parse_classes(opened.wf, baked)) if baked else opened.wf
    with jobs.naming_size(opened.job, network.size):
        written = export(model, out, forget=forget, example_input=opened.example, aoti=aoti)
    talk.output.result(str(written), asdict(written))
