"""The paper's tables: its numbers and ours side by side, every cell of ours from a stored line.

    python benchmarks/paper.py --dataset cifar10 --backbone resnet18 --method distill --seed 0
    python benchmarks/paper.py --dataset mnist --backbone vit_tiny --method retrained --rows 0 3 8
    python benchmarks/paper.py --dataset imagenet --backbone vit_tiny --method distill
    python benchmarks/paper.py --tables        # rebuild results/table1.md and table2.md

A run measures one method on one backbone and appends a JSON line with its command, seed, commit and
environment to ``results/paper.jsonl``; one that is there already is not run again, and an
interrupted untraining goes on from its checkpoint. ``--quick`` tries the whole way in a minute.
CIFAR-10 and ImageNet originals come with the data (WFILTER_DATA); others are trained first by
``benchmarks/originals.py`` and found through ``--originals``. Rivals forget the classes in
``--rows`` one at a time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import wfilter
from paper_numbers import BACKBONES, DATASETS, FILTERED, METHODS
from paper_tables import key_of, read_lines, table1, table2
from wfilter import baselines, data, zoo
from wfilter.bench import environment
from wfilter.columns import Budget
from wfilter.evaluate import make_bench, report_on
from wfilter.subjects import Subject

RESULTS = Path(__file__).parent / "results"
TIMM = {
    "vgg16": "vgg16.tv_in1k",
    "resnet18": "resnet18.tv_in1k",
    "resnet50": "resnet50.tv_in1k",
    "resnet101": "resnet101.tv_in1k",
    "vit_tiny": "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "vit_small": "vit_small_patch16_224.augreg_in21k_ft_in1k",
}


def main() -> None:
    args = parse_arguments()
    if not args.tables:
        done = {key_of(line) for line in read_lines(args.out)}
        key = (args.dataset, args.backbone, args.method, args.seed)
        if key in done and not args.quick:
            print(f"{' '.join(map(str, key))}: measured already; its line is in {args.out}.")
        else:
            add_line(args.out, measure(args))
    if not args.quick:
        lines = read_lines(args.out)
        (args.out.parent / "table1.md").write_text(table1(lines))
        (args.out.parent / "table2.md").write_text(table2(lines))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", choices=DATASETS, default="cifar10")
    parser.add_argument("--backbone", choices=BACKBONES, default="resnet18")
    parser.add_argument("--method", choices=METHODS, default="distill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, nargs="+", help="classes; default all")
    parser.add_argument("--filters", type=Path, help="finished filters instead of untraining")
    parser.add_argument("--steps", type=int, default=500, help="of untraining")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--train-images", type=int, default=20_000)
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--few-images", type=int, default=1000, help="for ZRF, relearning, curves")
    parser.add_argument("--relearn-epochs", type=int, default=100, help="the cap; 0 leaves it out")
    parser.add_argument("--root", type=Path, help="data folder (default: WFILTER_DATA)")
    parser.add_argument("--originals", type=Path, default=Path("originals"))
    parser.add_argument("--random-weights", action="store_true", help="to try a path without them")
    parser.add_argument("--keep", type=Path, default=Path("runs"), help="checkpoints and filters")
    parser.add_argument("--out", type=Path, default=RESULTS / "paper.jsonl")
    parser.add_argument("--quick", action="store_true", help="tiny numbers; stores nothing")
    parser.add_argument("--tables", action="store_true", help="only rebuild the tables")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.batch_size, args.train_images, args.test_images = 2, 4, 40, 40
        args.few_images, args.relearn_epochs = 20, 1
        args.rows = args.rows or [3]
    return args


# ---- one method on one backbone -----------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make what the method makes, and measure it."""
    torch.manual_seed(args.seed)
    model, facts = original(args)
    train, test = (
        data.load(args.dataset, split, args.root, **facts) for split in ("train", "test")
    )
    train = shuffled(train, args.train_images, args.seed)
    test = shuffled(test, args.test_images, 0)
    few = args.few_images
    budget = Budget(test_images=few, train_images=few, relearn_epochs=args.relearn_epochs or 1)
    bench = make_bench(
        model, test, rows=args.rows or range(train.num_classes), train=train, original=model,
        budget=budget, seed=args.seed,
    )  # fmt: skip
    began = time.process_time()
    subject = make_subject(args, model, train, bench.rows)
    spent = time.process_time() - began
    names = ["accuracy", "zrf"] + (["relearn"] if args.relearn_epochs else [])
    names += ["curves"] if args.method in FILTERED else []
    report = report_on(subject, bench, names)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "dataset": args.dataset,
        "backbone": args.backbone,
        "method": args.method,
        "seed": args.seed,
        "rows": list(bench.rows),
        "report": json.loads(report.to_json()),
        "cpu_seconds": round(spent, 1),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit.stdout.strip(),
        **environment(),
    }


def original(args: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """The backbone with its weights, and what its images look like."""
    if args.dataset == "imagenet":
        spec, facts = f"timm:{TIMM[args.backbone]}", {}
        weights = None if args.random_weights else zoo.weights_path(spec, args.root)
        return zoo.build(spec, weights=weights), facts
    name = f"{args.backbone}-{args.dataset.removesuffix('10')}"
    trained = args.originals / f"{name}-s{args.seed}.safetensors"
    if args.random_weights:
        weights = None
    elif trained.exists():
        weights = trained
    else:
        weights = zoo.weights_path(f"wfilter:{name}", args.root)
    model = zoo.build(f"wfilter:{name}", weights=weights)
    return model.to(memory_format=torch.channels_last), vars(zoo.input_facts(f"wfilter:{name}"))


def shuffled(images: data.ImageSet, count: int, seed: int) -> data.ImageSet:
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images.take(order[:count].sort().values)


def make_subject(
    args: argparse.Namespace, model: nn.Module, train: data.ImageSet, rows: tuple[int, ...]
) -> Subject:
    if args.method == "original":
        return Subject.of_one("original", model, rows)
    if args.method in FILTERED:
        return Subject.of_filtered(filtered(args, model, train), rows)
    batches = data.batches(train, 64, shuffle=True, seed=args.seed)
    options = {args.method: {"seed": args.seed}}
    made = {
        row: baselines.run(model, row, batches, methods=[args.method], options=options)
        for row in rows
    }
    return Subject.of_models(args.method, {row: m[args.method].model for row, m in made.items()})


def filtered(
    args: argparse.Namespace, model: nn.Module, train: data.ImageSet
) -> wfilter.FilteredModel:
    """Untrained here, or read from a file."""
    if args.filters is not None:
        return wfilter.load(args.filters, model)
    wf = wfilter.apply_weight_filtering(model, class_names=train.class_names)
    recipe = "paper-vit" if args.method == "paper" and "vit" in args.backbone else args.method
    args.keep.mkdir(parents=True, exist_ok=True)
    keep = args.keep / f"{args.dataset}-{args.backbone}-{recipe}-{args.seed}"
    batches = data.batches(train, args.batch_size, shuffle=True, seed=args.seed)
    checkpoint = {} if args.quick else {"checkpoint": f"{keep}.checkpoint", "resume": True}
    wfilter.untrain(wf, batches, recipe=recipe, steps=args.steps, seed=args.seed, **checkpoint)
    if not args.quick:
        wf.save(f"{keep}.safetensors")
    return wf


def add_line(path: Path, line: dict[str, Any]) -> None:
    print(json.dumps({k: v for k, v in line.items() if k != "report"}))
    report = wfilter.Report.from_json(json.dumps(line["report"]))
    print(report.to_markdown())
    if "--quick" not in line["command"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
