"""The paper's tables: its numbers and ours side by side, every cell of ours from a stored line.

    python benchmarks/paper --dataset cifar10 --backbone resnet18     # by the default recipe
    python benchmarks/paper --dataset cifar10 --backbone resnet18 --method distill --seed 0
    python benchmarks/paper --dataset mnist --backbone vit_tiny --method retrained --rows 0 3 8
    python benchmarks/paper --dataset imagenet --backbone vit_tiny --method distill
    python benchmarks/paper --tables     # rebuild table1.md, table2.md and the pages' tables

``--method auto`` is the library's default recipe, with no setting for any backbone: it decides how
long, so ``--steps`` is not for it, and where it ends with feature rows there are no gates to draw
curves of. Its verdict is in the line's options.

A run measures one method on one backbone and appends a JSON line with its command, seed, commit and
environment to ``results/paper.jsonl``; one that is there already is not run again (``--again``
does, and of two lines the later counts), and an interrupted untraining goes on from its checkpoint.
``--quick`` tries the whole way in a minute or two. ``--bfloat16`` untrains and trains rivals in
half precision, and measures in float32.

CIFAR-10 and ImageNet originals come with the data (WFILTER_DATA); others are trained first by
``benchmarks/references.py`` and found in its folder or ``--originals``, and so are the retrained
models: one for each class, by ``references.py --without CLASS``. All seeds of a method start from
the original of seed 0, unless one was trained with their own. Rivals forget
the classes in ``--rows`` one at a time. Relearning is what costs most: ``--relearn-rows 0 3 8``
measures it on some of the rows, ``--relearn-epochs`` is the cap.

Of the ImageNet originals only ViT-T's weights are among the data. The way of the others is tried
with random weights, and taken with the file ``model.safetensors`` of the checkpoint that ``TIMM``
names, from the Hugging Face hub:

    python benchmarks/paper --dataset imagenet --backbone resnet50 --random-weights --quick
    python benchmarks/paper --dataset imagenet --backbone resnet50 --weights model.safetensors

and likewise for vgg16, resnet18, resnet101 and vit_small, and for ``--method paper``.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import wfilter
from common import RESULTS, add_set, append_line, changed, commit, read_lines, told_command
from paper.numbers import BACKBONES, DATASETS, FILTERED, METHODS
from paper.runs import key_of, original_of, read_latest, read_runs
from paper.tables import table1, table2, with_tables
from references import folder, stem_name
from wfilter import baselines, data, zoo
from wfilter.evaluation.bench import environment
from wfilter.evaluation.run import make_problem, report_on
from wfilter.files.checkpoint import fingerprint
from wfilter.metrics import Budget, Method

PAGES = [RESULTS.parents[1] / name for name in ("README.md", "docs/results.md")]
TIMM = {
    "vgg16": "vgg16.tv_in1k",
    "resnet18": "resnet18.tv_in1k",
    "resnet50": "resnet50.tv_in1k",
    "resnet101": "resnet101.tv_in1k",
    "vit_tiny": "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "vit_small": "vit_small_patch16_224.augreg_in21k_ft_in1k",
}

# Random labels at the baseline's own rate of 0.01 ruin a ViT: two epochs of 2,000 images of MNIST
# leave a ViT-T an Acc_r of 11 %, at 0.003 and 0.001 of 83 % (75 % before), Acc_f 0 at all three.
VIT_RATE = 0.001
# On a ViT exact gates on the deepest quarter of the projections do not reach a class: on MNIST 95 %
# of it stay known. Soft gates on all of them do.
VIT_RECIPES = {"paper": "paper-vit", "distill": "distill-soft"}
VALIDATION = 0.025  # share of the training images held out where a recipe stops early


def main() -> None:
    args = parse_arguments()
    if not args.tables:
        done = {key_of(line) for line in read_latest(args.out)}
        key = (args.dataset, args.backbone, args.method, args.seed)
        if key in done and not (args.quick or args.again):
            print(f"{' '.join(map(str, key))}: measured already; its line is in {args.out}.")
        else:
            add_line(None if args.quick else args.out, measure(args))
    if not args.quick:
        runs = read_runs(args.out)
        (args.out.parent / "table1.md").write_text(table1(runs))
        (args.out.parent / "table2.md").write_text(table2(runs))
        if args.tables and args.out.parent == RESULTS:
            for page in PAGES:
                page.write_text(with_tables(page.read_text(), runs))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", choices=DATASETS, default="cifar10")
    parser.add_argument("--backbone", choices=BACKBONES, default="resnet18")
    parser.add_argument("--method", choices=METHODS, default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, nargs="+", help="classes; default all")
    parser.add_argument("--filters", type=Path, help="finished filters instead of untraining")
    parser.add_argument("--steps", type=int, help="of untraining; 500, and as auto decides")
    add_set(parser)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--train-images", type=int, default=20_000)
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--few-images", type=int, default=1000, help="for ZRF, relearning, curves")
    parser.add_argument("--relearn-epochs", type=int, default=100, help="the cap; 0 leaves it out")
    parser.add_argument("--relearn-rows", type=int, nargs="+", help="default: all of --rows")
    parser.add_argument("--rival-images", type=int, help="default: all of --train-images")
    parser.add_argument("--rival-batch-size", type=int, default=64)
    parser.add_argument("--rival-epochs", type=int, help="default: the baseline's own")
    parser.add_argument("--rival-lr", type=float, help="default: the baseline's own (see VIT_RATE)")
    parser.add_argument("--rival-retain", type=float, help="retain_weight of negative gradients")
    parser.add_argument("--bfloat16", action="store_true", help="untrain and train rivals in it")
    parser.add_argument("--root", type=Path, help="data folder (default: WFILTER_DATA)")
    parser.add_argument("--originals", type=Path, default=folder(), help="of trained networks")
    parser.add_argument("--random-weights", action="store_true", help="to try a path without them")
    parser.add_argument("--weights", type=Path, help="safetensors file of an ImageNet original")
    parser.add_argument("--keep", type=Path, default=Path("runs"), help="checkpoints and filters")
    parser.add_argument("--out", type=Path, default=RESULTS / "paper.jsonl")
    parser.add_argument("--again", action="store_true", help="also what has been measured")
    parser.add_argument("--quick", action="store_true", help="tiny numbers; stores nothing")
    parser.add_argument("--tables", action="store_true", help="only rebuild the tables")
    args = parser.parse_args()
    if args.quick:
        shrink(args)
    elif args.steps is None and args.method != "auto":
        args.steps = 500
    refuse_contradictions(parser, args)
    return args


def shrink(args: argparse.Namespace) -> None:
    """In place: the smallest numbers with which every path still runs."""
    images = 8 if args.dataset == "imagenet" else 40
    args.steps, args.batch_size, args.train_images, args.test_images = 2, 4, images, images
    args.few_images, args.relearn_epochs = images // 2, 1
    args.rows, args.rival_epochs = args.rows or args.relearn_rows or [3], 1


def refuse_contradictions(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.weights and args.dataset != "imagenet":
        parser.error("--weights is for --dataset imagenet; others come from --originals")
    if args.random_weights and not args.quick:
        parser.error("--random-weights only tries the path: add --quick")
    if args.bfloat16 and (args.filters or args.method in ("original", "retrained")):
        parser.error("--bfloat16 is for what is untrained or trained here; this is only measured")
    stray = set(args.relearn_rows or ()) - set(args.rows or args.relearn_rows or ())
    if stray:
        parser.error(f"--relearn-rows has {sorted(stray)}, which --rows has not")


# ---- one method on one backbone -----------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make what the method makes, and measure it."""
    code = commit()  # now: by the end of the run the repository may have moved on
    torch.manual_seed(args.seed)
    model, inputs = original(args)
    base = fingerprint(model)[:16]
    own = refuse_another_original(args, base)
    train, test = (
        data.load(args.dataset, split, args.root, **inputs) for split in ("train", "test")
    )
    needed = args.rows if args.quick else []  # a few images have few of ImageNet's classes
    train = shuffled(train, args.train_images, args.seed, needed)
    test = shuffled(test, args.test_images, 0, needed)
    few = args.few_images
    budget = Budget(test_images=few, train_images=few, relearn_epochs=args.relearn_epochs or 1)
    problem = make_problem(
        model, test, classes=args.rows or range(train.num_classes), train=train, original=model,
        budget=budget, seed=args.seed,
    )  # fmt: skip
    began = time.process_time()
    method, options = make_method(args, model, train, problem.classes)
    spent = time.process_time() - began
    names = ["accuracy", "zrf"] + (["curves"] if args.method in FILTERED else [])
    parts = [report_on(method, problem, names)]
    if args.relearn_epochs:
        some = dataclasses.replace(method, classes=tuple(args.relearn_rows or method.classes))
        parts.append(report_on(some, problem, ["relearn"]))
    before = {"original": 100 * test_accuracy(model, test)} if own else {}
    return before | {
        "dataset": args.dataset,
        "backbone": args.backbone,
        "method": args.method,
        "seed": args.seed,
        "rows": list(problem.classes),
        "options": options,
        "report": json.loads(wfilter.Report.join(parts).to_json()),
        "cpu_seconds": None if "files" in options else round(spent, 1),
        "command": told_command(),
        "base": base,
        "commit": code,
        **environment(),
    }


