"""Two checkouts side by side: what a change does to eager forwards, steps and ``apply``.

    git worktree add ../before fbccfe6
    python benchmarks/before_after.py --before ../before

Each round runs both in turn, in processes of their own with one thread. Forwards and steps of
untraining are ratios to a forward of the base model in the same process, by CPU time, ``apply`` is
in CPU seconds; medians over rounds, one line per network and checkout, added to
``results/before_after.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, append_line, origin

NETWORKS = (("resnet18", 64, 16), ("vit_tiny_patch16_224", 64, 16), ("resnet18", 32, 1))

TIMING = """
import json, sys, time
import timm, torch, wfilter

name, edge, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
model = timm.create_model(name, num_classes=10, **({"img_size": edge} if "vit" in name else {}))
model.eval()
with torch.no_grad():
    model(torch.rand(2, 3, edge, edge))
apply = wfilter.apply_weight_filtering  # read on first use, which is no part of applying
began = time.process_time()
wf = apply(model, example_input=torch.rand(2, 3, edge, edge))
applied = time.process_time() - began
x, labels = torch.rand(batch, 3, edge, edge), torch.arange(batch) % 10
sets = torch.rand(batch, 10) < 0.3


def median(forward, count=5):
    forward()
    seconds = []
    for _ in range(count):
        began = time.process_time()
        forward()
        seconds.append(time.process_time() - began)
    return sorted(seconds)[count // 2]


def block():
    with wf.forgetting(3):
        wf(x)


class Stamped:
    # One batch an epoch; the CPU time between two requests is that of a step.

    def __init__(self):
        self.stamps = []

    def __iter__(self):
        self.stamps.append(time.process_time())
        return iter([(x, labels)])


def step(recipe, count=7):
    batches = Stamped()
    wfilter.untrain(wf, batches, recipe=recipe, steps=count)
    seconds = [b - a for a, b in zip(batches.stamps[1:], batches.stamps[2:])]  # the first warms up
    return sorted(seconds)[len(seconds) // 2]


with torch.no_grad():
    first = median(lambda: model(x))
    times = {
        "labels": median(lambda: wf(x, forget=labels)),
        "sets": median(lambda: wf(x, forget=sets)),
        "one class": median(lambda: wf(x, forget=3)),
        "forgetting": median(block),
    }
if batch > 1:
    times |= {f"step of {recipe}": step(recipe) for recipe in ("paper", "distill")}
with torch.no_grad():
    base = (first + median(lambda: model(x))) / 2
print(json.dumps({**{k: v / base for k, v in times.items()}, "apply seconds": applied}))
"""


def timed(checkout: Path, network: tuple[str, int, int]) -> dict[str, float]:
    """One process that imports wfilter from a checkout."""
    settings = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TIMING, *map(str, network)]
    done = subprocess.run(command, env=settings, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{network[0]} failed in {checkout.name}:\n{done.stderr[-1000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def commit_of(checkout: Path) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the older commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "before_after.jsonl")
    args = parser.parse_args()
    checkouts = {"before": args.before.resolve(), "after": RESULTS.parents[1]}
    for network in NETWORKS:
        rounds: dict[str, list[dict[str, Any]]] = {which: [] for which in checkouts}
        for _ in range(args.rounds):
            for which, checkout in checkouts.items():
                rounds[which].append(timed(checkout, network))
        for which, found in rounds.items():
            medians = {k: round(statistics.median(r[k] for r in found), 3) for k in found[0]}
            name, edge, batch = network
            line = {"model": name, "edge": edge, "batch": batch, "checkout": which, **medians}
            line |= {"of": commit_of(checkouts[which]), "rounds": args.rounds}
            line |= {**origin(), "command": "python benchmarks/before_after.py --before BEFORE"}
            append_line(args.out, line)
            print(json.dumps({k: v for k, v in line.items() if k in ("checkout", *medians)}))


if __name__ == "__main__":
    main()
