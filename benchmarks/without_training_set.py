"""Untrain a real backbone without its training set: held-out, foreign and synthetic images.

    python benchmarks/without_training_set.py --model resnet18-mnist --weights FILE
    python benchmarks/without_training_set.py --model resnet18-cifar --arms other synthetic
    python benchmarks/without_training_set.py --table

Four arms, one call of ``wfilter.untrain`` each, all measured on the same second half of the test
set: ``train`` (labelled training images, the reference), ``held-out`` (the first half of the test
set, no labels), ``other`` (images of another dataset, ``--other``, no labels) and ``synthetic``
(images made from the base model alone, no data at all). Without labels the base model's own answer
chooses the row. Data come from WFILTER_DATA, and so do weights unless ``--weights`` names a file.

Settings of the recipe can be changed: ``--set margin=15``. Each arm appends a JSON line with its
command, seed, commit and environment to ``results/without_training_set.jsonl``; ``--table``
rebuilds ``without_training_set.md`` from it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import untraining
import wfilter
from common import add_set, changed, commit, told_command
from wfilter import data, zoo
from wfilter.evaluation.bench import environment

ARMS = ("train", "held-out", "other", "synthetic")
# What stands in for the training images, and the empty frame it is put in: MNIST's digits are 20
# pixels high in a frame of 4; scaled to all 28, scikit-learn's are mostly taken for ones.
OTHER = {"mnist": ("digits", 4), "cifar10": ("imagenet", 0), "digits": ("digits", 0)}
SIZES = (1, 3)


@dataclass(frozen=True)
class Source:
    """What an arm untrains from: images, labels if it may see them, and what they are."""

    images: Tensor
    labels: Tensor | None
    text: str


# ---- images -------------------------------------------------------------------------------------


def halves(test: data.ImageSet, count: int) -> tuple[data.ImageSet, data.ImageSet]:
    """The first half of a test set, and the first ``count`` images of the second."""
    half = len(test) // 2
    return test.take(torch.arange(half)), test.take(
        torch.arange(half, min(len(test), half + count))
    )


def other_images(name: str, inputs: zoo.InputFormat, frame: int = 0) -> Tensor:
    """All training images of the set ``name``, as the model wants them, grey if it is."""
    size = inputs.size - 2 * frame
    found = data.load(name, "train", size=size, mean=inputs.mean, std=inputs.std)
    images, _ = found.batch(torch.arange(len(found)))
    if inputs.channels == 1:
        images = images.mean(1, keepdim=True)
    black = -torch.tensor(inputs.mean) / torch.tensor(inputs.std)
    shape = (len(images), inputs.channels, inputs.size, inputs.size)
    framed = black.view(-1, 1, 1).expand(shape).clone()
    framed[:, :, frame : frame + size, frame : frame + size] = images
    return framed


@torch.inference_mode()
def answers(model: nn.Module, images: Tensor) -> Tensor:
    """The base model's class of every image."""
    return torch.cat([model(part).argmax(1) for part in images.split(100)])


def balanced(classes: Tensor, generator: torch.Generator) -> Tensor:
    """Indices that hold every class found equally often; rare ones are repeated.

    Images of another dataset look like a few of the classes only: without this the rows of the
    others are hardly ever trained.
    """
    found = [(classes == c).nonzero()[:, 0] for c in classes.unique()]
    each = math.ceil(len(classes) / len(found))
    picks = [
        index[torch.randperm(len(index), generator=generator)].repeat(math.ceil(each / len(index)))
        for index in found
    ]
    return torch.cat([pick[:each] for pick in picks])


