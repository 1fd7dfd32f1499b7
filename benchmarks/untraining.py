"""Untrain a classifier and measure it on the whole test set; one JSON line per run.

    python benchmarks/untraining.py --model resnet18-cifar --recipe distill --seed 0
    python benchmarks/untraining.py --table
    python benchmarks/untraining.py --ablations --model resnet18-mnist --weights FILE --steps 200

Data come from WFILTER_DATA, and so do weights unless ``--weights`` names a file (one written by
``benchmarks/references.py``). ``--ablations`` runs the recipe with one choice changed at a time
(``ABLATIONS``) and writes ``ablations.jsonl`` and ``ablations.md`` instead.

Every image is shown under its own row (Acc_f), under one random other row (Acc_r), and under one
random set of 2, 3 and 5 classes with and without its class. Settings of the recipe can be changed:
``--set depth=1.0 --set margin=2``. Lines go to ``benchmarks/results/untraining.jsonl``; ``--table``
rebuilds ``untraining.md`` from them.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import wfilter
from common import RESULTS, add_set, append_line, changed, commit, read_lines, told_command
from wfilter import data, zoo
from wfilter.files.checkpoint import fingerprint

SIZES = (1, 2, 3, 5)
# The recipe with one choice undone at a time: what it is called in the table, and what it changes.
ABLATIONS = {
    "distill": {},
    "no blended images": {"blend": 0.0},
    "rows trained alone, no sets": {"set_share": 0.0},
    "soft gates": {"gates": "soft", "start": None},
    "soft gates, no sets": {"gates": "soft", "start": None, "set_share": 0.0},
    "plain Adam": {"optimiser": "adam"},
    "no margin": {"lambda_forget": 0.0},
    "margin 2": {"margin": 2.0},
    "regularised, lambda_alpha 1": {"lambda_alpha": 1.0},
    "every layer (depth 1)": {"depth": 1.0},
    "deepest tenth (depth 0.1)": {"depth": 0.1},
    "gates start at alpha 3": {"start": 3.0},
    "half the pairs forget": {"forget_share": 0.5},
}


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


def load(args: argparse.Namespace) -> tuple[nn.Module, wfilter.InMemory, data.ImageSet]:
    """The network, the images to untrain on, and those to measure on."""
    spec = f"wfilter:{args.model}"
    model = zoo.build(spec, weights=args.weights or zoo.weights_path(spec))
    model.to(memory_format=torch.channels_last)
    name = "mnist" if args.model.endswith("-mnist") else "cifar10"
    train, test = (
        data.load(name, split, **vars(zoo.input_format(spec))) for split in ("train", "test")
    )
    test = test.take(torch.arange(args.skip, min(len(test), args.skip + args.test_images)))
    pick = torch.randperm(len(train), generator=torch.Generator().manual_seed(args.seed))
    images, labels = train.batch(pick[: args.train_images])
    images = images.contiguous(memory_format=torch.channels_last)
    augment = None
    if args.shift:
        augment = partial(data.shift_and_flip, pad=args.shift, flip=name == "cifar10")
    return model, wfilter.InMemory(images, labels, args.batch_size, augment), test


def run(args: argparse.Namespace) -> dict:
    """One untraining, measured."""
    code = commit()  # now: by the end of the run the repository may have moved on
    torch.manual_seed(args.seed)
    model, train, test = load(args)
    wf = wfilter.apply_weight_filtering(model, class_names=test.class_names)
    recipe = changed(args.recipe, args.set)
    label = "".join(c if c.isalnum() else "-" for c in args.name or args.recipe)
    keep = Path(args.keep) / f"{args.model}-{label}-{args.seed}"
    keep.parent.mkdir(parents=True, exist_ok=True)
    before = time.process_time()
    history = wfilter.untrain(
        wf,
        train,
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
    return {
        **settings_of(args, recipe, len(test)),
        **figures,
        "closed": round(100 * float((gates < 0.5).float().mean()), 3),
        "exact": round(100 * float(((gates == 0) | (gates == 1)).float().mean()), 3),
        "untrain_seconds": round(history.seconds, 1),
        "untrain_cpu_seconds": round(cpu_seconds, 1),
        "test_seconds": round(time.perf_counter() - began, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "command": told_command(),
        "base": fingerprint(model)[:16],
        "commit": code,
        "note": args.note,
    }


def settings_of(args: argparse.Namespace, recipe: wfilter.Recipe, tested: int) -> dict:
    """What a line says of how its run was made."""
    return {
        "model": args.model,
        "name": args.name or args.recipe,
        "recipe": recipe.to_dict(),
        "seed": args.seed,
        "steps": args.steps,
        "batch_size": args.batch_size,
        "train_images": args.train_images,
        "shift": args.shift,
        "test_images": tested,
        "set_images": min(tested, args.set_images),
        "skipped": args.skip,
    }


def table(path: Path) -> str:
    """Mean and spread over seeds, one row per model and name."""
    lines = read_lines(path)
    groups: dict[tuple[str, str], list[dict]] = {}
    for line in lines:
        groups.setdefault((line["model"], line["name"]), []).append(line)
    head = (
        "| model | recipe | seeds | steps x images | original | Acc_r | Acc_f (worst class) "
        "| sets of 2 | sets of 3 | sets of 5 | closed | exact gates | cpu seconds |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    rows = []
    for (model, name), runs in groups.items():
        mean = lambda key: statistics.mean(r[key] for r in runs)  # noqa: E731, B023
        spread = f" ± {statistics.stdev(r['acc_r'] for r in runs):.2f}" if len(runs) > 1 else ""
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
            f"| {mean('original'):.2f} | {mean('acc_r'):.2f}{spread} "
            f"| {mean('acc_f'):.3f} ({max(r['acc_f_worst'] for r in runs):.2f}) "
            f"| {' | '.join(cells)} "
            f"| {mean('closed'):.2f} % | {mean('exact'):.1f} % "
            f"| {mean('untrain_cpu_seconds'):.0f} |"
        )
    notes = sorted({f"- {r['model']}, {r['name']}: {r['note']}" for r in lines if r["note"]})
    return "\n".join([head, *rows, "", *notes, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18-cifar")
    parser.add_argument("--recipe", default="distill")
    parser.add_argument("--name", default="", help="row of the table; the recipe's by default")
    add_set(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--train-images", type=int, default=20_000)
    parser.add_argument("--shift", type=int, default=0, help="pixels; CIFAR images also mirrored")
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--set-images", type=int, default=10_000, help="test images under sets")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first test images")
    parser.add_argument("--sets", action="store_true", help="measure sets for soft gates too")
    parser.add_argument("--keep", default="runs", help="folder for checkpoints and filters")
    parser.add_argument("--weights", type=Path, help="safetensors file of the original")
    parser.add_argument("--out", type=Path, help="default: untraining.jsonl or ablations.jsonl")
    parser.add_argument("--note", default="")
    parser.add_argument("--table", action="store_true", help="only rebuild the table")
    parser.add_argument("--ablations", action="store_true", help="one choice changed at a time")
    args = parser.parse_args()
    args.out = args.out or RESULTS / f"{'ablations' if args.ablations else 'untraining'}.jsonl"
    if args.ablations and not args.table:
        done = [json.loads(line)["name"] for line in lines_of(args.out)]
        for name in [name for name in ABLATIONS if name not in done]:
            changes = [f"{key}={value!r}" for key, value in ABLATIONS[name].items()]
            options = {"name": name, "set": changes, "sets": True}
            store(run(argparse.Namespace(**{**vars(args), **options})), args.out)
    elif not args.table:
        store(run(args), args.out)
    title = "What each choice of `distill` is worth" if args.ablations else "Untraining"
    flags = "--ablations --table" if args.ablations else "--table"
    args.out.with_suffix(".md").write_text(
        f"# {title}\n\nAccuracies over the test images each line names (`test_images`; sets: the "
        f"first `set_images` of them). Rebuilt by `python benchmarks/untraining.py {flags}` from "
        f"`{args.out.name}`, which has each run's settings, seed and commit. Acc_r: one random "
        "other row, or set without the image's class, per image; Acc_f: its own row, or a set with "
        "its class; in brackets a logit mask's Acc_r.\n\n" + table(args.out)
    )


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def store(line: dict, path: Path) -> None:
    print(json.dumps({k: v for k, v in line.items() if k != "recipe"}), flush=True)
    append_line(path, line)


if __name__ == "__main__":
    main()
