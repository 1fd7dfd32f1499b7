"""The command line: each command a thin layer over the library's functions."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from wfilter.cli.options import (
    MODEL,
    NOT_MET,
    Classes,
    Config,
    Data,
    Dataset,
    Debug,
    Device,
    Download,
    Exclude,
    FiltersAt,
    Granularity,
    Json,
    Model,
    OldClasses,
    Output,
    Pretrained,
    Quiet,
    SameModel,
    Size,
    Targets,
    Weights,
)

app = typer.Typer(
    name="wfilter",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Filters that make an image classifier forget any class, chosen at run time.",
    epilog="Start with: wfilter demo",
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
    facts = [asdict(row) for row in rows]
    Output(quiet, as_json).result(str(rows), {"model": model, "targets": facts})


@app.command(
    epilog="Example: wfilter untrain wfilter:resnet18-cifar --weights data --dataset cifar10 "
    "--steps 300 --out run. The settings are printed and kept in run/settings.toml: the same run "
    "again is wfilter untrain --config run/settings.toml --out again."
)
def untrain(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL, show_default=False)] = "",
    dataset: Dataset = None,
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
    data: Data = None,
    size: Size = None,
    download: Download = False,
    device: Device = None,
    config: Config = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Teach a model's filters to forget every class of a dataset, in one round.

    Works under torchrun: torchrun --nproc-per-node 2 -m wfilter untrain ...
    """
    from wfilter.cli import jobs, settings
    from wfilter.untraining.history import Ended

    changed = {**context.meta.get("recipe", {}), **settings.parse_changes(changes or ())}
    changed.pop("name", None)
    job = jobs.Job(model, weights, pretrained, num_classes, dataset, data, size, download)
    plan = jobs.Untraining(
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
    with jobs.processes(device) as (rank, place):
        output = Output(quiet or rank > 0, as_json and rank == 0)
        output.note(plan.to_toml())
        history = plan.run(place, rank, resume=resume, progress=output.progress)
    last = asdict(history.records[-1]) if history.records else {}
    text = f"{history.stopped} in {history.seconds:.0f} s. Next: wfilter evaluate {out}"
    if history.verdict:
        text = f"{history.verdict}\n{text}"
    facts = {"out": str(out), "stopped": history.stopped, "last": last}
    output.result(text, {**facts, "ended": history.ended.value, "verdict": history.verdict})
    if history.ended is Ended.INTERRUPTED:
        raise KeyboardInterrupt
    if strict and history.ended is not Ended.MET:
        raise typer.Exit(NOT_MET)


@app.command(epilog="Example: wfilter evaluate wfilter-demo/cnn-digits --rivals logit_mask")
def evaluate(
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
    model: SameModel = None,
    weights: Weights = None,
    pretrained: Pretrained = False,
    dataset: Dataset = None,
    data: Data = None,
    size: Size = None,
    download: Download = False,
    device: Device = None,
    config: Config = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Measure what was forgotten and what was kept, on the test images."""
    from wfilter import Report
    from wfilter.cli import jobs
    from wfilter.evaluation.run import CHEAP, evaluate
    from wfilter.files.card import put_figures

    earlier = None if against is None else Report.from_json(against)
    if out is not None:
        jobs.check_report_path(out)
    names = (model, weights, pretrained, None, dataset, data, size, download)
    opened = jobs.open_filters(filters, *names)
    wanted: Any = "all" if metrics == ["all"] else metrics or CHEAP
    cheap = set(wanted) <= {*CHEAP, "sets", "curves"} and not rivals
    wf = opened.wf.to(device) if device else opened.wf
    images = opened.job.images("test")
    words = classes or rows
    chosen = tuple(sorted(jobs.parse_classes(wf, words)) if words else range(wf.num_classes))
    if earlier is not None:
        earlier.refuse_other_classes(chosen, wf.class_names or images.class_names)
    report = evaluate(
        wf,
        images,
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
    facts = json.loads(report.to_json())
    output = Output(quiet, as_json)
    if earlier is None:
        output.result(report, facts)
    else:
        compared = report.against(earlier)
        output.note(str(report))
        lines = [asdict(line) for line in compared.lines]
        output.result(f"\nAgainst {against}:\n{compared}", {**facts, "against": lines})


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
    images: Annotated[int | None, typer.Option(min=1, help="Test images to probe.")] = None,
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
    found = auditing.run(model, job, classes or (), original, retrained, images)
    if out is not None:
        auditing.FORMS[out.suffix](found, out)
    Output(quiet, as_json).result(str(found), json.loads(found.to_json()))


@app.command(epilog="Example: wfilter explain wfilter-demo/cnn-digits --out page.html")
def explain(
    filters: FiltersAt,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("page.html"),
    classes: Annotated[
        list[str] | None, typer.Option(help="Only panels of these, by name or index; repeat.")
    ] = None,
    rows: OldClasses = None,
    layers: Annotated[
        list[str] | None,
        typer.Option("--layer", help="A layer to draw; repeat. By default first, middle and last."),
    ] = None,
    per_class: Annotated[int, typer.Option(min=1, help="Images of each class to look at.")] = 50,
    model: SameModel = None,
    weights: Weights = None,
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
    """Write one HTML page: which units make a class, and what happens without them."""
    from wfilter.cli import jobs
    from wfilter.page import write_page

    jobs.check_writable(out)
    words = classes or rows
    names = (model, weights, pretrained, None, dataset, data, size, download)
    opened = jobs.open_filters(filters, *names)
    path = write_page(
        opened.wf,
        opened.job.images("test"),
        out,
        title=f"What {opened.job.model} forgets, and with which units",
        facts=opened.facts,
        history=opened.history,
        classes=sorted(jobs.parse_classes(opened.wf, words)) if words else None,
        layers=layers or None,
        per_class=per_class,
    )
    Output(quiet, as_json).result(f"{path} written: open it in a browser.", {"path": str(path)})


@app.command(
    epilog="Example: wfilter bake wfilter-demo/cnn-digits --forget 3,5 --out no35.safetensors"
)
def bake(
    filters: FiltersAt,
    forget: Annotated[list[str], typer.Option(help="Classes, by name or index.")],
    out: Annotated[Path, typer.Option(help="A file: .safetensors, .pt2 or .onnx.")],
    snap: Annotated[
        float, typer.Option(help="Make gates below this exactly 0, above 1 - this exactly 1.")
    ] = 0.0,
    prune: Annotated[
        bool, typer.Option("--prune", help="Take out the channels that closed gates silenced.")
    ] = False,
    model: SameModel = None,
    weights: Weights = None,
    pretrained: Pretrained = False,
    size: Size = None,
    config: Config = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fold the gates of some classes into the weights: a plain model that needs no wfilter."""
    from wfilter.cli import baking, jobs

    opened = jobs.open_filters(filters, model, weights, pretrained, size=size)
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
    Output(quiet, as_json).result(str(baked), asdict(baked))


@app.command(epilog="Example: wfilter export wfilter-demo/cnn-digits --out model.onnx")
def export(
    filters: FiltersAt,
    out: Annotated[Path, typer.Option(help="A file ending in .pt2 or .onnx.")],
    forget: Annotated[
        str, typer.Option(help="What the graph takes: 'labels' or 'sets'.")
    ] = "labels",
    baked: Annotated[
        list[str] | None, typer.Option("--bake", help="Export the model baked for these classes.")
    ] = None,
    model: SameModel = None,
    weights: Weights = None,
    pretrained: Pretrained = False,
    size: Size = None,
    config: Config = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the filtered model as one graph with images and forget as inputs."""
    from wfilter.cli import jobs
    from wfilter.files.export import export

    opened = jobs.open_filters(filters, model, weights, pretrained, size=size)
    network = opened.wf.bake(jobs.parse_classes(opened.wf, baked)) if baked else opened.wf
    with jobs.naming_size(opened.job, size):
        written = export(network, out, forget=forget, example_input=opened.example)
    Output(quiet, as_json).result(str(written), asdict(written))


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
    given = serving.Given(filters, policy, playground, engine, replicas, batch_size, batch_wait,
                          audit, audit_failure, model, weights, size)  # fmt: skip
    output = Output(quiet, as_json)
    with serving.served(given, host, port) as facts:
        output.result(serving.greeting(facts), facts)
        serving.wait()
    output.note("stopped.")


@app.command(epilog="Example: wfilter token --tenant museum")
def token(
    tenant: Annotated[str, typer.Option(help="For whom, in the lines to paste.")] = "NAME",
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a token for a tenant of wfilter serve, and the hashed line for the policy."""
    from wfilter.serve.tokens import new_token

    secret, line = new_token()
    text = (
        f"Give this token to its holder; it is kept nowhere:\n  {secret}\n\n"
        f'Put this into the policy:\n  [tenants.{tenant}]\n  forget = []\n  tokens = ["{line}"]'
    )
    Output(quiet, as_json).result(text, {"token": secret, "line": line})


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
        steps=show.STEPS if steps is None else steps,
        pages=pages,
        say=output.note,
        progress=output.progress,
    )
    facts = [outcome.to_dict() for outcome in outcomes]
    output.result(show.farewell(out, outcomes, pages), facts)


def main() -> None:
    """The ``wfilter`` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; its exit code: 0 done, 1 it could not be done, 2 it was called wrongly.

    Example:
        >>> run(["plan", "wfilter:cnn-digits", "--quiet"])
        0
    """
    if "--debug" in arguments:
        return _call(arguments)
    try:
        return _call(arguments)
    except KeyboardInterrupt:
        return _complain("interrupted.", 130)
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own, whichever click it carries
            return _complain_of_usage(error)
        return _complain(_one_line(error), 1)


def _call(arguments: list[str]) -> int:
    command: Callable[..., Any] = typer.main.get_command(app)
    code = command(args=arguments, prog_name="wfilter", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _complain_of_usage(error: Any) -> int:
    """What was typed wrongly and whose help has the words; without any words, the help itself."""
    command = error.ctx.command_path if error.ctx else "wfilter"
    if type(error).__name__ == "NoArgsIsHelpError":
        return 2  # the help has been printed
    return _complain(f"{error.format_message().rstrip('.')}. Try {command} --help.", 2)


def _complain(message: str, code: int) -> int:
    print(f"wfilter: {message}", file=sys.stderr)
    return code


def _one_line(error: Exception) -> str:
    """The message without line breaks; errors that nobody foresaw are named and said to be ours."""
    if isinstance(error, OSError) and error.strerror:
        if error.filename is None:
            return f"{error.strerror.rstrip('.')}."
        return f"{error.filename}: {error.strerror}. Check the path and its permissions."
    text = re.sub(r"([^.:;,\s])\n(?=[A-Z])", r"\1. ", str(error))  # a new line, a new sentence
    text = re.sub(r"([^.:;,\s])\n(?= )", r"\1; ", text)  # or an entry of a list
    text = " ".join(text.split()) or type(error).__name__
    foreseen = (ValueError, TypeError, RuntimeError, OSError, ArithmeticError)
    if isinstance(error, foreseen):
        return text
    return f"{type(error).__name__}: {text}. Run again with --debug to see where."
