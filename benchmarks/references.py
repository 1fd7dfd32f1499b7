"""Train the networks that tables start from and are judged by: originals and retrained ones.

    python benchmarks/references.py --recipe mnist --each 0 1 2 3 4 5 6 7 8 9

trains a network on MNIST, then ten more by the same recipe, each of which never sees one class. The
weights go to the folder ``--out`` (default: the environment variable ``WFILTER_REFERENCES``, or
``wfilter-references`` in the home folder), never into the repository: ``cnn-mnist-s0.safetensors``
and ``cnn-mnist-s0-without0.safetensors`` ... (read them with ``wfilter.zoo.load_weights``). Each
adds a JSON line with accuracies, checksum, time and settings to ``references.jsonl`` there;
``--collect`` copies the lines to ``benchmarks/results/`` and writes a table of them.

A checkpoint is kept beside the weights. The same command, given again, goes on where it stopped,
and what has finished is not run twice. The last epoch's weights are kept: the test images choose
nothing. ``--recipe cifar10`` is the small modern network: frozen patch whitening, SGD, label
smoothing, alternating flips, shifts, the first epochs at half the image size. Any setting of a
recipe can be given anew (``--recipe cifar10 --model cnn-cifar --epochs 24``), or all of them:

    python benchmarks/references.py --model resnet18-mnist --data mnist --epochs 8

``--start FILE`` begins with the weights of a model trained on something else, wherever names and
shapes agree: minutes instead of hours. A ViT takes patches, positions and normalisation of an
ImageNet ViT scaled to its own, and one of twice the width is made of two copies side by side; what
couples them is fresh. ``--train-images`` takes fewer of them, at random. ``--warp`` also turns,
scales and slants them, and ``--bfloat16`` multiplies in half precision: up to twice as fast
on a CPU that has units for it (one that only claims to have AMX, as some virtual machines do,
needs ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16``). ``--half 4`` sees the images of the first four
epochs at half their size, for a quarter of the time. ``--hardest 20000`` trains only on the images
that the weights of ``--start`` are least sure of: of digits most teach nothing after an epoch.
``--without 3`` leaves class 3 out of a single training. ``--without 1 3 8`` leaves out three,
which makes a common start for the three models that are to lack one of them each.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from common import RESULTS, append_line, commit, read_lines, told_command
from starts import start_from
from training import as_products, count_hits, fit, hardest, plain, whiten
from wfilter import data, zoo

# Peak learning rate and weight decay: one-cycle SGD for networks with BatchNorm, AdamW for ViTs.
OPTIMISERS = {"sgd": {"lr": 0.1, "weight_decay": 5e-4}, "adamw": {"lr": 1e-3, "weight_decay": 0.05}}
RECIPES: dict[str, dict[str, Any]] = {
    "digits": {"model": "cnn-digits", "data": "digits", "epochs": 8, "batch_size": 64, "pad": 1},
    "mnist": {"model": "cnn-mnist", "data": "mnist", "epochs": 6, "bfloat16": True},
    "cifar10": {
        **{"model": "cnn_small-cifar", "data": "cifar10", "epochs": 24, "half": 6},
        **{"batch_size": 256, "lr": 0.2, "smoothing": 0.1, "flip": "alternate", "whiten": True},
        "bfloat16": True,
    },
}
CLASSES = 10  # of all the datasets
LOG = "references.jsonl"


def main() -> None:
    args = parse_arguments()
    if args.collect:
        store(args.out / LOG, LOG, table)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for job in jobs(args):
        train(job)


def jobs(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """The training asked for, then the same without each class of ``--each``."""
    for without in [args.without, *([label] for label in args.each)]:
        job = copy.copy(args)
        job.without = without
        yield job


def train(args: argparse.Namespace) -> None:
    stem = args.out / stem_name(args.model, args.seed, *args.without)
    weights = stem.with_name(f"{stem.name}.safetensors")
    if weights.exists():
        print(f"{weights} exists: nothing to do. Delete it to train again.")
        return
    code = commit()  # now: by the end of the run the repository may have moved on
    torch.manual_seed(args.seed)
    train, test = load_sets(args)
    model = zoo.create(args.model, train.num_classes).to(memory_format=torch.channels_last)
    as_products(model)
    if args.whiten:
        whiten(model, train)
    if args.start:
        print(start_from(model, args.start), flush=True)
    args.chosen = None  # tells apart what different starts find hard, for the checkpoint
    if args.hardest:
        chosen = hardest(model, train, args.hardest)
        args.chosen = hashlib.sha256(chosen.numpy().tobytes()).hexdigest()[:16]
        train = train.take(chosen)
    seconds = fit(model, train, test, args, stem.with_name(f"{stem.name}.checkpoint.pt"))
    save_weights(model, weights)
    line = describe(args, *count_hits(model, test), seconds, code, weights)
    append_line(args.out / LOG, line)
    print(json.dumps(line), flush=True)


def load_sets(args: argparse.Namespace) -> tuple[data.ImageSet, data.ImageSet]:
    """What to train on, without the classes to leave out, and all test images."""
    inputs = vars(zoo.input_format(f"wfilter:{args.model}"))
    train, test = (data.load(args.data, split, args.root, **inputs) for split in ("train", "test"))
    if args.limit:
        train, test = (s.take(torch.arange(min(args.limit, len(s)))) for s in (train, test))
    if args.train_images:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(args.seed))
        train = train.take(order[: args.train_images].sort().values)
    left_out = torch.tensor(args.without, dtype=torch.long)
    return train.take((~torch.isin(train.labels, left_out)).nonzero().flatten()), test


def save_weights(model: nn.Module, path: Path) -> None:
    """Written whole or not at all: a file under the final name is a finished training."""
    temporary = path.with_suffix(".part")
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, temporary)
    os.replace(temporary, path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    recipe = parser.parse_known_args()[0].recipe
    if recipe:
        parser.set_defaults(**RECIPES[recipe])
    args = parser.parse_args()
    if not args.collect and not (args.model and args.data):
        parser.error("give --recipe, or both --model and --data")
    if not args.collect:
        check_arguments(parser, args)
    return args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--recipe", choices=tuple(RECIPES), help="defaults for what follows")
    parser.add_argument("--model", choices=zoo.names())
    parser.add_argument("--data", choices=("digits", "mnist", "cifar10"))
    parser.add_argument("--root", type=Path, help="data folder (default: WFILTER_DATA)")
    parser.add_argument("--out", type=Path, default=folder(), help="folder for weights and log")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--optimiser", choices=tuple(OPTIMISERS), help="default: adamw for ViTs")
    parser.add_argument("--lr", type=float, help="peak of the one-cycle schedule")
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--smoothing", type=float, default=0.0, help="of the labels")
    parser.add_argument("--pad", type=int, default=2, help="largest shift of a training image")
    parser.add_argument(
        "--flip", nargs="?", const="random", choices=("random", "alternate"),
        help="mirror training images (not digits), drawn anew or every other epoch",
    )  # fmt: skip
    parser.add_argument("--warp", action=flag, default=False, help="turn, scale and slant them")
    parser.add_argument("--whiten", action=flag, default=False, help="the first layer, for good")
    parser.add_argument("--bfloat16", action=flag, default=False, help="half precision products")
    parser.add_argument("--start", type=Path, help="safetensors file to take weights from")
    parser.add_argument("--train-images", type=int, help="default: all")
    parser.add_argument("--without", type=int, nargs="+", default=[], help="classes to leave out")
    parser.add_argument(
        "--each", type=int, nargs="+", default=[], help="then train without each of these classes"
    )
    parser.add_argument("--half", type=int, default=0, help="epochs at half the image size")
    parser.add_argument("--hardest", type=int, help="images that --start finds hardest, only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="only so many images, to try the script out")
    parser.add_argument("--collect", action="store_true", help="store the lines of --out, only")


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """In place: fill in what depends on other arguments; refuse what cannot be meant."""
    args.without = sorted({*args.without})
    for name, labels in (("without", args.without), ("each", args.each)):
        if any(label not in range(CLASSES) for label in labels):
            parser.error(f"--{name} {labels}: classes are 0 to {CLASSES - 1}")
    if args.each and (args.without or args.start):
        parser.error("--each makes networks without one class each: no --without, no --start")
    told = args.start.stem if args.start else ""
    lacking = {f"without{label}" for label in args.without} - {*told.split("-")}
    if lacking and args.model.split("-")[1] in told:
        parser.error(f"--start {args.start} has seen a class that --without is to leave out")
    if args.hardest is not None and not args.start:
        parser.error("--hardest asks the weights of --start: give them")
    if args.hardest is not None and args.hardest < args.batch_size:
        parser.error(
            f"--hardest {args.hardest} is less than one batch of {args.batch_size} images: give "
            "more, or a smaller --batch-size"
        )
    args.optimiser = args.optimiser or ("adamw" if args.model.startswith("vit") else "sgd")
    for name, value in OPTIMISERS[args.optimiser].items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def folder() -> Path:
    """Where the weights are: they are too large for the repository."""
    return Path(os.environ.get("WFILTER_REFERENCES") or Path.home() / "wfilter-references")


def stem_name(model: str, seed: int, *without: int) -> str:
    """What the files of a training are called."""
    return f"{model}-s{seed}" + "".join(f"-without{label}" for label in without)


def describe(
    args: argparse.Namespace, right: Tensor, seen: Tensor, seconds: float, code: str, weights: Path
) -> dict[str, Any]:
    per_class = (100 * right / seen.clamp(min=1)).tolist()
    kept = [label for label in range(len(per_class)) if label not in args.without]
    return {
        "benchmark": "references",
        "file": weights.name,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "accuracy": round(100 * right.sum().item() / seen.sum().item(), 3),
        "accuracy_retain": round(100 * right[kept].sum().item() / seen[kept].sum().item(), 3),
        "worst_class": round(min(per_class[label] for label in kept), 3),
        "per_class": [round(value, 2) for value in per_class],
        "test_images": int(seen.sum()),
        "seconds": round(seconds, 1),
        "settings": plain(vars(args)),
        "command": told_command(),
        "seed": args.seed,
        "commit": code,
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        },
    }


def store(log: Path, name: str, make: Callable[[list[dict[str, Any]]], str]) -> None:
    """Add the lines of a log that are not stored yet to the results, and make their table."""
    stored = RESULTS / name
    known = read_lines(stored)
    fresh = [line for line in read_lines(log) if line not in known]
    for line in fresh:
        append_line(stored, line)
    print(f"{len(fresh)} lines added to {stored}, {len(known)} were there.")
    stored.with_suffix(".md").write_text(make(known + fresh))


def table(lines: list[dict[str, Any]]) -> str:
    """Accuracies beside those of the network that saw all classes, by the same recipe."""
    whole = {(line["settings"]["model"], line["seed"]): line
             for line in lines if not line["settings"]["without"]}  # fmt: skip
    rows = [
        "| weights | all classes | classes it saw | the original on these | worst class | minutes "
        "| sha256 |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    # Trained again with the same bits: the quieter machine's minutes say more.
    slowest_first = sorted(lines, key=lambda line: -line["seconds"])
    once = {(line["file"], line["sha256"]): line for line in slowest_first}
    for _, line in sorted(once.items()):
        original = whole.get((line["settings"]["model"], line["seed"]))
        rows.append(
            f"| {line['file']} | {line['accuracy']:.2f} | {on_same_classes(line, line)} "
            f"| {on_same_classes(original, line)} | {line['worst_class']:.2f} "
            f"| {line['seconds'] / 60:.1f} | `{line['sha256'][:12]}` |"
        )
    return "\n".join([*HEADER, *rows, ""])


def on_same_classes(network: dict[str, Any] | None, line: dict[str, Any]) -> str:
    """A network's mean accuracy over the classes that another one saw."""
    if network is None:
        return "-"
    kept = [value for label, value in enumerate(network["per_class"])
            if label not in line["settings"]["without"]]  # fmt: skip
    return f"{sum(kept) / len(kept):.2f}"


HEADER = [
    "# Originals and networks retrained without a class",
    "",
    "Whole training sets, whole test sets, percent; a mean over classes where some are left out.",
    "Made from `references.jsonl` by",
    "`python benchmarks/references.py --collect`; the command of each line is in it. The weights",
    "are not in the repository: the commands make them again. Minutes are of one thread of a CPU",
    "shared with other work, so they are upper bounds.",
    "",
]


if __name__ == "__main__":
    main()
