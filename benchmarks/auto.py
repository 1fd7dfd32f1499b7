"""The default recipe on one problem after the other, with no setting for any of them.

    python benchmarks/auto.py --problem cnn-digits --seed 0
    python benchmarks/auto.py --all            # from cheap to dear, those that have no line yet
    python benchmarks/auto.py --table          # only rebuild results/auto.md

Problems are those of ``problems.py``; MNIST's networks and CIFAR-10's ViT are trained first, by
``references.py``. The first ``--test-images`` are run under every row (of ImageNet's under their
own and five others), and under random sets of 2, 3 and 5 classes with and without their class:
once as far as the first gate (or to the head, under feature rows), from there on for each row, and
the first of them as a user would, to see that this is the same. A JSON line a run goes to
results/auto.jsonl; of two lines for one problem and seed the later counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import wfilter
from common import RESULTS, append_line, origin, read_lines
from problems import PROBLEMS, problem, targets_of
from wfilter import data
from wfilter.metrics.accuracy import forget_accuracy, retain_accuracy
from wfilter.metrics.cells import RowScores
from wfilter.untraining.instant import Instant
from wfilter.untraining.kept import Kept
from wfilter.untraining.reroute import plain_head
from wfilter.untraining.sample import Sample

FILE = RESULTS / "auto.jsonl"
DEVELOPED_ON = ("cnn-digits", "mlp-digits", "vit-digits", "resnet18-cifar")
FEW_ROWS, OTHERS = 20, 5  # classes up to which an image is run under all rows; else under so many
BATCH = 50


def forgets(labels: Tensor, classes: int) -> Tensor:
    """The rows under which each image is run, ``(images, rows)``."""
    if classes <= FEW_ROWS:
        return torch.arange(classes).expand(len(labels), -1)
    scores = torch.rand(len(labels), classes, generator=torch.Generator().manual_seed(0))
    return scores.scatter(1, labels[:, None], 2.0).argsort(1, descending=True)[:, : 1 + OTHERS]


def random_sets(labels: Tensor, classes: int, size: int, own: bool) -> Tensor:
    """A random set for each image, with or without its own class."""
    scores = torch.rand(len(labels), classes, generator=torch.Generator().manual_seed(size))
    scores.scatter_(1, labels[:, None], 2.0 if own else -1.0)
    return scores.argsort(1, descending=True).argsort(1) < size


def both_halves(logits: Tensor, labels: Tensor, forget: Tensor) -> tuple[RowScores, RowScores]:
    """Acc_r and Acc_f of the rows that have images for them: of 1,000 classes some have none."""
    own = labels == forget
    return (
        retain_accuracy(logits, labels, forget, classes=set(forget[~own].tolist())),
        forget_accuracy(logits, labels, forget, classes=set(forget[own].tolist())),
    )


def answers_of(
    wf: wfilter.FilteredModel, test: data.ImageSet
) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """The base model's logits, and those of any images under rows or sets.

    What no row changes is computed once: all before the head where feature rows forget.
    """

    def read(index: Tensor) -> Tensor:
        return test.batch(index)[0]

    if wf.feature_rows is None:
        kept = Kept(wf, wf.alphas, read, len(test))
        return kept.fill([min(BATCH, len(test))]), kept.logits
    sample = Sample(read, test.labels, None, torch.ones(len(test), dtype=torch.bool))
    instant = Instant.look(wf, sample, plain_head(wf, read(torch.arange(1))))
    answer = instant.answer(wf.feature_rows)
    return instant.base, lambda index, forget: answer(index, forget, None)


@torch.no_grad()
def measure(wf: wfilter.FilteredModel, test: data.ImageSet) -> dict[str, float]:
    """Acc_r, Acc_f, the worst class and sets, in per cent."""
    labels, classes = test.labels, wf.num_classes
    every, rows = torch.arange(len(test)), forgets(test.labels, classes)
    plain, answer = answers_of(wf, test)
    some = every[:BATCH]
    as_a_user = wf(test.batch(some)[0], forget=labels[some])
    scale = float(as_a_user.abs().max())
    torch.testing.assert_close(answer(some, labels[some]), as_a_user, rtol=0.02, atol=0.01 * scale)
    logits = torch.cat([answer(every, forget) for forget in rows.T])
    retain, forget = both_halves(logits, labels.repeat(rows.shape[1]), rows.T.flatten())
    figures = {"original": 100 * wfilter.metrics.accuracy(plain, labels)}
    figures |= {"acc_r": 100 * retain.mean, "acc_f": 100 * forget.mean}
    figures |= {"worst_forget": 100 * forget.worst, "worst_retain": 100 * retain.worst}
    for size in (2, 3, 5):
        for name, own in (("r", False), ("f", True)):
            answers = answer(every, random_sets(labels, classes, size, own))
            figures[f"sets_{size}_{name}"] = 100 * wfilter.metrics.accuracy(answers, labels)
    return figures


@torch.no_grad()
def seconds_of_a_pass(wf: wfilter.FilteredModel, train: data.ImageSet, count: int) -> float:
    """What the base model alone takes for so many images, from a few of them."""
    images, _ = train.batch(torch.arange(min(128, len(train))))
    wf(images)
    began = time.process_time()
    wf(images)
    return (time.process_time() - began) * count / len(images)


def run(name: str, seed: int, test_images: int) -> dict[str, Any]:
    model, train, test = problem(name, seed)
    test = test.take(torch.arange(min(test_images, len(test))))
    wf = wfilter.apply_weight_filtering(
        model,
        num_classes=train.num_classes,
        targets=targets_of(model),
        example_input=test.batch(torch.arange(1))[0],
    )
    began = time.process_time()
    history = wfilter.untrain(wf, data.batches(train, 64), seed=seed, progress=False)
    seconds = time.process_time() - began
    return {
        "problem": name,
        "seed": seed,
        "cpu_seconds": seconds,
        "pass_seconds": seconds_of_a_pass(wf, train, history.images),
        "steps": len(history.records),
        "met": history.ended.value,
        "stage": history.fixed["stages"],
        "verdict": history.verdict,
        "choices": history.choices,
        "test_images": len(test),
        "closed": 100 * float((wf.alphas <= 0).float().mean()),
        **measure(wf, test),
        **origin(),
    }


def latest() -> list[dict[str, Any]]:
    """The last line of each problem and seed, in the order of the problems."""
    lines = {(line["problem"], line["seed"]): line for line in read_lines(FILE)}
    return [lines[key] for key in sorted(lines, key=lambda key: (PROBLEMS.index(key[0]), key[1]))]


def keeps_the_bar(x: dict[str, Any]) -> bool:
    """Whether the test images say so, too."""
    return x["acc_f"] <= 0.5 and x["worst_forget"] <= 3 and x["acc_r"] >= x["original"] - 0.5


def table() -> str:
    head = (
        "# The default recipe, no setting for any problem\n\nRebuilt by `python benchmarks/auto.py "
        "--table` from `auto.jsonl`, which has the choices each run made and what it said of "
        "itself. Developed on problems marked with *, whose test figures were seen on the way; the "
        "others were only run at the end. Per cent on test images; sets: right without / with the "
        "image's class in the set. The bar: Acc_f at most 0.5, no class above 3, Acc_r at most 0.5 "
        'below the original; "says" is the run\'s own verdict on held-out training images, '
        '"is" what the test images say. CPU seconds of one thread: all of it, and what the base '
        "model alone takes for the images that were looked at. A class of ImageNet has one test "
        "image, so that its worst class is 0 or 100. ImageNet's ResNet-18 was compressed and "
        "fine-tuned by others.\n\n"
        "| problem | seed | test images | original | Acc_r | Acc_f (worst class) | sets of 2 | "
        "sets of 3 | sets of 5 | closed | cpu s (one pass) | by | met: says | is |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|---|---|\n"
    )
    for x in latest():
        mark = "*" if x["problem"] in DEVELOPED_ON else ""
        sets = " | ".join(f"{x[f'sets_{n}_r']:.1f} / {x[f'sets_{n}_f']:.1f}" for n in (2, 3, 5))
        head += (
            f"| {x['problem']}{mark} | {x['seed']} | {x['test_images']:,} | {x['original']:.2f} | "
            f"{x['acc_r']:.2f} | {x['acc_f']:.2f} ({x['worst_forget']:.1f}) | {sets} | "
            f"{x['closed']:.1f} | {x['cpu_seconds']:.0f} ({x['pass_seconds']:.0f}) | {x['stage']} "
            f"| {'yes' if x['met'] == 'met' else 'no'} | {'yes' if keeps_the_bar(x) else 'no'} |\n"
        )
    missing = [name for name in PROBLEMS if name not in {x["problem"] for x in latest()}]
    return head + (f"\nNot run yet: {', '.join(missing)}.\n" if missing else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problem", choices=PROBLEMS)
    parser.add_argument("--all", action="store_true", help="all that have no line yet")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--test-images", type=int, default=2000)
    parser.add_argument("--table", action="store_true", help="only rebuild the table")
    args = parser.parse_args()
    chosen = [] if args.table else list(PROBLEMS) if args.all else [args.problem]
    done = {(x["problem"], x["seed"]) for x in read_lines(FILE)}
    for name in chosen:
        for seed in args.seed:
            if not (args.all and (name, seed) in done):
                append_line(FILE, run(name, seed, args.test_images))
                (RESULTS / "auto.md").write_text(table())
    (RESULTS / "auto.md").write_text(table())


if __name__ == "__main__":
    main()
