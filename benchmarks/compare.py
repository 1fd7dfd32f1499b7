"""Every metric and every rival on ResNet-18 and CIFAR-10, in one table.

    WFILTER_DATA=... python benchmarks/compare.py --filters filters.safetensors

writes ``benchmarks/results/compare_cifar10_resnet18.md`` and ``.json``. Each method and class is a
JSON line in ``--lines`` as soon as it is measured; the same command, given again, goes on where it
stopped. Without ``--filters`` the filters are untrained first. The default budget is meant for half
an hour on one idle core: small, and stated in the table. Rivals forget one class at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import wfilter
from wfilter import baselines, data, zoo
from wfilter.columns import Budget
from wfilter.evaluate import make_bench, report_on
from wfilter.measures import MEASURES, Bench
from wfilter.report import Report
from wfilter.subjects import Subject, run

MODEL = "wfilter:resnet18-cifar"
STEM = "compare_cifar10_resnet18"


@dataclass(frozen=True)
class Setting:
    """Options of a rival, the size of its batches, and what they replace."""

    options: dict[str, Any]
    batch_size: int
    note: str


# The papers fine-tune on all of CIFAR-10: 5,000 images of the forgotten class, hundreds of steps.
SETTINGS = {
    "logit_mask": Setting({}, 64, "nothing is trained."),
    "projection": Setting({}, 64, "nothing is trained; the logit is masked as well."),
    "negative_gradients": Setting(
        {},
        64,
        "SGD 0.01, stops when a forget batch is at 0 % (ours: the papers give no settings).",
    ),
    "ssd": Setting(
        {},
        64,
        "alpha 10, lambda 1 and batches of 64 as in the paper, but importances from these images.",
    ),
    "bad_teaching": Setting(
        {"epochs": 4, "lr": 3e-4, "batch_size": 64},
        64,
        "4 epochs, Adam 3e-4, batches of 64 (paper: 1 epoch, Adam 1e-4, batches of 256).",
    ),
    "random_labels": Setting(
        {"epochs": 2}, 64, "2 epochs, SGD 0.01 (ours: the papers give no settings)."
    ),
    "salun": Setting(
        {"epochs": 3},
        32,
        "3 epochs, SGD 0.013, batches of 32 (paper: 10 epochs, SGD 0.013, batches of 256).",
    ),
    "scrub": Setting(
        {"epochs": 2, "max_epochs": 2, "forget_batch_size": 16, "lr": 2e-3},
        64,
        "2 epochs, both with a forget pass in batches of 16, SGD 2e-3 (paper: 3 epochs, 2 of them "
        "with a forget pass in batches of 512, SGD 5e-4).",
    ),
    "retrained": Setting(
        {},
        128,
        "SGD 0.1 one-cycle, from scratch without the class. Far from converged: see its Acc_r.",
    ),
}


def main() -> None:
    args = parse_arguments()
    work = Work(args)
    for key, make in work.units():
        if key not in work.lines:
            start = time.perf_counter()
            work.add(key, make())
            print(f"{key}: {time.perf_counter() - start:.0f} s", flush=True)
            work.write_table()
    work.write_table()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, help="data folder (default: WFILTER_DATA)")
    parser.add_argument("--filters", type=Path, help="filters written by wf.save")
    parser.add_argument("--seconds", type=float, help="what untraining those filters took")
    parser.add_argument("--untrain-steps", type=int, default=250, help="without --filters")
    parser.add_argument("--classes", type=int, nargs="+", default=[3, 1, 8])
    parser.add_argument("--methods", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test-images", type=int, default=400)
    parser.add_argument("--train-images", type=int, default=768, help="rivals train on these")
    parser.add_argument("--probe-images", type=int, default=300, help="of them, for the metrics")
    parser.add_argument("--retrain-images", type=int, default=1000)
    parser.add_argument("--retrain-epochs", type=int, default=6)
    parser.add_argument("--relearn-samples", type=int, default=100)
    parser.add_argument("--relearn-epochs", type=int, default=2)
    parser.add_argument("--relearn-rate", type=float, default=1e-4, help="of Adam, on weights")
    parser.add_argument("--shots", type=int, nargs="+", default=[5])
    parser.add_argument("--shot-steps", type=int, default=4)
    parser.add_argument("--curve-images", type=int, default=8)
    parser.add_argument("--curve-steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--lines", type=Path, help="default: beside the table, .jsonl")
    args = parser.parse_args()
    args.lines = args.lines or args.out / f"{STEM}.jsonl"
    return args


class Work:
    """The data, the models and the lines measured so far."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        model = zoo.build(MODEL, weights=zoo.weights_path(MODEL, args.root))
        self.base = model.to(memory_format=torch.channels_last)
        self.train = data.load("cifar10", "train", args.root)
        self.test = data.load("cifar10", "test", args.root).take(torch.arange(args.test_images))
        self.names = self.test.class_names
        self.wf, self.seconds = self.filters()
        self.bench = self.make_bench(tuple(args.classes))
        self.settings = {k: v for k, v in vars(args).items() if k in NUMBERS}
        self.digest = hashlib.sha256(self.wf.alphas.detach().numpy().tobytes()).hexdigest()[:12]
        self.lines = self.read_lines()

    def filters(self) -> tuple[wfilter.FilteredModel, float | None]:
        """From a file, or made here on the rivals' images."""
        if self.args.filters is not None:
            return wfilter.load(self.args.filters, self.base), self.args.seconds
        wf = wfilter.apply_weight_filtering(self.base, class_names=self.names)
        images, labels = self.train.batch(torch.arange(self.args.train_images))
        given = wfilter.InMemory(images, labels, batch_size=32)
        history = wfilter.untrain(wf, given, steps=self.args.untrain_steps, seed=self.args.seed)
        return wf, history.seconds

    def make_bench(self, rows: tuple[int, ...]) -> Bench:
        args = self.args
        budget = Budget(
            test_images=args.test_images,
            train_images=args.probe_images,
            relearn_samples=args.relearn_samples,
            relearn_epochs=args.relearn_epochs,
            relearn_rate=args.relearn_rate,
            shots=tuple(args.shots),
            shot_steps=args.shot_steps,
            curve_images=args.curve_images,
            curve_steps=args.curve_steps,
        )
        train = self.train.take(torch.arange(args.train_images))
        options: dict[str, Any] = {"train": train, "original": self.base, "budget": budget}
        return make_bench(self.base, self.test, rows=rows, seed=args.seed, **options)

    # ---- what to measure ----------------------------------------------------------------------

    def units(self) -> Iterator[tuple[str, Any]]:
        """A key and a function that measures, for every line; the cheap ones first."""
        classes = tuple(self.args.classes)
        named = ",".join(map(str, classes))
        yield f"original {named}", lambda: self.measure(self.original(), but=("curves", "sets"))
        yield f"random network {named}", lambda: report_on(self.random(), self.bench, ["probe"])
        yield f"sets {self.digest}", self.sets
        yield f"all rows {self.digest}", self.all_rows
        for row in classes:
            yield f"wfilter {self.digest} {row}", lambda row=row: self.ours(row)
            for method in self.args.methods:
                yield f"{method} {row}", lambda m=method, row=row: self.rival(m, row)

    def measure(self, subject: Subject, but: tuple[str, ...] = ("sets",)) -> Report:
        return report_on(subject, self.bench, [name for name in MEASURES if name not in but])

    def original(self) -> Subject:
        return Subject.of_one("original", self.base, self.bench.rows)

    def random(self) -> Subject:
        return Subject.of_one("random network", self.bench.random_networks[0], self.bench.rows)

    def ours(self, row: int) -> Report:
        return self.measure(Subject.of_filtered(self.wf, (row,), seconds=self.seconds))

    def sets(self) -> Report:
        def masked(images: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            return run(self.base, images).masked_fill(chosen, -torch.inf)

        mask = Subject("logit_mask", self.bench.rows, lambda row: self.base, sets=masked)
        subjects = (Subject.of_filtered(self.wf, self.bench.rows), mask)
        return Report.join(report_on(subject, self.bench, ["sets"]) for subject in subjects)

    def all_rows(self) -> Report:
        """Our accuracies, ZRF and curves over all ten rows; a table of its own."""
        bench = self.make_bench(tuple(range(10)))
        subjects = (
            Subject.of_one("original", self.base, bench.rows),
            Subject.of_filtered(self.wf, bench.rows),
        )
        return Report.join(report_on(s, bench, ["accuracy", "zrf"]) for s in subjects)

    def rival(self, method: str, row: int) -> Report:
        """Make the rival's model, then measure it."""
        setting, args = SETTINGS[method], self.args
        options, count = dict(setting.options), args.train_images
        if method == "retrained":
            options, count = {"epochs": args.retrain_epochs}, args.retrain_images
        train = self.train.take(torch.arange(count))
        if method not in ("logit_mask", "projection", "ssd"):
            options["seed"] = args.seed
        batches = data.batches(train, setting.batch_size, shuffle=True, seed=args.seed)
        made = baselines.run(self.base, row, batches, methods=[method], options={method: options})
        rival = made[method]
        subject = Subject.of_models(method, {row: rival.model}, {row: rival.seconds})
        return self.measure(subject, but=("sets", "curves"))

    # ---- lines and the table ------------------------------------------------------------------

    def read_lines(self) -> dict[str, Report]:
        """Lines measured with these settings."""
        if not self.args.lines.exists():
            return {}
        found = [json.loads(line) for line in self.args.lines.read_text().splitlines()]
        kept = [line for line in found if line["settings"] == self.settings]
        return {line["key"]: Report.from_json(json.dumps(line["report"])) for line in kept}

    def add(self, key: str, report: Report) -> None:
        self.lines[key] = report
        line = {"key": key, "settings": self.settings, "report": json.loads(report.to_json())}
        self.args.lines.parent.mkdir(parents=True, exist_ok=True)
        with self.args.lines.open("a") as log:
            log.write(json.dumps(line) + "\n")

    def write_table(self) -> None:
        keys = [key for key, _ in self.units() if key in self.lines]
        whole = f"all rows {self.digest}"
        parts = [self.lines[key] for key in keys if key != whole]
        if not parts:
            return
        report = Report.join(parts)
        report = replace(report, facts={**report.facts, "metrics": "all"})
        report.to_json(self.args.out / f"{STEM}.json")
        text = [heading(self), report.to_markdown()]
        if whole in self.lines:
            text.append("## All ten rows\n\n" + self.lines[whole].to_markdown())
        (self.args.out / f"{STEM}.md").write_text("\n".join(text), encoding="utf-8")


NUMBERS = (
    *("seed", "test_images", "train_images", "probe_images", "retrain_images", "retrain_epochs"),
    *("relearn_samples", "relearn_epochs", "shots", "shot_steps", "curve_images", "curve_steps"),
    *("classes", "relearn_rate"),
)


def heading(work: Work) -> str:
    """The title, how it was made, and where budgets differ from the papers'."""
    args = work.args
    notes = "\n".join(f"- {name}: {SETTINGS[name].note}" for name in args.methods)
    missing = [key for key, _ in work.units() if key not in work.lines]
    state = f"\nNot yet measured: {', '.join(missing)}.\n" if missing else ""
    spent = "unknown" if work.seconds is None else f"{work.seconds:.0f} s in all, ten rows"
    return f"""# ResNet-18 on CIFAR-10: every metric, every rival

`python benchmarks/compare.py`, one thread. Rivals forget one class at a time and train on the first
{args.train_images:,} training images; metrics use the first {args.test_images:,} test images (about
{args.test_images // 10} a class: a point of Acc_f is {1000 / args.test_images:.1f} %) and
{args.probe_images} training images. The retrained model saw the first {args.retrain_images:,}
training images {args.retrain_epochs} times, without augmentation. Seconds are wall time on a shared
machine. Our filters: {work.digest}, untraining {spent}.
{state}
Settings of the rivals, which their papers chose for all 50,000 images:

{notes}
"""


if __name__ == "__main__":
    main()
