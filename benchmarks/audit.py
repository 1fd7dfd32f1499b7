"""Audit our filters and rivals against converged networks that never saw the class.

    WFILTER_DATA=... python benchmarks/audit.py --dataset mnist
    WFILTER_DATA=... python benchmarks/audit.py --dataset cifar10 --classes 1 3 8

needs the networks of ``benchmarks/references.py`` (``--references``; by default the environment
variable ``WFILTER_REFERENCES``, or ``wfilter-references`` in the home folder). Every method and
class is a JSON line of ``benchmarks/results/audit_mnist.jsonl`` as soon as it is measured; the same
command, given again, goes on where it stopped. ``--table`` writes ``audit_mnist.md`` from those
lines, which every run does at its end, too. Where a column was measured again with other settings
(``--metrics few_shot``), the table has the latest.

Accuracies are of the whole test set; features are probed on ``--sample`` test images and fitted on
``--train-sample`` training images, the same number of each class. The line ``wfilter`` is one
untraining of all classes with no setting at all, ``feature rows`` the rows in front of the head
alone (``recipe="reroute"``). A method whose name is a rival of ``wfilter.baselines`` is the model
that ``benchmarks/rivals.py`` stored, its learning rate chosen on held-out images; where there is
none it is made here, from the whole training set with its paper's settings.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import wfilter
from common import RESULTS, append_line, origin, read_lines
from wfilter import Audit, Report, baselines, data, zoo
from wfilter.evaluation.audit import BUDGET, METRICS, image_counts, problem_of
from wfilter.evaluation.render import number
from wfilter.evaluation.run import report_on
from wfilter.evaluation.verdict import FEATURES, OUTPUTS
from wfilter.metrics import Method

NETWORKS = {"mnist": "cnn-mnist", "cifar10": "cnn_small-cifar"}
FOLDER = os.environ.get("WFILTER_REFERENCES", Path.home() / "wfilter-references")
SETTINGS = ("sample", "train_sample", "threads")
OURS = {"wfilter": "auto", "feature rows": "reroute"}
FOLDED = {("cifar10", "wfilter"), ("cifar10", "feature rows"), ("mnist", "feature rows")}
METHODS = ("original", "retrained", *OURS, "logit_mask", "projection")


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    lines = RESULTS / f"audit_{args.dataset}.jsonl"
    if not args.table:
        Runs(args, lines).run()
    write_table(lines, args.dataset)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", choices=tuple(NETWORKS), default="mnist")
    parser.add_argument("--network", help="a name of the zoo; default: that of the references")
    parser.add_argument("--references", type=Path, default=FOLDER)
    parser.add_argument("--classes", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=BUDGET.test_images)
    parser.add_argument("--train-sample", type=int, default=BUDGET.train_images)
    parser.add_argument("--metrics", nargs="+", default=list(METRICS), help="some of an audit's")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="only write the table")
    return parser.parse_args()


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    """What a line measures: its method, class, seed and metrics."""
    return (line["method"], line["class"], line["seed"], *line.get("metrics", METRICS))


class Runs:
    """The references, the data, and what is measured already."""

    def __init__(self, args: argparse.Namespace, lines: Path) -> None:
        self.args, self.lines = args, lines
        self.network = args.network or NETWORKS[args.dataset]
        inputs = vars(zoo.input_format(f"wfilter:{self.network}"))
        self.train = data.load(args.dataset, "train", **inputs)
        self.test = data.load(args.dataset, "test", **inputs)
        self.base = self.load("")
        self.filtered: dict[str, tuple[wfilter.FilteredModel, float]] = {}

    def path(self, suffix: str) -> Path:
        return Path(self.args.references) / f"{self.network}-s0{suffix}.safetensors"

    def load(self, suffix: str) -> torch.nn.Module:
        model = zoo.create(self.network, self.test.num_classes)
        model = zoo.load_weights(model, self.path(suffix)).eval()
        return model.to(memory_format=torch.channels_last)  # half the time on a CPU

    def run(self) -> None:
        done = {key(line) for line in read_lines(self.lines)}
        for row in self.args.classes:
            for method in self.args.methods:
                if method == "retrained" and not self.path(f"-without{row}").exists():
                    print(f"no network without class {row} yet: left out", flush=True)
                elif (method, row, self.args.seed, *self.args.metrics) not in done:
                    self.measure(method, row)

    def measure(self, name: str, row: int) -> None:
        """One method on one class, as a JSON line."""
        args, began = self.args, time.perf_counter()
        sizes = {"test_images": args.sample, "train_images": args.train_sample}
        budget = replace(BUDGET, **sizes)
        problem = problem_of(
            self.base, self.test, self.train, row, self.base, budget, seed=args.seed
        )
        method = self.make(name, row)
        report = report_on(method, problem, args.metrics)
        report = replace(report, conditions={**report.conditions, "images": image_counts(problem)})
        took = round(time.perf_counter() - began, 1)
        settings = {name: getattr(args, name) for name in SETTINGS}
        line = {"benchmark": "audit", "dataset": args.dataset, "network": self.network}
        line |= {"method": name, "class": row, "seed": args.seed, "seconds": took}
        line |= {"metrics": args.metrics, "counted": "layers of the original"}
        line |= {"settings": settings, "report": json.loads(report.to_json())}
        append_line(self.lines, {**line, **origin()})
        print(f"{name} {row}: {took} s", flush=True)

    def make(self, name: str, row: int) -> Method:
        if name == "original":
            return Method.of_one(name, self.base, (row,))
        if name == "retrained":
            return Method.of_models(name, {row: self.load(f"-without{row}")})
        if name in OURS:
            wf, seconds = self.untrained(name)
            return Method.of_filtered(wf, (row,), name, seconds=seconds)
        stored = self.stored_rival(name, row)
        if stored is not None:
            return stored
        began = time.perf_counter()
        batches = data.batches(self.train, 128, shuffle=True, seed=self.args.seed)
        model = baselines.METHODS[name](self.base, row, batches)
        return Method.of_models(name, {row: model}, {row: time.perf_counter() - began})

    def stored_rival(self, name: str, row: int) -> Method | None:
        """The model that ``rivals.py`` made with a learning rate chosen on held-out images."""
        folder = Path(self.args.references)
        path = folder / "rivals" / f"{self.network}-s0-without{row}-{name}.pt"
        if not path.exists():
            return None
        line = next(x for x in read_lines(folder / "rivals.jsonl") if x["file"] == path.name)
        model = torch.load(path, weights_only=False).eval()
        return Method.of_models(name, {row: model}, {row: line["seconds"]})

    def untrained(self, name: str) -> tuple[wfilter.FilteredModel, float]:
        """Filters for all classes, made once, and the seconds they took."""
        if name not in self.filtered:
            example = torch.zeros(1, *self.test.image_shape)
            wf = wfilter.apply_weight_filtering(
                self.load(""), class_names=self.test.class_names, example_input=example
            )
            images, labels = self.train.batch(torch.arange(len(self.train)))
            stored = wfilter.InMemory(images, labels, 64)
            history = wfilter.untrain(
                wf, stored, recipe=OURS[name], seed=self.args.seed, progress=False
            )
            print(f"{name}: {history.stopped} {history.verdict}", flush=True)
            self.filtered[name] = (wf, history.seconds)
        return self.filtered[name]


def comparable(line: dict[str, Any]) -> Report:
    """The report of a line, without depths that were read from other layers than the original's.

    Lines without ``"counted"`` are older than counting the layers in the original. Rows folded into
    a layer of their own shifted them.
    """
    report = Report.from_json(json.dumps(line["report"]))
    if "counted" in line or (line["dataset"], line["method"]) not in FOLDED:
        return report
    columns = tuple(c for c in report.columns if c.name != "IDI" and c.name[:6] != "depth ")
    names = {c.name for c in columns}
    rows = {m: {n: c for n, c in row.items() if n in names} for m, row in report.rows.items()}
    return replace(report, columns=columns, rows=rows)


def latest(reports: list[Report]) -> list[Report]:
    """The reports, each of one method and class, without what a later one measured again.

    A column that is defined otherwise today goes for all methods alike.
    """
    kept: list[Report] = []
    defined: dict[str, Any] = {}
    seen: set[tuple[Any, ...]] = set()
    for report in reversed(reports):
        for column in report.columns:
            defined.setdefault(column.name, column)
        measured = {c.name: (*report.rows, *report.classes, c.name) for c in report.columns}
        names = {
            c.name for c in report.columns if defined[c.name] == c and measured[c.name] not in seen
        }
        seen |= {*measured.values()}
        rows = {m: {n: c for n, c in row.items() if n in names} for m, row in report.rows.items()}
        columns = tuple(c for c in report.columns if c.name in names)
        kept.append(replace(report, columns=columns, rows=rows))
    return kept[::-1]


def joined(lines: list[dict[str, Any]]) -> Report:
    """One report of lines of one seed, where a column was measured again with its latest figure."""
    return Report.join(latest([comparable(line) for line in lines]))


def write_table(lines: Path, dataset: str) -> None:
    """The tables and verdicts of all stored lines."""
    stored = read_lines(lines)
    if not stored:
        return
    first = [line for line in stored if line["seed"] == 0]
    parts = latest([comparable(line) for line in first])
    images: dict[str, dict[int, int]] = {}
    for part in parts:
        for kind, counts in part.conditions["images"].items():
            images.setdefault(kind, {}).update(counts)
    whole = Report.join(parts)
    whole = replace(whole, conditions={**whole.conditions, "images": images})
    commands = "\n".join(
        f"    {command}" for command in dict.fromkeys(x["command"] for x in stored)
    )
    classes = ", ".join(map(whole.name_of, whole.classes))
    measured = {method: {x["class"] for x in first if x["method"] == method}
                for method in whole.methods}  # fmt: skip
    head = HEAD.format(
        dataset=dataset, network=stored[0]["network"], commands=commands, classes=classes,
        fewer=on_fewer_classes(measured, whole),
    )  # fmt: skip
    text = head + Audit(whole).to_markdown() + where_we_lose(whole, measured)
    text += over_seeds(stored) + PUBLISHED[dataset]
    lines.with_suffix(".md").write_text(text)


def on_fewer_classes(measured: dict[str, set[int]], report: Report) -> str:
    """A sentence on the methods whose means are of fewer classes than the others'."""
    fewer = [
        f"{method} ({', '.join(report.name_of(row) for row in sorted(classes))})"
        for method, classes in measured.items()
        if classes != {*report.classes}
    ]
    if not fewer:
        return ""
    return (
        f"\n**Measured on fewer classes: {', '.join(fewer)}.** Their means are of these alone; set "
        "them beside the verdicts of the same classes, not beside the other means.\n"
    )


