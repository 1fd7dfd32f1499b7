"""Deep forgetting: what terms on the features do to a linear probe on the forgotten class.

    OMP_NUM_THREADS=1 python benchmarks/deep.py
    ... python benchmarks/deep.py --hard --ideas none,alike,adversary,rows,rows-ridge,rows-alike
    ... python benchmarks/deep.py --table

Every idea is a term added to the recipe's loss, made of the features that the head sees. Only
``rows-alike`` is in the library, as the recipe's ``pairs="row"`` and ``lambda_deep``: see the
findings in ``benchmarks/results/deep.md``. The network (64 features before its head) is trained
here on MNIST, which comes from WFILTER_DATA, and so is the bar: the same training without the
class. Lines go to ``benchmarks/results/deep.jsonl``; ``--table`` rebuilds ``deep.md`` from them.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wfilter
from common import RESULTS, append_line, commit, read_lines
from deep_ideas import IDEAS, Term
from wfilter import data, metrics, zoo
from wfilter.evaluation.bench import environment
from wfilter.untraining.objectives import Seen
from wfilter.untraining.pairs import Pairs
from wfilter.untraining.run import Run

TARGETS = ["2.*", "5.*", "8.*"]
HARD = {"gates": "hard", "start": 1.0, "optimiser": "row_adam", "learning_rate": 0.1}
FINDINGS = """
## What it says

Comparisons below are within seed 0; the table shows means over the seeds.

- The bar is high: 82 for `retrained` (mean of three seeds), against 93 for the original. A network
  that never saw a digit still has features that tell it apart. Untraining only the logits (`none`)
  goes to 87: about half of the way.
- Pulling forgotten samples to a place (`alike`, `alike-free`, `mean`, `nearest`, `fisher`) does not
  lower the probe. It standardises its input, so what only shrinks or shifts stays readable.
  `fisher` and `mmd` also cost much Acc_r.
- `adversary` lowers it by less than a point and costs 11 to 14 points of Acc_r. Rewarding closed
  gates (`closed`) costs Acc_r and gives nothing. Exact gates lower it by about a point by
  themselves, for 0.6 of Acc_r.
- What helps is the probe's own objective in closed form, with all images of a step under one row.
  `rows-alike` at weight 5 on five rows, three seeds: 88.4 to 83.7 against its control `rows`, two
  thirds of the way to the bar, for 1.5 points of Acc_r (0.5 against `none`); Acc_f stays 0. At
  weight 1, one seed: 2 points for 0.6.
- This one is in the library, off by default: `pairs="row", lambda_deep=5` in a `distill` recipe
  without sets. It untrains all ten rows, three seeds: 88.2 to 81.9 against `rows`, the mean of the
  bar (80 to 83 by seed), for 1.9 points of Acc_r (0.8 against `none`); Acc_f stays 0. By class it
  does not follow the bar: 71 to 93. At weight 1, one seed: 3 points for 0.5. Exact gates, one
  seed: 6 points, but for 3.4. Nothing here reaches the bar with the Acc_r of its control.
- Not shown: larger networks. To mean anything the regression needs more images of one row in a
  step than there are features; here 256 for 64. The `rows` runs take 40 steps of 256 pairs for
  each row; the first ones trained only the five rows that are measured. The others train all ten
  in 100 steps of 256 pairs, so compare `rows-...` with `rows`. Weights 1 and 5 were compared on
  the same test images. Lines of one seed differ by about a point by chance.
