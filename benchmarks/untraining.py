"""Untrain a CIFAR-10 classifier and measure it on the whole test set; one JSON line per run.

    python benchmarks/untraining.py --model resnet18-cifar --recipe distill --seed 0
    python benchmarks/untraining.py --table

Data and weights come from WFILTER_DATA. Every image is shown under its own row (Acc_f), under one
random other row (Acc_r), and under one random set of 2, 3 and 5 classes with and without its class.
Settings of the recipe can be changed: ``--set depth=1.0 --set margin=2``. Lines go to
``benchmarks/results/untraining.jsonl``; ``--table`` rebuilds ``untraining.md`` from them.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import math
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
from torch import Tensor

import wfilter
from wfilter import data, zoo

RESULTS = Path(__file__).parent / "results"
SIZES = (1, 2, 3, 5)


def random_sets(labels: Tensor, size: int, own: bool, generator: torch.Generator) -> Tensor:
    """One random set of classes per image, with or without the image's class."""
    scores = torch.rand(len(labels), 10, generator=generator)
    scores.scatter_(1, labels[:, None], 2.0 if own else -1.0)
    return scores.argsort(1, descending=True).argsort(1) < size


@torch.inference_mode()
def measure(
    wf: wfilter.FilteredModel,
    test: data.ImageSet,
    seed: int,
    sizes: tuple[int, ...],
    set_images: int,
) -> dict:
    """Accuracies over the test set (sets: over its first images), and the base model's."""
    generator = torch.Generator().manual_seed(seed)
    every = [(size, own) for size in sizes for own in (False, True)]
    right: dict[tuple[int, bool], list[Tensor]] = {kind: [] for kind in every}
    masked: dict[int, list[Tensor]] = {size: [] for size in sizes}
    base, labels_seen = [], []
    for number, (images, labels) in enumerate(data.batches(test, 100)):
        kinds = every if 100 * number < set_images else every[:2]
        images = images.contiguous(memory_format=torch.channels_last)
        sets = torch.stack([random_sets(labels, s, own, generator) for s, own in kinds], 1)
        logits, plain = wf.replicated(images, sets.flatten(0, 1)), wf(images)
        answers = logits.view(len(labels), len(kinds), -1).argmax(2) == labels[:, None]
        for index, kind in enumerate(kinds):
            right[kind].append(answers[:, index])
            if not kind[1]:
                kept = plain.masked_fill(sets[:, index], -math.inf).argmax(1) == labels
                masked[kind[0]].append(kept)
        base.append(plain.argmax(1) == labels)
        labels_seen.append(labels)
    labels = torch.cat(labels_seen)
    own = torch.cat(right[(1, True)])
    percent = lambda parts: round(100 * torch.cat(parts).float().mean().item(), 3)  # noqa: E731
    by_class = [round(100 * own[labels == c].float().mean().item(), 3) for c in range(10)]
    return {
        "original": percent(base),
        "acc_r": percent(right[(1, False)]),
        "acc_f": statistics.mean(by_class),
        "acc_f_worst": max(by_class),
        "sets": {
            str(s): {
                "acc_r": percent(right[(s, False)]),
                "acc_f": percent(right[(s, True)]),
                "logit_mask": percent(masked[s]),
            }
            for s in sizes
        },
    }


