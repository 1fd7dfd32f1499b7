"""One round for all classes against one run for each class: time, accuracy and storage.

    python benchmarks/one_round.py                  # ResNet-18 on MNIST, weights by references.py
    python benchmarks/one_round.py --set forget_share=0.5
    python benchmarks/one_round.py --model resnet18-cifar --recipe auto     # the default
    python benchmarks/one_round.py --table          # only rebuild results/one_round.md

Both use the same recipe, images and step size. A run for a single class draws no other row: each
image of a batch is shown once, under that row, and ``forget_share`` of the images are of its class.
Either is given as few steps as it needs: the lengths in ``--steps`` are tried from the shortest on
until *every* row meets the bar on images held out of the training set (Acc_f at most ``--forget``,
Acc_r at most ``--retain`` points below the original); only the run that meets it is timed. The
accuracies in the table are those on the test set. Lines go to ``results/one_round.jsonl``; what is
there already is not run again.

The default recipe (``auto``) takes its own sample of images, the same for a round and for single
runs, holds some out, judges by its own bar and decides how long; ``--steps`` and the bar's options
are not for it. In a single run its row alone is drawn and judged, and no sets.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import wfilter
from auto import seconds_of_a_pass
from common import RESULTS, add_set, append_line, changed, commit, read_lines, told_command
from references import folder, stem_name
from wfilter import data, zoo
from wfilter.evaluation.bench import environment
from wfilter.metrics.accuracy import forget_accuracy, retain_accuracy
from wfilter.untraining import judging
from wfilter.untraining.history import Ended, History
from wfilter.untraining.objectives import Auto, Distill
from wfilter.untraining.pairs import Pairs
from wfilter.untraining.sample import Sample

ALL = "all"


def main() -> None:
    args = parse_arguments()
    lines = read_lines(args.out)
    done = {(name_of(line), line["row"]) for line in lines}
    wanted = name_of(vars(args))
    problem = None if args.table else load(args)
    for row in [ALL, *range(problem[1].num_classes)] if problem else []:
        if (wanted, row) not in done:
            lines.append(run(args, row, *problem))
            print(json.dumps(lines[-1]), flush=True)
            append_line(args.out, lines[-1])
    args.out.with_suffix(".md").write_text(table(lines))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18-mnist", choices=zoo.names())
    parser.add_argument("--recipe", default="distill", choices=tuple(wfilter.RECIPES))
    add_set(parser)
    parser.add_argument("--steps", type=int, nargs="+", default=[12, 25, 50, 100, 200, 400, 800])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--train-images", type=int, default=20_000)
    parser.add_argument("--held-out", type=int, default=1000, help="training images for the bar")
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--forget", type=float, default=1.0, help="highest Acc_f of a row, in %%")
    parser.add_argument("--retain", type=float, default=1.0, help="points of Acc_r a row may lose")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--originals", type=Path, default=folder(), help="of trained networks")
    parser.add_argument("--out", type=Path, default=RESULTS / "one_round.jsonl")
    parser.add_argument("--table", action="store_true", help="only rebuild the table")
    return parser.parse_args()


def load(args: argparse.Namespace) -> tuple[nn.Module, data.ImageSet, data.ImageSet, data.ImageSet]:
    """The original; images to untrain on, held out, and of the test set."""
    spec = f"wfilter:{args.model}"
    weights = args.originals / f"{stem_name(args.model, args.seed)}.safetensors"
    model = zoo.build(spec, weights=weights if weights.exists() else zoo.weights_path(spec))
    name, inputs = args.model.split("-")[1].replace("cifar", "cifar10"), zoo.input_format(spec)
    train, test = (data.load(name, split, **vars(inputs)) for split in ("train", "test"))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(args.seed))
    held_out, rest = order[: args.held_out], order[args.held_out :][: args.train_images]
    test = test.take(torch.arange(min(args.test_images, len(test))))
    model.to(memory_format=torch.channels_last)
    return model, train.take(rest), train.take(held_out), test


def run(args: argparse.Namespace, row: int | str, model: nn.Module, *parts: data.ImageSet) -> dict:
    """The shortest run whose rows all meet the bar, or the longest; its line."""
    code = commit()  # now: by the end of the run the repository may have moved on
    (train, held_out, test), recipe = parts, changed(args.recipe, args.set)
    rows = [*range(train.num_classes)] if row == ALL else [int(row)]
    if row != ALL and not isinstance(recipe, Auto):
        train = train.take(with_share(train.labels, rows[0], recipe.forget_share))
    images, labels = train.batch(torch.arange(len(train)))
    images = images.contiguous(memory_format=torch.channels_last)
    batches, tried = wfilter.InMemory(images, labels, args.batch_size), []
    itself = isinstance(recipe, Auto)  # it decides how long, and judges
    for steps in [None] if itself else args.steps:
        wf = wfilter.apply_weight_filtering(
            copy.deepcopy(model), class_names=train.class_names, example_input=images[:1]
        )
        before = time.process_time()
        with nullcontext() if row == ALL else only_row(rows[0]):
            history = wfilter.untrain(wf, batches, recipe=recipe, steps=steps, seed=args.seed)
        spent = round(time.process_time() - before, 1)
        tried.append({"steps": steps or len(history.records), "cpu_seconds": spent})
        met = history.ended is Ended.MET if itself else meets(args, measure(wf, held_out, rows))
        if met:
            break
    told = about_auto(wf, train, history) if itself else {}
    found = measure(wf, test, rows)
    figures = [round(mean(column), 3) for column in zip(*found)]
    parameters, units = sum(p.numel() for p in model.parameters()), wf.alphas.shape[1]
    bar = {"forget": args.forget, "retain": args.retain, "held_out": len(held_out)}
    if itself:
        bar = {name: getattr(recipe, f"bar_{name}") for name in ("forget", "worst", "retain")}
    return {
        **{"model": args.model, "seed": args.seed, "row": row},
        **{"recipe": recipe.name, "set": args.set},
        **{"met": met, **tried[-1], "tried": tried, "bar": bar, **told},
        **dict(zip(("original", "acc_r", "acc_f"), figures)),
        **{"acc_f_worst": round(max(forget for *_, forget in found), 3), "test_images": len(test)},
        **{"classes": train.num_classes, "alphas_of_a_row": units, "parameters": parameters},
        **{"command": told_command(), "commit": code, **environment()},
    }


def meets(args: argparse.Namespace, found: Sequence[tuple[float, float, float]]) -> bool:
    """Whether every row is within the bar that was asked for."""
    return all(f <= args.forget and r >= o - args.retain for o, r, f in found)


def about_auto(
    wf: wfilter.FilteredModel, train: data.ImageSet, history: History
) -> dict[str, float | str]:
    """What the default came to, and what the base model alone takes for the images it looked at."""
    seconds = seconds_of_a_pass(wf, train, history.images)
    return {
        "stage": history.fixed["stages"], "verdict": history.verdict,
        "pass_seconds": round(seconds, 1),
    }  # fmt: skip


def with_share(labels: Tensor, row: int, share: float) -> Tensor:
    """Indices of images of which ``share`` are of the class, as many as there are."""
    own, others = (found.nonzero()[:, 0] for found in (labels == row, labels != row))
    return torch.cat([own, others[: round(len(own) * (1 - share) / share)]])


@contextmanager
def only_row(row: int) -> Iterator[None]:
    """Untraining inside draws this row and no other: each image once, retained or forgotten."""

    def pairs(recipe: Distill, labels: Tensor, classes: int, generator: torch.Generator) -> Pairs:
        return Pairs(torch.arange(len(labels)), torch.full_like(labels, row), labels == row)

    judge = partial(judge_row, row=row)
    with (
        mock.patch.object(Distill, "make_pairs", pairs),
        mock.patch("wfilter.untraining.rounds.judge", judge),
        mock.patch("wfilter.untraining.auto.judge", judge),
    ):
        yield


def judge_row(
    answer: judging.Answer, sample: Sample, base: Tensor, classes: int, seed: int, *, row: int
) -> judging.Judgement:
    """What the default asks about all rows, of one: the same images, no other row, no sets."""
    index = sample.held.nonzero()[:, 0]
    labels = sample.rows[index]
    forget = torch.full_like(labels, row)
    logits = answer(index, forget, None)
    own = labels == row
    away = index[~own]
    generator = torch.Generator().manual_seed(seed)
    return judging.Judgement(
        classes,
        retain_accuracy(logits, labels, forget).by_row,
        forget_accuracy(logits, labels, forget).by_row,
        retain_accuracy(base[index], labels, forget).by_row,
        judging._changed(answer, away, forget[~own][:, None], classes, generator),
    )


@torch.inference_mode()
def measure(
    wf: wfilter.FilteredModel, images: data.ImageSet, rows: Sequence[int]
) -> list[tuple[float, float, float]]:
    """For each row the original's accuracy on the other classes, Acc_r and Acc_f, in per cent."""
    plain, filtered = [], []
    for some, truth in data.batches(images, 100):
        some = some.contiguous(memory_format=torch.channels_last)
        logits = wf.replicated(some, torch.tensor(rows).repeat(len(truth)))
        filtered.append(logits.view(len(truth), len(rows), -1).argmax(2) == truth[:, None])
        plain.append(wf(some).argmax(1) == truth)
    before, after, known = torch.cat(plain), torch.cat(filtered), images.labels
    percent = lambda hits: 100 * hits.float().mean().item()  # noqa: E731
    return [
        (percent(before[known != row]), percent(hits[known != row]), percent(hits[known == row]))
        for row, hits in zip(rows, after.T)
    ]


