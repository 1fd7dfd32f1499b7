"""Run the rivals on a reference network, learning rates chosen on held-out training images.

    python benchmarks/rivals.py --recipe mnist --classes 1 3 8

needs the networks of ``references.py --recipe mnist --each 1 3 8``. Each rival forgets one class at
a time with its paper's settings on nine tenths of the training images; the last tenth says whether
its learning rate serves, and where it does not chooses a tenth or ten times it. The finished model
goes to ``OUT/rivals/cnn-mnist-s0-without3-salun.pt`` (read it with ``torch.load(...,
weights_only=False)``: your own file), a JSON line to ``OUT/rivals.jsonl``. Methods and classes that
have a line are not run again, so the same command goes on. ``--collect`` stores the lines and makes
the table. ``--bfloat16`` trains in half precision, and measures in float32.

Test images only measure. Accuracies are of the whole training and test sets; the probe is a
logistic regression on the features of 5,000 training images of all classes, read at the forgotten
class.
"""

from __future__ import annotations

import argparse
import statistics
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common import append_line, origin, read_lines
from references import RECIPES, folder, stem_name, store
from wfilter import baselines, data, metrics, zoo

# cheapest first: what needs no training, then what sees the forget half only, then the others
METHODS = (
    *("original", "retrained", "logit_mask", "projection", "leace", "esc", "cse", "ssd"),
    *("delete", "boundary_shrink", "negative_gradients", "bad_teaching", "scrub"),
    *("random_labels", "fine_tuning", "l1_sparse", "neggrad_plus", "salun"),
)
LOG = "rivals.jsonl"
PROBE_IMAGES = 5000
COLUMNS = {
    "test_retain": "Acc_r", "test_forget": "Acc_f", "train_retain": "RA", "train_forget": "1 - UA",
    "probe_forget": "probe", "mean_forget": "nearest mean", "seconds": "seconds",
}  # fmt: skip


def main() -> None:
    args = parse_arguments()
    if args.collect:
        store(args.out / LOG, f"rivals_{args.recipe}.jsonl", lambda lines: table(lines, args))
        return
    done = {(line["method"], line["forget"]) for line in mine(read_lines(args.out / LOG), args)}
    problem = Problem(args)
    for method in args.methods:
        for label in args.classes:
            if (method, label) not in done:
                line = problem.line(method, label)
                append_line(args.out / LOG, line)
                print({key: line[key] for key in ("method", "forget", *COLUMNS, "lr")}, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=tuple(RECIPES), required=True)
    parser.add_argument("--classes", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, help="data folder (default: WFILTER_DATA)")
    parser.add_argument("--out", type=Path, default=folder(), help="where the references are")
    parser.add_argument("--bfloat16", action="store_true", help="train rivals in half precision")
    parser.add_argument("--collect", action="store_true", help="store the lines of --out, only")
    return parser.parse_args()


