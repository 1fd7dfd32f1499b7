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
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import wfilter
from wfilter import baselines, data, zoo
from wfilter.bench import environment
from wfilter.columns import Budget
from wfilter.evaluate import make_bench, report_on
from wfilter.subjects import Subject

RESULTS = Path(__file__).parent / "results"
DATASETS = ("mnist", "cifar10", "imagenet")
BACKBONES = ("vgg16", "resnet18", "vit_tiny", "vit_small", "resnet50", "resnet101")
FILTERED = ("paper", "distill", "distill-soft")
RIVALS = ("retrained", "random_labels", "negative_gradients")
METHODS = ("original", *FILTERED, *RIVALS)
TIMM = {
    "vgg16": "vgg16.tv_in1k",
    "resnet18": "resnet18.tv_in1k",
    "resnet50": "resnet50.tv_in1k",
    "resnet101": "resnet101.tv_in1k",
    "vit_tiny": "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "vit_small": "vit_small_patch16_224.augreg_in21k_ft_in1k",
}

# Tables 1 and 2 of the paper: Acc_r, Acc_f, ZRF, relearn epochs (classes never relearned);
# insertion, deletion. ZRF of ImageNet is printed there as a share, here as a percentage.
PAPER: dict[tuple[str, str, str], tuple[float | str, ...]] = {
    ("mnist", "vgg16", "original"): (99.6, 99.6, 48.0),
    ("mnist", "vgg16", "retrained"): (99.4, 0.0, 48.7, "74.5 (5)"),
    ("mnist", "vgg16", "random_labels"): (99.6, 0.0, 53.3, "40.3 (0)"),
    ("mnist", "vgg16", "negative_gradients"): (99.4, 0.0, 48.3, "24.6 (0)"),
    ("mnist", "vgg16", "paper"): (73.2, 0.0, 79.2, "27.6 (1)"),
    ("mnist", "resnet18", "original"): (99.6, 99.6, 47.0),
    ("mnist", "resnet18", "retrained"): (99.4, 0.0, 48.7, "43.6 (0)"),
    ("mnist", "resnet18", "random_labels"): (99.4, 0.0, 57.1, "15.7 (0)"),
    ("mnist", "resnet18", "negative_gradients"): (99.2, 0.0, 52.1, "20.1 (0)"),
    ("mnist", "resnet18", "paper"): (94.0, 9.68, 63.1, "22.7 (0)"),
    ("mnist", "vit_tiny", "original"): (98.9, 98.9, 47.2),
    ("mnist", "vit_tiny", "retrained"): (99.0, 0.0, 50.2, "71.4 (7)"),
    ("mnist", "vit_tiny", "random_labels"): (98.3, 0.0, 48.7, "81.9 (8)"),
    ("mnist", "vit_tiny", "negative_gradients"): (98.4, 0.0, 54.6, "71.6 (7)"),
    ("mnist", "vit_tiny", "paper"): (93.5, 0.0, 47.4, ">100 (10)"),
    ("mnist", "vit_small", "original"): (99.0, 98.9, 47.1),
    ("mnist", "vit_small", "retrained"): (99.0, 0.0, 49.5, "91.5 (8)"),
    ("mnist", "vit_small", "random_labels"): (99.5, 0.0, 50.4, "74.1 (7)"),
    ("mnist", "vit_small", "negative_gradients"): (99.6, 0.0, 52.3, "44.1 (4)"),
    ("mnist", "vit_small", "paper"): (94.0, 0.0, 48.0, "91.0 (9)"),
    ("cifar10", "vgg16", "original"): (93.0, 93.0, 48.3),
    ("cifar10", "vgg16", "retrained"): (89.9, 0.0, 50.1, "65.3 (5)"),
    ("cifar10", "vgg16", "random_labels"): (88.7, 0.0, 52.5, "56.5 (5)"),
    ("cifar10", "vgg16", "negative_gradients"): (89.4, 0.0, 51.6, "76.7 (7)"),
    ("cifar10", "vgg16", "paper"): (80.2, 18.3, 57.4, "54.2 (5)"),
    ("cifar10", "resnet18", "original"): (93.9, 94.0, 48.0),
    ("cifar10", "resnet18", "retrained"): (90.5, 0.0, 51.4, ">100 (10)"),
    ("cifar10", "resnet18", "random_labels"): (90.6, 0.0, 59.4, "21.6 (0)"),
    ("cifar10", "resnet18", "negative_gradients"): (92.4, 0.0, 55.2, "31.3 (3)"),
    ("cifar10", "resnet18", "paper"): (79.7, 9.25, 63.9, "94.3 (9)"),
    ("cifar10", "vit_tiny", "original"): (78.0, 78.0, 49.8),
    ("cifar10", "vit_tiny", "retrained"): (71.2, 0.0, 67.6, "52.2 (4)"),
    ("cifar10", "vit_tiny", "random_labels"): (73.2, 0.0, 57.7, "83.5 (8)"),
    ("cifar10", "vit_tiny", "negative_gradients"): (74.4, 0.0, 50.1, "81.7 (8)"),
    ("cifar10", "vit_tiny", "paper"): (73.5, 0.0, 59.8, ">100 (10)"),
    ("cifar10", "vit_small", "original"): (85.2, 85.2, 53.6),
    ("cifar10", "vit_small", "retrained"): (75.5, 0.0, 61.3, "51.1 (4)"),
    ("cifar10", "vit_small", "random_labels"): (74.8, 0.0, 50.8, "75.0 (6)"),
    ("cifar10", "vit_small", "negative_gradients"): (75.5, 0.0, 51.7, "61.7 (5)"),
    ("cifar10", "vit_small", "paper"): (74.7, 0.0, 59.7, "81.1 (8)"),
    ("imagenet", "vgg16", "original"): (71.2, 71.3, 35.0),
    ("imagenet", "vgg16", "paper"): (64.1, 1.89, 53.0),
    ("imagenet", "resnet18", "original"): (70.5, 70.3, 35.0),
    ("imagenet", "resnet18", "paper"): (64.4, 1.47, 40.0),
    ("imagenet", "vit_tiny", "original"): (75.6, 75.5, 34.0),
    ("imagenet", "vit_tiny", "paper"): (68.0, 2.51, 44.0),
    ("imagenet", "vit_small", "original"): (82.3, 82.2, 34.0),
    ("imagenet", "vit_small", "paper"): (69.2, 9.46, 45.0),
    ("imagenet", "resnet50", "paper"): (72.6, 0.0),
    ("imagenet", "resnet101", "paper"): (74.4, 0.0),
}
PAPER_CURVES = {
    ("mnist", "vgg16"): (0.78, 0.09),
    ("cifar10", "vgg16"): (0.79, 0.10),
    ("imagenet", "vgg16"): (0.73, 0.05),
    ("mnist", "resnet18"): (0.79, 0.05),
    ("cifar10", "resnet18"): (0.69, 0.06),
    ("imagenet", "resnet18"): (0.75, 0.04),
    ("mnist", "vit_tiny"): (0.90, 0.07),
    ("cifar10", "vit_tiny"): (0.88, 0.05),
    ("imagenet", "vit_tiny"): (0.60, 0.04),
    ("mnist", "vit_small"): (0.90, 0.08),
    ("cifar10", "vit_small"): (0.88, 0.14),
    ("imagenet", "vit_small"): (0.75, 0.04),
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


# ---- lines and tables ---------------------------------------------------------------------------


def key_of(line: dict[str, Any]) -> tuple[str, str, str, int]:
    return line["dataset"], line["backbone"], line["method"], line["seed"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_line(path: Path, line: dict[str, Any]) -> None:
    print(json.dumps({k: v for k, v in line.items() if k != "report"}))
    report = wfilter.Report.from_json(json.dumps(line["report"]))
    print(report.to_markdown())
    if "--quick" not in line["command"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def mean_of(lines: list[dict[str, Any]], column: str) -> float | None:
    """Mean over seeds of a report's column, itself a mean over rows."""
    values = []
    for line in lines:
        report = wfilter.Report.from_json(json.dumps(line["report"]))
        if column in [c.name for c in report.columns]:
            values.append(report.value(report.methods[0], column))
    return statistics.mean(values) if values else None


def shown(value: float | None, digits: int = 1, scale: float = 1.0) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"


def table1(lines: list[dict[str, Any]]) -> str:
    """Acc_r / Acc_f / ZRF / relearn epochs, the paper's and ours."""
    rows = [
        "# Acc_r, Acc_f, ZRF and relearn time: the paper's and ours",
        "",
        "Rebuilt by `python benchmarks/paper.py --tables` from `paper.jsonl`, which has the "
        "command, seed, commit and environment of every line. Accuracies and ZRF in per cent; "
        "relearn epochs of the baked model's weights. `paper` is the paper's WF-Net, on our side "
        "its recipe as we read it; `distill` is our recipe. A dash in the paper's column: not in "
        "the paper; in ours: not measured, with the reason.",
        "",
        "| dataset | backbone | method | the paper: Acc_r / Acc_f / ZRF / relearn "
        "| ours: Acc_r / Acc_f / ZRF / relearn | rows, seeds, test images |",
        "|---|---|---|---|---|---|",
    ]
    for dataset, backbone, method in keys(lines):
        found = of(lines, dataset, backbone, method)
        printed = PAPER.get((dataset, backbone, method), ())
        theirs = " / ".join(f"{v}" for v in printed) or "-"
        cells = [mean_of(found, "Acc_r"), mean_of(found, "Acc_f"), mean_of(found, "ZRF")]
        ours = [shown(value, digits, 100.0) for value, digits in zip(cells, (2, 2, 1))]
        ours.append(shown(mean_of(found, "relearn weights"), 1))
        count = "-"
        if found:
            images = found[0]["report"]["facts"]["test images"]["in all"]
            count = f"{len(found[0]['rows'])}, {len(found)}, {images:,}"
        mine = " / ".join(ours) if found else f"- ({why_not(dataset, backbone)})"
        rows.append(f"| {dataset} | {backbone} | {method} | {theirs} | {mine} | {count} |")
    return "\n".join([*rows, ""])


def table2(lines: list[dict[str, Any]]) -> str:
    """Insertion and deletion, the paper's and ours with the random control."""
    rows = [
        "# Insertion and deletion: the paper's and ours",
        "",
        "Rebuilt by `python benchmarks/paper.py --tables`. In brackets the random-order control.",
        "",
        "| dataset | backbone | the paper: insertion / deletion | method "
        "| ours: insertion / deletion |",
        "|---|---|---|---|---|",
    ]
    for dataset, backbone in PAPER_CURVES:
        theirs = " / ".join(f"{v:.2f}" for v in PAPER_CURVES[dataset, backbone])
        methods = [m for m in FILTERED if of(lines, dataset, backbone, m)] or ["-"]
        for method in methods:
            found = of(lines, dataset, backbone, method)
            cells = [
                f"{shown(mean_of(found, name), 3)} ({shown(mean_of(found, 'random ' + name), 3)})"
                for name in ("insertion", "deletion")
            ]
            mine = " / ".join(cells) if found else f"- ({why_not(dataset, backbone)})"
            rows.append(f"| {dataset} | {backbone} | {theirs} | {method} | {mine} |")
    return "\n".join([*rows, ""])


def why_not(dataset: str, backbone: str) -> str:
    """Why a cell of ours is empty."""
    if dataset == "imagenet" and backbone != "vit_tiny":
        return "no weights among the data; --random-weights tries the path"
    return "not run"


def keys(lines: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Every cell of the paper and every line of ours, in the paper's order."""
    every = {*PAPER, *(key_of(line)[:3] for line in lines)}
    order = (DATASETS, BACKBONES, METHODS)
    return sorted(every, key=lambda key: [names.index(k) for names, k in zip(order, key)])


def of(lines: list[dict[str, Any]], dataset: str, backbone: str, method: str) -> list[dict]:
    return [line for line in lines if key_of(line)[:3] == (dataset, backbone, method)]


if __name__ == "__main__":
    main()