def table(lines: Sequence[dict[str, Any]]) -> str:
    """One round beside the runs for single classes, for every model and seed."""
    text = [
        "# One round for all classes against one run for each\n",
        "Rebuilt by `python benchmarks/one_round.py --table` from `one_round.jsonl`, which has the "
        "bar, lengths tried, commit and environment. Each run is the shortest of the lengths tried "
        "whose rows all meet the bar on held-out training images; the search is not counted. "
        "Accuracies on the test set, mean over rows. A round also learns sets of classes where its "
        "recipe draws them. Without filters it takes a network for each class.\n",
        "| model, recipe, settings, seed | | runs that met the bar | steps | cpu seconds "
        "| Acc_r / Acc_f (worst row) | original | numbers stored | as networks | test images |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    ratios = []
    names = [name_of(line) for line in lines]
    for name in dict.fromkeys(names):
        own = [line for line, its in zip(lines, names) if its == name]
        both = [[x for x in own if (x["row"] == ALL) is whole] for whole in (True, False)]
        for kind, some in zip(("one round", "single classes"), both):
            text += [f"| {name} | {kind} | {cells(some)} |"] if some else []
        if both[0] and len(both[1]) == both[0][0]["classes"]:
            spent = [sum(line["cpu_seconds"] for line in some) for some in both]
            times = f"{len(both[1])} single runs take {spent[1] / spent[0]:.2f} x the time"
            missed = sum(not line["met"] for line in own)
            ratios.append(f"- {name}: {times} of one round; {missed} of them missed the bar.")
            if "pass_seconds" in both[0][0]:
                ratios[-1] += beyond_the_pass(*both)
    return "\n".join([*text, "", *ratios, ""])


def beyond_the_pass(whole: Sequence[dict[str, Any]], single: Sequence[dict[str, Any]]) -> str:
    """What is left where the base model's work on the images is not counted."""
    left = [sum(x["cpu_seconds"] - x["pass_seconds"] for x in some) for some in (whole, single)]
    ways = " and ".join(dict.fromkeys(line["stage"] for line in single))
    return (
        f" Without the base model's pass over the images ({whole[0]['pass_seconds']:.0f} s, made "
        f"by every run) one round takes {left[0]:.0f} s, the single runs {left[1]:.0f} s. The "
        f"round ended by {whole[0]['stage']}, sets of classes included; the single runs, which "
        f"learn no sets, by {ways}."
    )


def name_of(line: Mapping[str, Any]) -> str:
    """What the runs that belong together are called."""
    return ", ".join([line["model"], line["recipe"], *line["set"], str(line["seed"])])


def cells(some: Sequence[dict[str, Any]]) -> str:
    """A line of the table: the runs of one kind together."""
    total = {key: sum(line[key] for line in some) for key in ("met", "steps", "cpu_seconds")}
    average = {key: mean(line[key] for line in some) for key in ("acc_r", "acc_f", "original")}
    rows = some[0]["classes"] if some[0]["row"] == ALL else len(some)
    worst = max(line["acc_f_worst"] for line in some)
    return (
        f"{total['met']} of {len(some)} | {total['steps']:,} | {total['cpu_seconds']:,.0f} "
        f"| {average['acc_r']:.2f} / {average['acc_f']:.2f} ({worst:.2f}) "
        f"| {average['original']:.2f} | {rows * some[0]['alphas_of_a_row']:,} "
        f"| {rows * some[0]['parameters']:,} | {some[0]['test_images']:,}"
    )


if __name__ == "__main__":
    main()
