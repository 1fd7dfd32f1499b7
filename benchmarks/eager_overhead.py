"""Python's share of an eager forward: mixed batches and blocks against the base model.

    python benchmarks/eager_overhead.py                       # a minute on one core
    python benchmarks/eager_overhead.py --before CHECKOUT     # and another checkout, in turn

The networks have the layers of ResNet-18 and ViT-T with so few channels that the kernels take next
to no time; a GPU waits for the rest. One image, one thread, processor time, the paths interleaved;
ratios are medians over rounds. With ``--before`` each checkout runs three times, in turn, in
processes of their own, and the medians over those are stored. Lines are added to
``benchmarks/results/eager_overhead.jsonl``; the table, ``eager_overhead.md``, has the latest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import wfilter
from common import RESULTS, append_line, origin, read_lines

CALLS, WARM, TURNS = 20, 3, 3


class Empty(TorchFunctionMode):
    """Passes every call on: what any ``TorchFunctionMode`` costs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def networks() -> dict[str, tuple[nn.Module, int]]:
    """Deep and narrow: the same calls as the real ones, hardly any arithmetic."""
    resnet = timm.create_model("resnet18", num_classes=10, channels=(8, 8, 8, 8), stem_width=8)
    vit = timm.create_model(
        "vit_tiny_patch16_224", num_classes=10, img_size=32, embed_dim=16, num_heads=1
    )
    four = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    )
    return {"resnet18, narrow": (resnet, 32), "vit_tiny, narrow": (vit, 32), "cnn": (four, 16)}


def paths(wf: wfilter.FilteredModel, image: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Every form of a call; each opens its block anew where it has one."""
    label, chosen = torch.tensor([3]), torch.zeros(1, 10, dtype=torch.bool)

    def block() -> Any:
        with wf.forgetting(3):
            return [wf(image) for _ in range(CALLS)]

    def empty() -> Any:
        with Empty():
            return wf.base(image)

    many = lambda call: lambda: [call() for _ in range(CALLS)]  # noqa: E731
    return {
        "base": many(lambda: wf.base(image)),
        "empty mode": many(empty),
        "wf(x)": many(lambda: wf(image)),
        "labels": many(lambda: wf(image, forget=label)),
        "sets": many(lambda: wf(image, forget=chosen)),
        "one class": many(lambda: wf(image, forget=3)),
        "forgetting(3)": block,
    }


@torch.no_grad()
def measure(wf: wfilter.FilteredModel, image: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Microseconds of a forward of the base model, and the ratio of each path to it."""
    calls = paths(wf, image)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + WARM):
        for name, call in calls.items():
            began = time.process_time()
            call()
            if number >= WARM:
                times[name].append(1e6 * (time.process_time() - began) / CALLS)
    ratios = {
        name: statistics.median(mine / base for mine, base in zip(values, times["base"]))
        for name, values in times.items()
    }
    return {"base_us": statistics.median(times["base"]), "ratios": ratios}


def run(rounds: int) -> list[dict[str, Any]]:
    """A line for each network, of the wfilter that this process imports."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = []
    for name, (model, pixels) in networks().items():
        image = torch.rand(1, 3, pixels, pixels)
        wf = wfilter.apply_weight_filtering(model.eval(), example_input=image)
        found = measure(wf, image, rounds)
        lines.append({"network": name, "targets": len(wf.targets), **found})
    return lines


def run_elsewhere(checkout: Path, rounds: int) -> list[dict[str, Any]]:
    """The lines of a process that imports wfilter from a checkout."""
    settings = {**os.environ, "PYTHONPATH": str(checkout)}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.jsonl"
        command = [sys.executable, __file__, "--rounds", str(rounds), "--lines", str(out)]
        subprocess.run(command, env=settings, check=True)
        return read_lines(out)


def run_in_turn(checkouts: dict[str, Path], rounds: int) -> list[dict[str, Any]]:
    """A line for each network and checkout: medians over processes that took turns."""
    turns: dict[str, list[list[dict[str, Any]]]] = {which: [] for which in checkouts}
    for _ in range(TURNS):
        for which, checkout in checkouts.items():
            turns[which].append(run_elsewhere(checkout, rounds))
    lines = []
    for which, found in turns.items():
        for same in zip(*found):
            ratios = {
                name: statistics.median(line["ratios"][name] for line in same)
                for name in same[0]["ratios"]
            }
            base = statistics.median(line["base_us"] for line in same)
            facts = {"checkout": which, "of": commit_of(checkouts[which]), "turns": TURNS}
            lines.append({**same[0], "base_us": base, "ratios": ratios, **facts})
    return lines


def commit_of(checkout: Path) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True).stdout.strip()


def latest(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the run stored last: those from the last first network on, with its partner."""
    starts = [
        number
        for number, line in enumerate(lines)
        if line["network"] == lines[0]["network"] and line.get("checkout") != "after"
    ]
    return lines[starts[-1] :]


def table(lines: list[dict[str, Any]]) -> str:
    names = [name for name in lines[0]["ratios"] if name != "base"]
    text = ["| network | commit | targets | base, µs | " + " | ".join(names) + " |"]
    text.append("|---|---|" + "---:|" * (2 + len(names)))
    for line in sorted(lines, key=lambda line: line["network"]):
        ratios = [f"{line['ratios'][name]:.2f}" for name in names]
        of = line.get("of", line["commit"])
        first = [line["network"], of, str(line["targets"]), f"{line['base_us']:.0f}"]
        text.append("| " + " | ".join(first + ratios) + " |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--before", type=Path, help="a checkout of an older commit")
    parser.add_argument("--lines", type=Path, help="only write lines to this file, no table")
    parser.add_argument("--out", type=Path, default=RESULTS / "eager_overhead.jsonl")
    args = parser.parse_args()
    if args.before is None:
        lines = run(args.rounds)
    else:
        here = {"before": args.before.resolve(), "after": RESULTS.parents[1]}
        lines = run_in_turn(here, args.rounds)
    facts = {"rounds": args.rounds, **origin()}
    if args.before is not None:
        facts["command"] = "python benchmarks/eager_overhead.py --before BEFORE"
    for line in lines:
        append_line(args.lines or args.out, {**line, **facts})
        print(json.dumps(line), flush=True)
    if args.lines is None:
        write(args.out)


def write(out: Path) -> None:
    """The table of the run stored last."""
    lines = latest(read_lines(out))
    text = (
        f"# Python's share of an eager forward\n\nMade by `{lines[0]['command']}`: "
        "processor time of one image on networks with hardly any arithmetic, as ratios to the base "
        f"model (torch {lines[0]['torch']}). `empty mode` is the base model under a "
        "`TorchFunctionMode` that does nothing. Compiled forwards have none of it.\n"
    )
    out.with_suffix(".md").write_text(f"{text}\n{table(lines)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