"""
FIGURES = ("acc_r", "acc_f", "probe_f", "probe_r")


class Deep(Run):
    """Untraining that also computes ``extra``, a term on what the head sees."""

    term: Term
    weight: float

    def _base_logits(self, images: Tensor, index: Tensor | None) -> Tensor:
        with self._tap() as seen:
            self.base_logits_now = super()._base_logits(images, None)
        self.base_features = seen[-1].detach()
        return self.base_logits_now

    def _logits(self, images: Tensor, pairs: Pairs) -> Tensor:
        with self._tap() as seen:
            logits = super()._logits(images, pairs)
        known = seen[-1], self.base_features, self.base_logits_now
        self.extra = self.weight * self.term(*known, pairs.sample, pairs.forget)
        return logits

    def _loss(self, seen: Seen) -> Tensor:
        return super()._loss(seen) + self.extra

    @contextmanager
    def _tap(self) -> Iterator[list[Tensor]]:
        seen: list[Tensor] = []
        head = metrics.find_head(self.wf.base)
        handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            yield seen
        finally:
            handle.remove()


# ---- problems ---------------------------------------------------------------------------------


Images = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    """Four linear layers on 14 x 14 pixels; the head sees 64 features."""
    layers: list[nn.Module] = [nn.AvgPool2d(2), nn.Flatten()]
    for inputs, outputs in ((196, 128), (128, 128), (128, 64)):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def trained(train: Images, steps: int, seed: int) -> nn.Module:
    """One cycle of AdamW in batches of 128."""
    torch.manual_seed(seed)
    model = mlp().train()
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.05)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps, pct_start=0.2)
    images, labels = train
    for _ in range(steps):
        pick = torch.randint(len(labels), (128,))
        optimiser.zero_grad()
        F.cross_entropy(model(images[pick]), labels[pick]).backward()
        optimiser.step()
        cycle.step()
    return model.eval()


@dataclasses.dataclass
class Problem:
    """A network and its images."""

    original: nn.Module
    train: Images
    test: Images


def problem(args: argparse.Namespace) -> Problem:
    facts = vars(zoo.input_facts("wfilter:resnet18-mnist"))
    train, test = (data.load("mnist", split, **facts) for split in ("train", "test"))
    seen = train.batch(torch.arange(args.train_images))
    original = trained(seen, args.train_steps, args.seed)
    return Problem(original, seen, test.batch(torch.arange(args.test_images)))


# ---- measuring --------------------------------------------------------------------------------


def untrained(at: Problem, args: argparse.Namespace, idea: str) -> wfilter.FilteredModel:
    """The filters of one idea."""
    wf = wfilter.apply_weight_filtering(
        copy.deepcopy(at.original), targets=TARGETS, example_input=at.test[0][:1]
    )
    rows = idea.startswith("rows")
    recipe = dataclasses.replace(wfilter.RECIPES["distill-soft"], **changes_of(idea, args))
    images = wfilter.InMemory(*at.train, 256 if rows else args.batch_size)
    steps = args.row_steps * wf.num_classes if rows else args.steps
    make = IDEAS[idea][1]
    if make is None:
        wfilter.untrain(wf, images, recipe=recipe, steps=steps, seed=args.seed, progress=False)
        return wf
    run = Deep(wf, images, None, recipe, args.seed)
    run.term, run.weight = make(), args.deep
    run.plan(None, steps, None, False, False)
    run.go(None, False)
    run.finish()
    return wf


def changes_of(idea: str, args: argparse.Namespace) -> dict[str, Any]:
    """What an idea and the kind of gates change in the recipe."""
    ideas = {
        "closed": {"lambda_alpha": -5.0},
        "rows": {"pairs": "row"},
        "rows-ridge": {"pairs": "row"},
        "rows-alike": {"pairs": "row", "lambda_deep": args.deep},
    }
    return (HARD if args.hard else {}) | ideas.get(idea, {})


def probed(
    model_of: Callable[[int], nn.Module], at: Problem, args: argparse.Namespace
) -> dict[str, Any]:
    """Acc_r, Acc_f and the linear probe of every row's model, in per cent."""
    images, labels = at.train
    fit, test = [(images[: args.probe_images], labels[: args.probe_images])], [at.test]
    found: dict[str, list[float]] = {key: [] for key in FIGURES}
    for row in args.rows:
        model = model_of(row)
        seen = (*metrics.collect_features(model, fit), *metrics.collect_features(model, test))
        by_class = metrics.linear_probe(*seen, max_iter=3000).by_class
        logits, labels = metrics.collect_logits(model, test)
        others = [value for label, value in by_class.items() if label != row]
        halves = metrics.both_accuracies(logits, labels, labels == row)
        for key, value in zip(FIGURES, (*halves, by_class[row], statistics.mean(others))):
            found[key].append(round(100 * value, 2))
    return {key: round(statistics.mean(v), 2) for key, v in found.items()} | {"by_row": found}