def run(args: argparse.Namespace) -> dict:
    """One untraining, measured."""
    torch.manual_seed(args.seed)
    model = zoo.build(f"wfilter:{args.model}", weights=zoo.weights_path(f"wfilter:{args.model}"))
    model.to(memory_format=torch.channels_last)
    train, test = data.load("cifar10", "train"), data.load("cifar10", "test")
    test = test.take(torch.arange(args.skip, min(len(test), args.skip + args.test_images)))
    pick = torch.randperm(len(train), generator=torch.Generator().manual_seed(args.seed))
    images, labels = train.batch(pick[: args.train_images])
    images = images.contiguous(memory_format=torch.channels_last)
    wf = wfilter.apply_weight_filtering(model, class_names=train.class_names)
    changes = {k: ast.literal_eval(v) for k, v in (s.split("=", 1) for s in args.set)}
    recipe = dataclasses.replace(wfilter.RECIPES[args.recipe], **changes)
    keep = Path(args.keep) / f"{args.model}-{args.name or args.recipe}-{args.seed}"
    keep.parent.mkdir(parents=True, exist_ok=True)
    before = time.process_time()
    history = wfilter.untrain(
        wf,
        wfilter.InMemory(images, labels, args.batch_size),
        recipe=recipe,
        steps=args.steps,
        seed=args.seed,
        checkpoint=keep.with_suffix(".checkpoint"),
        resume=True,
    )
    cpu_seconds = time.process_time() - before
    wf.save(keep.with_suffix(".safetensors"))
    began = time.perf_counter()
    sizes = SIZES if recipe.gates == "hard" or args.sets else (1,)
    figures = measure(wf, test, args.seed, sizes, args.set_images)
    gates = wf.alphas.detach().sigmoid()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "model": args.model,
        "name": args.name or args.recipe,
        "recipe": recipe.to_dict(),
        "seed": args.seed,
        "steps": args.steps,
        "batch_size": args.batch_size,
        "train_images": args.train_images,
        "test_images": len(test),
        "set_images": min(len(test), args.set_images),
        "skipped": args.skip,
        **figures,
        "closed": round(100 * float((gates < 0.5).float().mean()), 3),
        "exact": round(100 * float(((gates == 0) | (gates == 1)).float().mean()), 3),
        "untrain_seconds": round(history.seconds, 1),
        "untrain_cpu_seconds": round(cpu_seconds, 1),
        "test_seconds": round(time.perf_counter() - began, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "commit": commit.stdout.strip(),
        "note": args.note,
    }


def table() -> str:
    """Mean and spread over seeds, one row per model and name."""
    lines = [json.loads(line) for line in (RESULTS / "untraining.jsonl").read_text().splitlines()]
    groups: dict[tuple[str, str], list[dict]] = {}
    for line in lines:
        groups.setdefault((line["model"], line["name"]), []).append(line)
    head = (
        "| model | recipe | seeds | steps x images | original | Acc_r | Acc_f (worst class) "
        "| sets of 2 | sets of 3 | sets of 5 | closed | exact gates | seconds |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    rows = []
    for (model, name), runs in sorted(groups.items()):
        mean = lambda key: statistics.mean(r[key] for r in runs)  # noqa: E731, B023
        spread = statistics.pstdev(r["acc_r"] for r in runs)
        cells = []
        for size in ("2", "3", "5"):
            have = [r["sets"][size] for r in runs if size in r["sets"]]
            cells.append(
                " / ".join(f"{statistics.mean(h[k] for h in have):.2f}" for k in ("acc_r", "acc_f"))
                + f" (mask {statistics.mean(h['logit_mask'] for h in have):.2f})"
                if have
                else "-"
            )
        named = wfilter.RECIPES.get(runs[0]["recipe"]["name"])
        settings = runs[0]["recipe"].items()
        changed = [f"{k}={v}" for k, v in settings if named and getattr(named, k) != v]
        name = ", ".join([name, *changed])
        rows.append(
            f"| {model} | {name} | {len(runs)} | {runs[0]['steps']} x {runs[0]['batch_size']} "
            f"| {mean('original'):.2f} | {mean('acc_r'):.2f} ± {spread:.2f} "
            f"| {mean('acc_f'):.3f} ({max(r['acc_f_worst'] for r in runs):.2f}) "
            f"| {' | '.join(cells)} "
            f"| {mean('closed'):.2f} % | {mean('exact'):.1f} % | {mean('untrain_seconds'):.0f} |"
        )
    notes = sorted({f"- {r['model']}, {r['name']}: {r['note']}" for r in lines if r["note"]})
    return "\n".join([head, *rows, "", *notes, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18-cifar")
    parser.add_argument("--recipe", default="distill")
    parser.add_argument("--name", default="", help="row of the table; the recipe's by default")
    parser.add_argument("--set", action="append", default=[], help="recipe setting, name=value")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--train-images", type=int, default=20_000)
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--set-images", type=int, default=10_000, help="test images under sets")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first test images")
    parser.add_argument("--sets", action="store_true", help="measure sets for soft gates too")
    parser.add_argument("--keep", default="runs", help="folder for checkpoints and filters")
    parser.add_argument("--out", default=str(RESULTS / "untraining.jsonl"))
    parser.add_argument("--note", default="")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        (RESULTS / "untraining.md").write_text(
            "# Untraining on CIFAR-10, whole test set\n\nRebuilt by `python "
            "benchmarks/untraining.py --table` from `untraining.jsonl`, which has each run's "
            "settings, seed and commit.\n\n" + table()
        )
        return
    line = run(args)
    print(json.dumps({k: v for k, v in line.items() if k != "recipe"}))
    with open(args.out, "a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
