"""Every metric and every rival on ResNet-18, in one table.

    WFILTER_DATA=... OMP_NUM_THREADS=1 python benchmarks/compare.py
    ... python benchmarks/compare.py --dataset mnist --weights resnet18-mnist-s0.safetensors

writes ``benchmarks/results/compare_cifar10_resnet18.md`` and ``.json``, or those of MNIST, whose
images cost an eighth and get larger budgets. Each method and class is a
JSON line in ``--lines`` as soon as it is measured; the same command, given again, goes on where it
stopped. Filters and the shared part of retraining are made once and stored in ``--keep``. The
default budget is meant for an hour on one idle core: small, and stated in the table. Rivals forget
one class at a time. A second process may take some ``--methods`` with ``--rivals-only``.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional as F

import wfilter
from common import append_line, read_lines
from compare_settings import DEFAULTS, MODELS, SETTINGS, TITLES, UNTRAINED
from wfilter import baselines, data, zoo
from wfilter.evaluation.report import Report
from wfilter.evaluation.run import make_problem, report_on
from wfilter.metrics import METRICS, Budget, Method, Problem
from wfilter.metrics.method import run


def main() -> None:
    args = parse_arguments()
    work = Work(args)
    for key, make in () if args.table else work.units():
        if key not in work.lines:
            start = time.perf_counter()
            report = make()
            work.add(key, report)
            print(f"{key}: {time.perf_counter() - start:.0f} s, {accuracies(report)}", flush=True)
            work.write_table()
    work.write_table()


def accuracies(report: Report) -> str:
    """Acc_r / Acc_f of every method in a report, where it has them."""
    found = (
        [(report.value(m, "Acc_r"), report.value(m, "Acc_f")) for m in report.methods]
        if ("Acc_r" in {column.name for column in report.columns})
        else []
    )
    return ", ".join(f"{100 * r:.1f} / {100 * f:.1f}" for r, f in found if r is not None)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", choices=tuple(MODELS), default="cifar10")
    parser.add_argument("--weights", type=Path, help="of the original; default: from the data")
    parser.add_argument("--root", type=Path, help="data folder (default: WFILTER_DATA)")
    parser.add_argument(
        "--keep", type=Path, default=Path(tempfile.gettempdir()) / "wfilter-compare"
    )
    parser.add_argument("--filters", type=Path, help="written by wf.save; default: made here")
    parser.add_argument("--seconds", type=float, help="what untraining those filters took")
    parser.add_argument("--untrain-steps", type=int, default=200, help="without --filters")
    parser.add_argument("--rivals-only", action="store_true", help="leave our filters out")
    parser.add_argument("--table", action="store_true", help="of the lines there are; measure none")
    parser.add_argument("--classes", type=int, nargs="+", default=[3, 1, 8])
    parser.add_argument("--methods", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test-images", type=int, default=200)
    parser.add_argument("--train-images", type=int, default=512, help="rivals train on these")
    parser.add_argument("--probe-images", type=int, default=100, help="of them, for the metrics")
    parser.add_argument("--shared-images", type=int, default=8000, help="retraining, first part")
    parser.add_argument("--shared-epochs", type=int, default=4)
    parser.add_argument("--retrain-images", type=int, default=640, help="the second part")
    parser.add_argument("--retrain-epochs", type=int, default=1)
    parser.add_argument("--sample-images", type=int, default=100, help="of test, but for accuracy")
    parser.add_argument("--relearn-samples", type=int, default=64)
    parser.add_argument("--relearn-epochs", type=int, default=2)
    parser.add_argument("--relearn-rate", type=float, default=1e-4, help="of Adam, on weights")
    parser.add_argument("--shots", type=int, nargs="+", default=[1])
    parser.add_argument("--shot-steps", type=int, default=3)
    parser.add_argument("--curve-images", type=int, default=5)
    parser.add_argument("--curve-steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--lines", type=Path, help="default: beside the table, .jsonl")
    parser.set_defaults(**DEFAULTS[parser.parse_args().dataset])
    args = parser.parse_args()
    args.spec, args.stem = MODELS[args.dataset], f"compare_{args.dataset}_resnet18"
    args.lines = args.lines or args.out / f"{args.stem}.jsonl"
    return args


class Work:
    """The data, the models and the lines measured so far."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        weights = args.weights or zoo.weights_path(args.spec, args.root)
        self.base = zoo.build(args.spec, weights=weights).to(memory_format=torch.channels_last)
        inputs = vars(zoo.input_format(args.spec))
        self.train = data.load(args.dataset, "train", args.root, **inputs)
        test = data.load(args.dataset, "test", args.root, **inputs)
        self.test = test.take(torch.arange(args.test_images))
        self.names = self.test.class_names
        args.keep.mkdir(parents=True, exist_ok=True)
        if not args.rivals_only:
            self.wf, self.seconds = self.filters()
            alphas = self.wf.alphas.detach().numpy()
            self.digest = hashlib.sha256(alphas.tobytes()).hexdigest()[:12]
        self.problem = self.make_problem(tuple(args.classes))
        self.settings = {k: v for k, v in vars(args).items() if k in NUMBERS}
        self.lines = self.read_lines()

    def filters(self) -> tuple[wfilter.FilteredModel, float | None]:
        """From a file, or made here on the rivals' images and stored."""
        args, base = self.args, copy.deepcopy(self.base)
        if args.filters is not None:
            return wfilter.load(args.filters, base), args.seconds
        name = f"filters-{args.untrain_steps}-steps-{args.train_images}-images-seed-{args.seed}"
        recipe = hashlib.sha256(str(wfilter.RECIPES["distill"]).encode()).hexdigest()[:8]
        file = args.keep / f"{args.dataset}-{recipe}-{name}.safetensors"
        if not file.exists():
            wf = wfilter.apply_weight_filtering(base, class_names=self.names)
            images, labels = self.train.batch(torch.arange(args.train_images))
            given = wfilter.InMemory(images, labels, batch_size=32)
            start = time.process_time()
            wfilter.untrain(wf, given, recipe="distill", steps=args.untrain_steps, seed=args.seed)
            file.with_suffix(".seconds").write_text(str(time.process_time() - start))
            wf.save(file)
            base = wfilter.remove_weight_filtering(wf)
        seconds = float(file.with_suffix(".seconds").read_text())
        return wfilter.load(file, base), seconds

    def make_problem(self, rows: tuple[int, ...]) -> Problem:
        args = self.args
        budget = Budget(
            test_images=args.sample_images,
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
        return make_problem(self.base, self.test, classes=rows, seed=args.seed, **options)

    # ---- what to measure ----------------------------------------------------------------------

    def units(self) -> Iterator[tuple[str, Any]]:
        """A key and a function that measures, for every line; one class after the other."""
        classes = tuple(self.args.classes)
        named = ",".join(map(str, classes))
        ours = not self.args.rivals_only
        if ours:
            yield f"original {named}", lambda: self.measure(self.original(), but=("curves", "sets"))
            yield (
                f"random network {named}",
                lambda: report_on(self.random(), self.problem, ["probe"]),
            )
        for row in classes:
            if ours:
                yield f"wfilter {self.digest} {row}", lambda row=row: self.ours(row)
            for method in self.args.methods:
                yield f"{method} {row}", lambda m=method, row=row: self.rival(m, row)
        if ours:
            yield f"sets {self.digest}", self.sets
            yield f"all rows {self.digest}", self.all_rows

    def measure(self, method: Method, but: tuple[str, ...] = ("sets",)) -> Report:
        return report_on(method, self.problem, [name for name in METRICS if name not in but])

    def original(self) -> Method:
        return Method.of_one("original", self.base, self.problem.classes)

    def random(self) -> Method:
        return Method.of_one(
            "random network", self.problem.random_networks[0], self.problem.classes
        )

    def ours(self, row: int) -> Report:
        return self.measure(Method.of_filtered(self.wf, (row,), seconds=self.seconds))

    def sets(self) -> Report:
        def masked(images: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            return run(self.base, images).masked_fill(chosen, -torch.inf)

        mask = Method("logit_mask", self.problem.classes, lambda row: self.base, sets=masked)
        methods = (Method.of_filtered(self.wf, self.problem.classes), mask)
        return Report.join(report_on(method, self.problem, ["sets"]) for method in methods)

    def all_rows(self) -> Report:
        """Our accuracies, ZRF and curves over all ten rows; a table of its own."""
        problem = self.make_problem(tuple(range(10)))
        methods = (
            Method.of_one("original", self.base, problem.classes),
            Method.of_filtered(self.wf, problem.classes),
        )
        return Report.join(report_on(s, problem, ["accuracy", "zrf"]) for s in methods)

    def rival(self, method: str, row: int) -> Report:
        """Make the rival's model, then measure it."""
        setting, args = SETTINGS[method], self.args
        options, count, spent = dict(setting.options), args.train_images, 0.0
        if method == "retrained":
            shared, spent = self.shared()
            options |= {"factory": lambda: copy.deepcopy(shared), "epochs": args.retrain_epochs}
            count = args.retrain_images
        if method not in UNTRAINED:
            options["seed"] = args.seed
        train = self.train.take(torch.arange(count))
        batches = data.batches(train, setting.batch_size, shuffle=True, seed=args.seed)
        start = time.process_time()
        model = baselines.METHODS[method](self.base, row, batches, **options)
        spent += time.process_time() - start
        made = Method.of_models(method, {row: model}, {row: spent})
        return self.measure(made, but=("sets", "curves"))

    def shared(self) -> tuple[nn.Module, float]:
        """The part of retraining that serves all classes under test, since it sees none of them.

        CIFAR images are halved in width: they cost a quarter.
        """
        args = self.args
        name = f"shared-{args.classes}-{args.shared_images}-{args.shared_epochs}-{args.seed}"
        file = args.keep / f"{args.dataset}-{name}.safetensors"
        if not file.exists():
            train = self.train.take(torch.arange(args.shared_images))
            augment = AUGMENT[args.dataset]
            batches = data.batches(train, 128, shuffle=True, seed=args.seed, augment=augment)
            options: dict[str, Any] = {"epochs": args.shared_epochs, "seed": args.seed}
            start = time.process_time()
            model = baselines.retrained(self.base, args.classes, batches, **options)
            file.with_suffix(".seconds").write_text(str(time.process_time() - start))
            save_model(model, str(file))
        model = zoo.build(args.spec).to(memory_format=torch.channels_last)
        load_model(model, str(file))
        return model, float(file.with_suffix(".seconds").read_text())

    # ---- lines and the table ------------------------------------------------------------------

    def read_lines(self) -> dict[str, Report]:
        """Lines measured with these settings."""
        return {
            line["key"]: Report.from_json(json.dumps(line["report"]))
            for line in read_lines(self.args.lines)
            if line["settings"] == self.settings_of(line["key"])
        }

    def settings_of(self, key: str) -> dict[str, Any]:
        """What must be the same for a line to be used again."""
        method = key.split()[0]
        return self.settings | (SETTINGS[method].options if method in SETTINGS else {})

    def add(self, key: str, report: Report) -> None:
        self.lines[key] = report
        settings = self.settings_of(key)
        line = {"key": key, "settings": settings, "report": json.loads(report.to_json())}
        append_line(self.args.lines, line)

    def write_table(self) -> None:
        if self.args.rivals_only:
            return
        keys = [key for key, _ in self.units() if key in self.lines]
        whole = f"all rows {self.digest}"
        parts = [self.lines[key] for key in keys if key != whole]
        if not parts:
            return
        report = Report.join(parts)
        report = replace(report, conditions={**report.conditions, "metrics": "all"})
        report.to_json(self.args.out / f"{self.args.stem}.json")
        text = [heading(self), report.to_markdown()]
        if whole in self.lines:
            text.append("## All ten rows\n\n" + self.lines[whole].to_markdown())
        (self.args.out / f"{self.args.stem}.md").write_text("\n".join(text), encoding="utf-8")


NUMBERS = (
    *("seed", "test_images", "train_images", "probe_images", "retrain_images", "retrain_epochs"),
    *("relearn_samples", "relearn_epochs", "shots", "shot_steps", "curve_images", "curve_steps"),
    *("classes", "relearn_rate", "sample_images", "shared_images", "shared_epochs"),
)


def halved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shifted, mirrored and at half the width."""
    return F.avg_pool2d(data.shift_and_flip(images, generator, flip=True), 2)


AUGMENT = {"cifar10": halved, "mnist": data.shift_and_flip}


def heading(work: Work) -> str:
    """The title, how it was made, and where budgets differ from the papers'."""
    args = work.args
    notes = "\n".join(f"- {name}: {SETTINGS[name].note}" for name in args.methods)
    missing = [key for key, _ in work.units() if key not in work.lines]
    state = f"\nNot yet measured: {', '.join(missing)}.\n" if missing else ""
    spent = "unknown" if work.seconds is None else f"{work.seconds:.0f} s"
    forgotten, tested = args.train_images // 10, args.test_images // 10
    title = "every metric, every rival" + (" (unfinished: see below)" if missing else "")
    halves = " at half the width" if args.dataset == "cifar10" else ""
    return f"""# ResNet-18 on {TITLES[args.dataset]}: {title}

`python benchmarks/compare.py --dataset {args.dataset}`, one thread, one seed. Small
budgets: read differences of a few points as noise.

- All methods learn from the same first {args.train_images} training images, about {forgotten} of
  the forgotten class. Seconds are processor time of one thread.
- Our filters ({work.digest}): recipe distill, {args.untrain_steps} steps of 32 images, all ten rows
  in one round: {spent}. Rivals forget one class at a time; what each took is its s/class.
- Accuracies are of the first {args.test_images} test images, about {tested} a class: one image is
  {100 / tested:.1f} points of a class's Acc_f. The other metrics use {args.sample_images} test and
  {args.probe_images} training images.
- The retrained model is a new network. Its first part is shared by the classes under test and sees
  none of them: {args.shared_epochs} epochs of the other classes among the first
  {args.shared_images:,} images{halves}, SGD 0.1. The second part is its own:
  {args.retrain_epochs} epoch of the first {args.retrain_images} images without its class, SGD 0.02.
{state}
Settings of the rivals, beside what their papers chose for 50,000 images. The lines of those that
are fine-tuned show what this budget buys, not what the methods can do with their papers':

{notes}
"""


if __name__ == "__main__":
    main()