@torch.inference_mode()
def test_accuracy(model: nn.Module, test: data.ImageSet) -> float:
    logits = torch.cat([model(images) for images, _ in data.batches(test, 100)])
    return wfilter.metrics.accuracy(logits, test.labels)


def refuse_another_original(args: argparse.Namespace, base: str) -> bool:
    """Whether a line starts from other weights than the table's original.

    The default's may, and tell the accuracy; others would be left out of the table.
    """
    lines = {key_of(line): line for line in read_lines(args.out)}
    known = original_of((args.dataset, args.backbone, args.method, args.seed), lines)
    another = known.get("base", base) != base
    if another and args.method not in ("original", "auto") and not args.quick:
        raise SystemExit(
            f"The {args.backbone} of {args.originals} is not the one whose accuracy is in "
            f"{args.out}.\nMeasure it first: --method original --again, and then all methods again."
        )
    return another and args.method == "auto"


def original(args: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """The backbone with its weights, and what its images look like."""
    if args.dataset == "imagenet":
        spec = f"timm:{TIMM[args.backbone]}"
        weights = args.weights
        if weights is None and not args.random_weights:
            weights = zoo.weights_path(spec.split(".")[0], args.root)
        return zoo.build(spec, weights=weights), vars(zoo.input_format(spec))
    name = zoo_name(args)
    stems = (stem_name(name, seed) for seed in (args.seed, 0))
    files = [args.originals / f"{stem}.safetensors" for stem in stems]
    trained = next((file for file in files if file.exists()), None)
    weights = None
    if not args.random_weights:
        weights = trained or zoo.weights_path(f"wfilter:{name}", args.root)
    return built(name, weights), vars(zoo.input_format(f"wfilter:{name}"))


def zoo_name(args: argparse.Namespace) -> str:
    return f"{args.backbone}-{args.dataset.removesuffix('10')}"


def built(name: str, weights: Path | None) -> nn.Module:
    model = zoo.build(f"wfilter:{name}", weights=weights)
    return model.to(memory_format=torch.channels_last)


def shuffled(
    images: data.ImageSet, count: int, seed: int, needed: Sequence[int] = ()
) -> data.ImageSet:
    """Random images, a quarter of them of the classes needed where there are so many."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    first = torch.isin(images.labels[order], torch.tensor(needed, dtype=torch.long))
    order = torch.cat([order[first][: count // 4], order[~first], order[first][count // 4 :]])
    return images.take(order[:count].sort().values)


def make_method(
    args: argparse.Namespace, model: nn.Module, train: data.ImageSet, rows: tuple[int, ...]
) -> tuple[Method, dict[str, Any]]:
    """The method under test, and the settings it was made with."""
    if args.method == "original":
        return Method.of_one("original", model, rows), {}
    if args.method in FILTERED:
        told = ("steps", "batch_size", "train_images", "set", "bfloat16")
        options = {"files": [args.filters.name]} if args.filters else pick(args, told)
        wf, verdict = filtered(args, model, train)
        options |= {"recipe": recipe_of(args).name} | ({"verdict": verdict} if verdict else {})
        return Method.of_filtered(wf, rows), options
    if args.method == "retrained":
        models, files = retrained(args, rows)
        return Method.of_models("retrained", models), {"files": files}
    images = shuffled(train, args.rival_images or len(train), args.seed)
    batches = data.batches(images, args.rival_batch_size, shuffle=True, seed=args.seed)
    method = baselines.METHODS[args.method]
    settings = {"epochs": args.rival_epochs, "lr": args.rival_lr}
    if args.method == "negative_gradients":
        settings["retain_weight"] = args.rival_retain
    if "vit" in args.backbone and args.method == "random_labels":
        settings["lr"] = args.rival_lr or VIT_RATE
    for name, value in settings.items():
        if value is None:
            settings[name] = inspect.signature(method).parameters[name].default
    # Weights change inside: cached copies of them would be stale after the first step.
    with torch.autocast("cpu", torch.bfloat16, args.bfloat16, cache_enabled=False):
        models = {row: method(model, row, batches, seed=args.seed, **settings) for row in rows}
    told = {"images": len(images), "batch_size": args.rival_batch_size, **settings}
    told |= {"bfloat16": args.bfloat16}
    return Method.of_models(args.method, models), told


def retrained(
    args: argparse.Namespace, rows: tuple[int, ...]
) -> tuple[dict[int, nn.Module], list[str]]:
    """For each row a model that never saw the class, and the files they come from."""
    if args.dataset == "imagenet":
        raise SystemExit("retrained models are made for mnist and cifar10 only, as in the paper.")
    name = zoo_name(args)
    paths = {row: args.originals / f"{stem_name(name, args.seed, row)}.safetensors" for row in rows}
    if args.random_weights:
        return {row: built(name, None) for row in rows}, []
    commands = [training_command(args, name, row) for row, p in paths.items() if not p.exists()]
    if commands:
        raise SystemExit("retrained models are lacking. Make them first:\n" + "\n".join(commands))
    models = {row: built(name, path) for row, path in paths.items()}
    return models, [path.name for path in paths.values()]


def training_command(args: argparse.Namespace, name: str, row: int) -> str:
    """What trained the original from the beginning, without the class; else the defaults."""
    seen = name.split("-")[1]  # a start of that name has seen the class
    for line in reversed(read_lines(args.originals / "references.jsonl")):
        told = line["settings"]
        whole = told.get("without") in (None, []) and told.get("limit") is None
        begins = seen not in (told.get("start") or "")
        if whole and begins and (told["model"], told["seed"]) == (name, args.seed):
            command = line["command"].partition(" --each")[0]
            return f"{command} --out {args.originals} --without {row}"
    augment = " --pad 4 --flip" if args.dataset == "cifar10" else ""
    return (
        f"python benchmarks/references.py --model {name} --data {args.dataset}{augment} "
        f"--seed {args.seed} --out {args.originals} --without {row}"
    )


def pick(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def filtered(
    args: argparse.Namespace, model: nn.Module, train: data.ImageSet
) -> tuple[wfilter.FilteredModel, str]:
    """Untrained here, or read from a file; and what the untraining said of itself."""
    if args.filters is not None:
        return wfilter.load(args.filters, model), ""
    wf = wfilter.apply_weight_filtering(model, class_names=train.class_names)
    recipe = recipe_of(args)
    args.keep.mkdir(parents=True, exist_ok=True)
    size = "-".join([f"{args.steps}x{args.batch_size}of{args.train_images}", *args.set])
    size += "-bfloat16" * args.bfloat16
    keep = args.keep / f"{args.dataset}-{args.backbone}-{recipe.name}-{size}-{args.seed}"
    val = None
    if getattr(
        recipe, "patience", 0
    ):  # the paper stops early, by images of its test set; ours by training images
        train, held_out = data.hold_out(train, VALIDATION)
        val = data.batches(held_out, args.batch_size)
    batches = data.batches(train, args.batch_size, shuffle=True, seed=args.seed)
    checkpoint = {} if args.quick else {"checkpoint": f"{keep}.checkpoint", "resume": True}
    options = {"recipe": recipe, "steps": args.steps, "seed": args.seed, "amp": args.bfloat16}
    history = wfilter.untrain(wf, batches, val, **options, **checkpoint)
    if not args.quick:
        wf.save(f"{keep}.safetensors")
    return wf, history.verdict


def recipe_of(args: argparse.Namespace) -> wfilter.Recipe:
    """The method's recipe for the backbone, with the settings given."""
    name = VIT_RECIPES.get(args.method, args.method) if "vit" in args.backbone else args.method
    return changed(name, args.set)


def add_line(path: Path | None, line: dict[str, Any]) -> None:
    print(json.dumps({k: v for k, v in line.items() if k != "report"}))
    report = wfilter.Report.from_json(json.dumps(line["report"]))
    print(report.to_markdown())
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, line)


if __name__ == "__main__":
    main()