@contextmanager
def statistics_gaps(model: nn.Module) -> Iterator[list[Tensor]]:
    """Filled by each forward: per BatchNorm layer, how unlike its training inputs its input is.

    Squared distance of means in units of the running deviation, plus the squared log ratio of
    variances, averaged over channels.
    """
    gaps: list[Tensor] = []

    def compare(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        var, mean = torch.var_mean(inputs[0], (0, 2, 3), correction=0)
        least = 0.01 * norm.running_var.mean()  # dead channels vary by nearly nothing
        moved = (mean - norm.running_mean).square() / (norm.running_var + least)
        spread = ((var + least) / (norm.running_var + least)).log().square()
        gaps.append((moved + spread).mean())

    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    hooks = [norm.register_forward_pre_hook(compare) for norm in norms]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


def synthetic_batch(
    model: nn.Module,
    classes: Tensor,
    inputs: zoo.InputFormat,
    iterations: int,
    generator: torch.Generator,
    *,
    rate: float = 0.1,
    lambda_norm: float = 3.0,
    lambda_variation: float = 3.0,
    shift: int = 2,
) -> Tensor:
    """Images that the frozen model takes for ``classes``, found by gradient from smooth noise.

    As DeepInversion (arXiv 1912.08795): cross-entropy, BatchNorm statistics and total variation,
    under random shifts. Pixels stay within what 0..1 becomes after normalisation.
    """
    shape = (len(classes), inputs.channels, -(-inputs.size // 4), -(-inputs.size // 4))
    noise = F.interpolate(torch.rand(shape, generator=generator), inputs.size, mode="bilinear")
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (inputs.mean, inputs.std))
    low, high = -mean / std, (1 - mean) / std
    images = (low + noise * (high - low)).requires_grad_()
    optimiser = torch.optim.Adam([images], rate)
    for step in range(iterations):
        optimiser.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / iterations))
        move = torch.randint(-shift, shift + 1, (2,), generator=generator).tolist()
        moved = torch.roll(images, move, (2, 3)).contiguous(memory_format=torch.channels_last)
        with statistics_gaps(model) as gaps:
            loss = F.cross_entropy(model(moved), classes)
        if gaps:
            loss = loss + lambda_norm * torch.stack(gaps).mean()
        variation = images.diff(dim=2).abs().mean() + images.diff(dim=3).abs().mean()
        optimiser.zero_grad()
        (loss + lambda_variation * variation).backward()
        optimiser.step()
        with torch.no_grad():
            images.copy_(torch.minimum(torch.maximum(images, low), high))
    return images.detach()