def where_we_lose(report: Report, measured: dict[str, set[int]]) -> str:
    """Every column with a direction in which another method, on the same classes, beats ours."""
    parts = [lost_by(report, name, measured) for name in OURS if name in report.methods]
    return "\n".join(["", *parts])


def over_seeds(stored: list[dict[str, Any]]) -> str:
    """Ours by seed, on the classes that all its seeds have: what is random in it, and how much."""
    names = ["Acc_r", *OUTPUTS, *FEATURES, *(f"{shots}-shot Acc_f" for shots in BUDGET.shots)]
    rows = []
    for method in OURS:
        lines = [x for x in stored if x["method"] == method]
        seeds = sorted({x["seed"] for x in lines})
        common = set.intersection(*({x["class"] for x in lines if x["seed"] == s} for s in seeds))
        if len(seeds) < 2 or not common:
            continue
        reports = [joined([x for x in lines if x["seed"] == s and x["class"] in common])
                   for s in seeds]  # fmt: skip
        rows += [
            f"| {method} | {seed} | {', '.join(map(report.name_of, sorted(common)))} | "
            + " | ".join(number(report.value(method, n), report.column(n).kind) for n in names)
            + " |"
            for seed, report in zip(seeds, reports)
        ]
    if not rows:
        return ""
    head = ["method", "seed", "classes", *names]
    table = [f"| {' | '.join(head)} |", "|---|---:|---|" + "---:|" * len(names), *rows]
    return "\n".join(["", "### Seeds", "", *table, ""])


