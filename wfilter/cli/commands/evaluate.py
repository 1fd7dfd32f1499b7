"""``wfilter evaluate``: measure filters."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from wfilter.cli.app import command
from wfilter.cli.options import Device, FiltersAt, Images, Network, OldClasses, Talk


@command(epilog="Example: wfilter evaluate wfilter-demo/cnn-digits --rivals logit_mask")
def evaluate(
    *,
    filters: FiltersAt,
    metrics: Annotated[
        list[str] | None,
        typer.Option(help="accuracy, sets, zrf, probe, membership, relearn, few_shot, curves, "
                     "cost or all; repeat. By default the cheap ones."),
    ] = None,
    classes: Annotated[
        list[str] | None, typer.Option(help="Only these, by name or index; repeat.")
    ] = None,
    rows: OldClasses = None,
    rivals: Annotated[
        list[str] | None, typer.Option(help="Baselines to run beside it: logit_mask, ...; repeat.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write .json, .md or .tex.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Compare with a report kept earlier by --out FILE.json.")
    ] = None,
    card: Annotated[bool, typer.Option(help="Put the table into the model card.")] = False,
    network: Network,
    images: Images,
    device: Device = None,
    talk: Talk,
) -> None:  # fmt: skip
    """Measure what was forgotten and what was kept, on the test images."""
    from wfilter import Report
    from wfilter.cli import jobs
    from wfilter.evaluation.run import CHEAP, evaluate
    from wfilter.files.card import put_figures

    earlier = None if against is None else Report.from_json(against)
    if out is not None:
        jobs.check_report_path(out)
    opened = jobs.open_filters(filters, **vars(network), **vars(images))
    wanted: Any = "all" if metrics == ["all"] else metrics or CHEAP
    cheap = set(wanted) <= {*CHEAP, "sets", "curves"} and not rivals
    wf = opened.wf.to(device) if device else opened.wf
    test = opened.job.images("test")
    words = classes or rows
    chosen = tuple(sorted(jobs.parse_classes(wf, words)) if words else range(wf.num_classes))
    if earlier is not None:
        earlier.refuse_other_classes(chosen, wf.class_names or test.class_names)
    report = evaluate(
        wf,
        test,
        metrics=wanted,
        classes=chosen,
        train=None if cheap else opened.job.images("train"),
        rivals=rivals or (),
        seconds=opened.history.seconds if opened.history else None,
    )
    if out is not None:
        jobs.write_report(report, out)
    if card:
        put_figures(opened.path.parent, report.to_markdown())
    values = json.loads(report.to_json())
    output = talk.output
    if earlier is None:
        output.result(report, values)
    else:
        compared = report.against(earlier)
        output.note(str(report))
        lines = [asdict(line) for line in compared.lines]
        output.result(f"\nAgainst {against}:\n{compared}", {**values, "against": lines})