def synthetic_images(
    model: nn.Module,
    inputs: zoo.InputFormat,
    count: int,
    iterations: int,
    *,
    batch_size: int = 100,
    num_classes: int = 10,
    seed: int = 0,
) -> Tensor:
    """``count`` images made from the base model alone, all classes in every batch."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(count) % num_classes
    parts = [
        synthetic_batch(model, part, inputs, iterations, generator)
        for part in classes.split(batch_size)
    ]
    return torch.cat(parts)


def source(arm: str, args: argparse.Namespace, model: nn.Module, seen: data.ImageSet) -> Source:
    """The images of an arm; ``seen`` is the half of the test set that may be used."""
    inputs = zoo.input_format(f"wfilter:{args.model}")
    name = dataset_of(args.model)
    if arm == "train":
        train = data.load(name, "train", **vars(inputs))
        generator = torch.Generator().manual_seed(args.seed)
        pick = torch.randperm(len(train), generator=generator)[: args.train_images]
        return Source(*train.batch(pick), f"{name} training images, labelled")
    if arm == "held-out":
        images, _ = seen.batch(torch.arange(len(seen)))
        return Source(images, None, f"first half of the {name} test set, unlabelled")
    if arm == "other":
        other = args.other or OTHER[name][0]
        frame = OTHER[name][1] if args.frame is None else args.frame
        inner = inputs.size - 2 * frame
        look = "grey, " * (inputs.channels == 1) + f"{inner} x {inner}"
        look += f" in a frame of {frame}" * (frame > 0)
        return Source(other_images(other, inputs, frame), None, f"{other}, {look}, unlabelled")
    images = synthetic_images(model, inputs, args.synthetic_images, args.iterations, seed=args.seed)
    return Source(images, None, f"synthetic, {args.iterations} iterations")


def dataset_of(model: str) -> str:
    return {"mnist": "mnist", "cifar": "cifar10", "digits": "digits"}[model.rsplit("-", 1)[1]]


# ---- one arm ------------------------------------------------------------------------------------


def untrain(
    wf: wfilter.FilteredModel, images: Tensor, labels: Tensor | None, args: argparse.Namespace
) -> float:
    """In place: untrain on these images; the CPU seconds it took."""
    augment = None
    if args.shift:
        flip = dataset_of(args.model) == "cifar10"
        augment = partial(data.shift_and_flip, pad=args.shift, flip=flip)
    began = time.process_time()
    train = wfilter.InMemory(images, labels, args.batch_size, augment)
    recipe = changed(args.recipe, args.set)
    wfilter.untrain(wf, train, recipe=recipe, steps=args.steps, seed=args.seed)
    return time.process_time() - began


def run(arm: str, args: argparse.Namespace) -> dict:
    """One arm: make its images, untrain, measure on the other half of the test set."""
    torch.manual_seed(args.seed)
    code = commit()  # now: by the end of the run the repository may have moved on
    spec, name = f"wfilter:{args.model}", dataset_of(args.model)
    model = zoo.build(spec, weights=args.weights or zoo.weights_path(spec))
    model.to(memory_format=torch.channels_last)
    test = data.load(name, "test", **vars(zoo.input_format(spec)))
    seen, kept = halves(test, args.test_images)
    before = time.process_time()
    made = source(arm, args, model, seen)
    images = made.images.contiguous(memory_format=torch.channels_last)
    classes = answers(model, images) if made.labels is None else made.labels
    counts, unique = classes.bincount(minlength=10).tolist(), len(images)
    if arm == "other":
        images = images[balanced(classes, torch.Generator().manual_seed(args.seed))]
    making = time.process_time() - before
    wf = wfilter.apply_weight_filtering(model, class_names=test.class_names)
    untraining_took = untrain(wf, images, made.labels, args)
    figures = untraining.measure(wf, kept, args.seed, SIZES, args.set_images)
    gates = wf.alphas.detach().sigmoid()
    return {
        "model": args.model,
        "arm": arm,
        "source": made.text,
        "images": unique,
        "answers": counts,
        "recipe": args.recipe,
        "set": args.set,
        "seed": args.seed,
        "steps": args.steps,
        "batch_size": args.batch_size,
        "shift": args.shift,
        "test_images": len(kept),
        **figures,
        "closed": round(100 * float((gates < 0.5).float().mean()), 3),
        "make_cpu_seconds": round(making, 1),
        "untrain_cpu_seconds": round(untraining_took, 1),
        "command": told_command(),
        "commit": code,
        "environment": environment(),
    }


# ---- lines and table ----------------------------------------------------------------------------


def table(lines: list[dict]) -> str:
    """One row per model, arm and source of images; means over seeds."""
    groups: dict[tuple, list[dict]] = {}
    for line in lines:
        text = ", ".join([line["source"], *line.get("set", [])])
        key = (line["model"], line["arm"], text, line["steps"], line["images"])
        groups.setdefault(key, []).append(line)
    rows = [
        "| model | untrained from | images | steps x images | shift | seeds | tested on | original "
        "| logit mask | Acc_r | Acc_f (worst class) | sets of 3: Acc_r / Acc_f (mask) "
        "| closed | cpu s: images + untraining |",
        "|" + "---|" * 14,
    ]
    for (model, arm, text, steps, images), runs in groups.items():
        mean = lambda key: statistics.mean(r[key] for r in runs)  # noqa: E731, B023
        one, three = ([r["sets"][size] for r in runs] for size in ("1", "3"))
        mask, *sets = (
            statistics.mean(s[key] for s in found)
            for found, key in (
                (one, "logit_mask"),
                (three, "acc_r"),
                (three, "acc_f"),
                (three, "logit_mask"),
            )
        )
        first = runs[0]
        rows.append(
            f"| {model} | {arm}: {text} | {images:,} | {steps} x {first['batch_size']} "
            f"| {first['shift']} | {len(runs)} | {first['test_images']:,} "
            f"| {mean('original'):.2f} | {mask:.2f} | {mean('acc_r'):.2f} "
            f"| {mean('acc_f'):.2f} ({max(r['acc_f_worst'] for r in runs):.2f}) "
            f"| {sets[0]:.2f} / {sets[1]:.2f} ({sets[2]:.2f}) | {mean('closed'):.2f} % "
            f"| {mean('make_cpu_seconds'):.0f} + {mean('untrain_cpu_seconds'):.0f} |"
        )
    return "\n".join([*rows, ""])


def page(lines: list[dict]) -> str:
    return (
        "# Untraining without the training set\n\n"
        "Rebuilt by `python benchmarks/without_training_set.py --table` from "
        "`without_training_set.jsonl`, which has each run's command, seed, commit and environment. "
        "All arms are tested on the second half of the test set, which none of them has seen. "
        "Acc_r: one random other row per image; Acc_f: its own row (0 is wanted); sets: one random "
        "set of three classes without, or with, the image's class; logit mask: Acc_r of the base "
        "model with the forgotten logits left out. Images: different ones used; those of `other` "
        "are drawn so that the base model's answers are equally frequent. "
        "Shift: pixels by which images are moved at random, CIFAR images are also mirrored.\n\n"
        + table(lines)
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18-mnist")
    parser.add_argument("--weights", type=Path, help="safetensors file of the original")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--other", help="dataset of the arm `other`")
    parser.add_argument("--frame", type=int, help="empty pixels around its images")
    parser.add_argument("--recipe", default="distill")
    add_set(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--shift", type=int, default=2, help="pixels; CIFAR images also mirrored")
    parser.add_argument("--train-images", type=int, default=20_000)
    parser.add_argument("--test-images", type=int, default=5_000)
    parser.add_argument("--set-images", type=int, default=2_000, help="test images under sets")
    parser.add_argument("--synthetic-images", type=int, default=400)
    parser.add_argument("--iterations", type=int, default=80, help="per synthetic image")
    name = "without_training_set.jsonl"
    parser.add_argument("--out", type=Path, default=untraining.RESULTS / name)
    parser.add_argument("--table", action="store_true", help="only rebuild the table")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    for arm in [] if args.table else args.arms:
        untraining.store(run(arm, args), args.out)
    lines = [json.loads(line) for line in untraining.lines_of(args.out)]
    args.out.with_suffix(".md").write_text(page(lines))


if __name__ == "__main__":
    main()
