"""``wfilter serve``: answer requests of many customers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wfilter.cli.app import app
from wfilter.cli.options import (
    Config,
    Debug,
    FiltersAt,
    Json,
    Output,
    Quiet,
    SameModel,
    Size,
    Weights,
)


@app.command(
    epilog="Example: wfilter serve wfilter-demo/cnn-digits --policy policy.toml, or --playground "
    "instead of a policy to try it out in a browser. Needs pip install 'wfilter[serve]'."
)
def serve(
    filters: FiltersAt,
    policy: Annotated[
        Path | None, typer.Option(help="Who may ask and what each forgets, as TOML.")
    ] = None,
    playground: Annotated[
        bool, typer.Option(help="A live page on this machine instead of tenants.")
    ] = False,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="For Prometheus, on loopback.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="eager, compiled, or a .onnx or .pt2 file exported with sets.")
    ] = "eager",
    replicas: Annotated[int, typer.Option(min=1, help="Processes, each with a model.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Most requests in a forward.")] = 32,
    batch_wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a batch to fill.")
    ] = 0.005,
    audit: Annotated[Path | None, typer.Option(help="The folder of the audit log.")] = None,
    audit_failure: Annotated[
        str, typer.Option(help="'refuse' or 'serve' what cannot be logged.")
    ] = "refuse",
    model: SameModel = None,
    weights: Weights = None,
    size: Size = None,
    config: Config = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Answer requests of many customers with one model, each without its forbidden classes."""
    try:
        from wfilter.cli import serving
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}. Run: pip install 'wfilter[serve]'") from None
    options = serving.ServeOptions(
        filters, policy, playground, engine, replicas, batch_size, batch_wait,
        audit, audit_failure, model, weights, size,
    )  # fmt: skip
    output = Output(quiet, as_json)
    with serving.served(options, host, port, metrics_port) as place:
        output.result(serving.greeting(place), place)
        serving.wait()
    output.note("stopped.")