def measure(at: Problem, args: argparse.Namespace, idea: str) -> dict[str, Any]:
    code = commit()  # now: by the end of the run the repository may have moved on
    began = time.perf_counter()
    images, labels = at.train
    if idea == "original":
        figures = probed(lambda row: at.original, at, args)
    elif idea == "retrained":
        without = lambda row: (images[labels != row], labels[labels != row])  # noqa: E731
        steps, seed = args.train_steps, args.seed
        figures = probed(lambda row: trained(without(row), steps, seed), at, args)
    else:
        wf = untrained(at, args, idea)
        figures = probed(lambda row: wf.bake(row).eval(), at, args)
    trained_only = idea in ("original", "retrained")
    plain = trained_only or (IDEAS[idea][1] is None and idea != "rows-alike")
    return {
        "idea": idea,
        "deep": 0.0 if plain else args.deep,
        "gates": "-" if trained_only else "hard" if args.hard else "soft",
        **figures,
        "rows": args.rows,
        "trained": None if trained_only else 10,
        "seed": args.seed,
        "steps": args.steps,
        "row_steps": args.row_steps,
        "batch_size": args.batch_size,
        "train_steps": args.train_steps,
        "train_images": args.train_images,
        "test_images": args.test_images,
        "probe_images": args.probe_images,
        "seconds": round(time.perf_counter() - began, 1),
        "command": shlex.join(["python", *sys.argv]),
        "commit": code,
        **environment(),
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """One row for each kind of gate, idea and weight: means over classes and seeds."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        key = line["gates"], line["idea"], f"{line['deep']:g}", rows_trained(line)
        groups.setdefault(key, []).append(line)
    rows = [
        "| gates | term | deep | rows | seeds | Acc_r | Acc_f | probe f | by class | probe r |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for key, runs in groups.items():
        mean = {name: statistics.mean(run[name] for run in runs) for name in FIGURES}
        every = [value for run in runs for value in run["by_row"]["probe_f"]]
        rows.append(
            f"| {' | '.join(key)} | {len(runs)} | {mean['acc_r']:.1f} | {mean['acc_f']:.1f} "
            f"| {mean['probe_f']:.1f} | {min(every):.0f} to {max(every):.0f} "
            f"| {mean['probe_r']:.1f} |"
        )
    return "\n".join(rows)


def rows_trained(line: dict[str, Any]) -> str:
    """How many rows a run untrained: all, or in older lines of ``rows...`` only those measured."""
    if line["gates"] == "-":
        return "-"
    return str(line.get("trained", len(line["rows"]) if line["idea"].startswith("rows") else 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ideas", default=",".join(("original", "retrained", *IDEAS)))
    parser.add_argument("--deep", type=float, default=1.0, help="weight of the term")
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 3, 5, 8, 9])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--row-steps", type=int, default=40, help="for each class, of rows...")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--hard", action="store_true", help="exact gates")
    parser.add_argument("--train-images", type=int, default=12_000)
    parser.add_argument("--test-images", type=int, default=3000)
    parser.add_argument("--train-steps", type=int, default=250, help="of original and bar")
    parser.add_argument("--probe-images", type=int, default=2000, help="to fit it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "deep.jsonl")
    parser.add_argument("--table", action="store_true", help="only rebuild the table")
    args = parser.parse_args()
    at = None if args.table else problem(args)
    for idea in [] if at is None else args.ideas.split(","):
        line = measure(at, args, idea)
        print(idea, {key: line[key] for key in (*FIGURES, "seconds")}, flush=True)
        append_line(args.out, line)
    lines = read_lines(args.out)
    what = "\n".join(f"- `{idea}`: {text}." for idea, (text, _) in IDEAS.items())
    args.out.with_suffix(".md").write_text(
        "# Deep forgetting\n\nRebuilt by `python benchmarks/deep.py --table` from "
        f"`{args.out.name}`, which has each run's command, seed, commit and environment. In per "
        "cent, means over some classes forgotten one at a time: probe f is the test accuracy, on "
        "the forgotten class, of a logistic regression on the penultimate features of all classes; "
        "probe r the same on the others; rows is how many rows were untrained. The bar for probe f "
        "is `retrained`, not zero.\n\n"
        f"{table(lines)}\n\n{what}\n{FINDINGS}"
    )


if __name__ == "__main__":
    main()