def lost_by(report: Report, ours_name: str, measured: dict[str, set[int]]) -> str:
    lost = []
    for column in report.columns:
        ours = report.value(ours_name, column.name)
        if ours is None or column.better not in ("higher", "lower"):
            continue
        sign = 1 if column.better == "higher" else -1
        others = {m: report.value(m, column.name) for m in report.methods}
        better = [
            f"{method} ({number(value, column.kind)})"
            for method, value in others.items()
            if value is not None and method not in ("original", "random network", *OURS)
            if measured[method] == measured[ours_name]
            if sign * (value - ours) > 0
        ]
        if better:
            lost.append(f"- {column.name}: {number(ours, column.kind)}, {', '.join(better)}")
    return f"### Where {ours_name} loses, and to whom\n\n" + "\n".join(lost) + "\n"


HEAD = """# Audit on {dataset}, {network}

Measured so far: class {classes}. Every number is of the class that was forgotten, mean over these
classes, beside that of a network retrained from scratch without it. ± is the standard error over
images, not over trainings. Made by

{commands}

from the lines of the `.jsonl` beside this file.
{fewer}
"""
PUBLISHED = {
    "mnist": "",
    "cifar10": """
### Published, for orientation: another network, not the same experiment

CIFAR-10, ResNet-18, class truck, from CoUn (NeurIPS 2025, Table 8):

| method | RA | UA | TA | MIA | average gap |
| --- | ---: | ---: | ---: | ---: | ---: |
| Retrain | 100 | 100 | 95.14 | 100 | 0 |
| FT | 99.97 | 100 | 94.99 | 100 | 0.04 |
| NegGrad+ | 99.98 | 100 | 95.10 | 100 | 0.02 |
| l1-sparse | 100 | 100 | 95.10 | 100 | 0.01 |
| SalUn | 100 | 100 | 95.11 | 100 | 0.01 |
| NoT | 100 | 100 | 95.14 | 100 | 0.00 |
| CoUn | 100 | 100 | 95.18 | 100 | 0.01 |
""",
}


if __name__ == "__main__":
    main()
