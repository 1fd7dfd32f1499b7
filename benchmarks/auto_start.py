"""Gates that start open against gates that start from the linear solution, step for step.

    python benchmarks/auto_start.py            # about two CPU minutes
    python benchmarks/auto_start.py --table    # only rebuild results/auto_start.md

The first stage of the default recipe on problems it was developed on, judged after so many steps
on held-out training images as the recipe judges itself; no test image is looked at. CPU seconds
leave the judging out and count the solving.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import torch

import wfilter
from common import RESULTS, append_line, origin, read_lines
from problems import problem, targets_of
from wfilter import data
from wfilter.untraining.auto import AutoRun
from wfilter.untraining.recipes import AUTO, LINEAR
from wfilter.untraining.solve import solve

FILE = RESULTS / "auto_start.jsonl"
NETWORKS, STAGES = ("cnn-digits", "mlp-digits"), ("soft 0.5", "soft 1")
MARKS = (0, 25, 50, 100, 200)


def start_solved(run: AutoRun) -> None:
    """In place: the linear solution, no further from open than gates start towards it."""
    sample, start = run.sample, run.settings.start
    fit = (~sample.held).nonzero()[:, 0]
    solved = solve(
        run.wf, lambda i: sample.read(fit[i]), run.base[fit], sample.rows[fit], LINEAR, run.seed
    )
    for _ in solved:
        pass
    with torch.no_grad():
        run.wf.alphas.clamp_(-start, start)
    run.wf.pin_open(run.pinned)


def run(name: str, stage: str, begins: str, seed: int) -> dict[str, Any]:
    model, train, _ = problem(name, seed)
    first = train.batch(torch.arange(1))[0]
    wf = wfilter.apply_weight_filtering(
        model, num_classes=train.num_classes, targets=targets_of(model), example_input=first
    )
    recipe = dataclasses.replace(AUTO, stages=stage, steps=MARKS[-1])
    round_ = AutoRun(wf, data.batches(train, 64), None, recipe, seed)
    round_.clock = lambda: 0.0
    round_.look()
    round_.begin(fresh=True)
    round_.keep()
    began = time.process_time()
    if begins == "solved":
        start_solved(round_)
    seconds, marks = time.process_time() - began, []
    for mark in MARKS:
        began = time.process_time()
        while round_.position < mark:
            round_._step()
        seconds += time.process_time() - began
        found = round_.judgement()
        retain, forget = found.means()
        worst = max(found.forget.values())
        figures = {"steps": mark, "seconds": seconds, "score": 100 * found.score(recipe)}
        figures |= {"acc_r": 100 * retain, "acc_f": 100 * forget, "worst": 100 * worst}
        marks.append(figures | {"lagging": len(found.lagging(recipe))})
    told = {"problem": name, "stage": stage, "start": begins, "seed": seed, "marks": marks}
    return told | origin()


def table() -> str:
    text = (
        "# Gates from open, gates from the linear solution\n\nRebuilt by `python "
        "benchmarks/auto_start.py --table` from `auto_start.jsonl`. After so many steps: distance "
        "from the bar of `auto` (points, mean over rows, sets included), Acc_r / Acc_f on held-out "
        "training images, CPU seconds.\n\n| problem, stage, seed | start | "
        f"{' | '.join(f'{mark} steps' for mark in MARKS)} |\n|---|---|{len(MARKS) * '---|'}\n"
    )
    latest = {
        tuple(x[k] for k in ("problem", "stage", "seed", "start")): x for x in read_lines(FILE)
    }
    for line in latest.values():
        cells = [f"{m['score']:.1f}: {m['acc_r']:.1f} / {m['acc_f']:.1f}, {m['seconds']:.1f} s"
                 for m in line["marks"]]  # fmt: skip
        text += f"| {line['problem']}, {line['stage']}, {line['seed']} | {line['start']} | "
        text += " | ".join(cells) + " |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problem", choices=NETWORKS, nargs="+", default=NETWORKS)
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--table", action="store_true", help="only rebuild the table")
    args = parser.parse_args()
    asked = [(n, s, k) for k in args.seed for n in args.problem for s in STAGES]
    chosen = () if args.table else asked
    for name, stage, seed in chosen:
        for begins in ("open", "solved"):
            append_line(FILE, run(name, stage, begins, seed))
    (RESULTS / "auto_start.md").write_text(table())


if __name__ == "__main__":
    main()
