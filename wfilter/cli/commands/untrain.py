"""``wfilter untrain``: learn filters."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from wfilter.cli.app import command
from wfilter.cli.options import (
    MODEL,
    NOT_MET,
    Classes,
    Device,
    Exclude,
    Granularity,
    Images,
    Output,
    Pretrained,
    Size,
    Talk,
    Targets,
    Weights,
)


@command(
    epilog="Example: wfilter untrain wfilter:resnet18-cifar --weights data --dataset cifar10 "
    "--steps 300 --out run. The settings are printed and kept in run/settings.toml: the same run "
    "again is wfilter untrain --config run/settings.toml --out again."
)
def untrain(
    *,
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL, show_default=False)] = "",
    images: Images,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("wfilter-run"),
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    recipe: Annotated[
        str,
        typer.Option(
            help="auto (looks, and says what it reached), distill, distill-soft (small models), "
            "linear (many classes), paper or paper-vit."
        ),
    ] = "auto",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting of the recipe: KEY=VALUE; repeat."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps in all.")] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the training images.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a step.")] = 64,
    shift: Annotated[
        int, typer.Option(min=0, help="Move every other image by up to so many pixels.")
    ] = 0,
    validation: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share held out to stop early.")
    ] = 0.1,
    targets: Targets = None,
    exclude: Exclude = None,
    granularity: Granularity = "out",
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    amp: Annotated[bool, typer.Option(help="Run forwards in bfloat16.")] = False,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted run.")] = False,
    strict: Annotated[
        bool, typer.Option(help="Exit with code 3 unless every row met the bar (recipe auto).")
    ] = False,
    size: Size = None,
    device: Device = None,
    talk: Talk,
) -> None:
    """Teach a model's filters to forget every class of a dataset, in one round.

    Works under torchrun: torchrun --nproc-per-node 2 -m wfilter untrain ...
    """
    from wfilter.cli import jobs, settings, untraining
    from wfilter.untraining.history import Ended

    changed = {**context.meta.get("recipe", {}), **settings.parse_changes(changes or ())}
    changed.pop("name", None)
    job = jobs.Job(model, weights, pretrained, num_classes, size=size, **vars(images))
    run = untraining.Untraining(
        job=job,
        recipe=settings.make_recipe(recipe, changed),
        out=out,
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        shift=shift,
        validation=validation,
        targets=tuple(targets or ()),
        exclude=tuple(exclude or ()),
        granularity=granularity,
        seed=seed,
        amp=amp,
    )
    with untraining.processes(device) as (rank, place):
        output = Output(talk.quiet or rank > 0, talk.as_json and rank == 0)
        output.note(run.to_toml())
        history = run.run(place, rank, resume=resume, progress=output.progress)
    last = asdict(history.records[-1]) if history.records else {}
    text = f"{history.stopped} in {history.seconds:.0f} s. Next: wfilter evaluate {out}"
    if history.verdict:
        text = f"{history.verdict}\n{text}"
    summary = {"out": str(out), "stopped": history.stopped, "last": last}
    output.result(text, {**summary, "ended": history.ended.value, "verdict": history.verdict})
    if history.ended is Ended.INTERRUPTED:
        raise KeyboardInterrupt
    if strict and history.ended is not Ended.MET:
        raise typer.Exit(NOT_MET)