def mine(lines: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The lines of this recipe and seed."""
    return [line for line in lines if (line["recipe"], line["seed"]) == (args.recipe, args.seed)]


class Problem:
    """A reference network and its data, with a tenth of the training images held out."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.name = args, RECIPES[args.recipe]["model"]
        inputs, source = (
            vars(zoo.input_format(f"wfilter:{self.name}")),
            RECIPES[args.recipe]["data"],
        )
        self.train, self.test = (
            data.load(source, split, args.root, **inputs) for split in ("train", "test")
        )
        kept, held_out = data.hold_out(self.train, 0.1, seed=args.seed)
        self.batches = data.batches(kept, 128, shuffle=True, seed=args.seed)
        self.held_out = data.batches(held_out, 500)
        self.original = self.network()

    def network(self, *without: int) -> nn.Module:
        path = self.args.out / f"{stem_name(self.name, self.args.seed, *without)}.safetensors"
        if not path.exists():
            each = f" --each {without[0]}" if without else ""
            raise SystemExit(
                f"{path} is lacking. Make it first: python benchmarks/references.py "
                f"--recipe {self.args.recipe} --seed {self.args.seed}{each} --out {self.args.out}"
            )
        model = zoo.load_weights(zoo.create(self.name), path)
        return model.to(memory_format=torch.channels_last)  # half the time on a CPU

    def rival(self, method: str, label: int) -> baselines.Rival:
        if method == "retrained":
            return baselines.Rival(self.network(label), float("nan"))
        self.batches.epoch = 0  # the same order whatever ran before
        # Closed forms multiply matrices of statistics, which half precision would ruin.
        half = self.args.bfloat16 and "lr" in signature(baselines.METHODS[method]).parameters
        # Weights change inside: cached copies of them would be stale after the first step.
        with torch.autocast("cpu", torch.bfloat16, half, cache_enabled=False):
            return baselines.run(
                self.original, label, self.batches,
                methods=[method], held_out=self.held_out, seed=self.args.seed,
            )[method]  # fmt: skip

    def line(self, method: str, label: int) -> dict[str, Any]:
        rival = self.rival(method, label)
        stem = f"{stem_name(self.name, self.args.seed, label)}-{method}"
        path = self.args.out / "rivals" / f"{stem}.pt"
        path.parent.mkdir(exist_ok=True)
        torch.save(rival.model, path)
        tried = [{**vars(each), "score": each.score} for each in rival.tried]
        facts = {"benchmark": "rivals", "recipe": self.args.recipe, "seed": self.args.seed}
        facts |= {"method": method, "forget": label, "file": path.name, "lr": rival.lr}
        facts |= {"bfloat16": self.args.bfloat16}
        seconds = None if rival.seconds != rival.seconds else round(rival.seconds, 2)
        return {**facts, "tried": tried, "seconds": seconds, **self.measure(rival.model, label),
                **origin()}  # fmt: skip

    def measure(self, model: nn.Module, label: int) -> dict[str, float]:
        """Accuracies in percent."""
        found = {}
        for split, images in (("train", self.train), ("test", self.test)):
            logits, labels = metrics.collect_logits(model, data.batches(images, 500))
            both = metrics.set_accuracies(logits, labels, label)
            found |= {f"{split}_retain": both[0], f"{split}_forget": both[1]}
        few = data.batches(self.train.take(torch.arange(min(PROBE_IMAGES, len(self.train)))), 500)
        parts = [
            *metrics.collect_features(model, few),
            *metrics.collect_features(model, data.batches(self.test, 500)),
        ]
        found["probe_forget"] = metrics.linear_probe(*parts).by_class[label]
        found["mean_forget"] = metrics.nearest_class_mean(*parts).by_class[label]
        return {key: round(100 * value, 2) for key, value in found.items()}


def table(lines: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Mean over the classes, and the worst of them for Acc_f."""
    rows = [
        f"# Rivals on {RECIPES[args.recipe]['model']}",
        "",
        "Mean over the classes named; percent, whole training and test sets; RA and 1 - UA are of",
        "training images. Learning rates were chosen on a tenth of the training images that no",
        "rival trained on, the lines tell which were tried. Seconds are of the chosen rate alone,",
        "on one thread of a CPU shared with other work. Made by `python benchmarks/rivals.py",
        f"--recipe {args.recipe} --collect` from `rivals_{args.recipe}.jsonl`.",
        "",
        "| method | classes | " + " | ".join(COLUMNS.values()) + " | worst Acc_f | rates |",
        "|---|---|" + "---:|" * (len(COLUMNS) + 1) + "---|",
    ]
    for method in METHODS:
        own = [line for line in mine(lines, args) if line["method"] == method]
        if own:
            rows.append(row(method, sorted(own, key=lambda line: line["forget"])))
    return "\n".join([*rows, ""])


def row(method: str, lines: list[dict[str, Any]]) -> str:
    cells = []
    for key in COLUMNS:
        values = [line[key] for line in lines if line[key] is not None]
        cells.append(f"{statistics.mean(values):.2f}" if values else "-")
    classes = ", ".join(str(line["forget"]) for line in lines)
    worst = max(line["test_forget"] for line in lines)
    rates = ", ".join(f"{line['lr']:g}" for line in lines if line["lr"]) or "-"
    return f"| {method} | {classes} | " + " | ".join(cells) + f" | {worst:.2f} | {rates} |"


if __name__ == "__main__":
    main()
