"""``wfilter plan``: show what would be filtered."""

from __future__ import annotations

from dataclasses import asdict

from wfilter.cli.app import app
from wfilter.cli.options import (
    Classes,
    Debug,
    Exclude,
    Granularity,
    Json,
    Model,
    Output,
    Quiet,
    Targets,
)


@app.command(epilog="Example: wfilter plan timm:vit_tiny_patch16_224 --exclude 'blocks.0.*'")
def plan(
    model: Model,
    targets: Targets = None,
    exclude: Exclude = None,
    granularity: Granularity = "out",
    num_classes: Classes = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show which parameters of a model would be filtered, and how. Changes nothing."""
    from wfilter import find_targets
    from wfilter.data import zoo

    network = zoo.build(model, num_classes=num_classes)
    rows = find_targets(network, targets or "auto", exclude or (), granularity=granularity)
    listed = [asdict(row) for row in rows]
    Output(quiet, as_json).result(str(rows), {"model": model, "targets": listed})
