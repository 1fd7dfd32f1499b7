"""Python's share of an eager forward: mixed batches and blocks against the base model.

    python benchmarks/eager_overhead.py          # a minute on one core

The networks have the layers of ResNet-18 and ViT-T with so few channels that the kernels take next
to no time; a GPU waits for the rest. One image, one thread, processor time, the paths interleaved;
ratios are medians over rounds. Lines go to ``benchmarks/results/eager_overhead.jsonl`` and, as a
table, ``eager_overhead.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import wfilter
from wfilter import bench

RESULTS = Path(__file__).parent / "results"
CALLS, WARM = 20, 3


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


def table(lines: list[dict[str, Any]]) -> str:
    names = [name for name in lines[0]["ratios"] if name != "base"]
    text = ["| network | targets | base, µs | " + " | ".join(names) + " |"]
    text.append("|---|" + "---:|" * (2 + len(names)))
    for line in lines:
        ratios = [f"{line['ratios'][name]:.2f}" for name in names]
        first = [line["network"], str(line["targets"]), f"{line['base_us']:.0f}"]
        text.append("| " + " | ".join(first + ratios) + " |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS / "eager_overhead.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, cwd=RESULTS).stdout.strip()
    lines = []
    for name, (model, pixels) in networks().items():
        image = torch.rand(1, 3, pixels, pixels)
        wf = wfilter.apply_weight_filtering(model.eval(), example_input=image)
        facts = {"command": " ".join(sys.argv), "commit": commit, **bench.environment()}
        found = measure(wf, image, args.rounds)
        lines.append({"network": name, "targets": len(wf.targets), **found, **facts})
        print(name, found, flush=True)
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    text = (
        "# Python's share of an eager forward\n\nMade by `python benchmarks/eager_overhead.py`: "
        "processor time of one image on networks with hardly any arithmetic, as ratios to the base "
        f"model (commit {commit}, torch {torch.__version__}). `empty mode` is the base model "
        "under a `TorchFunctionMode` that does nothing. Compiled forwards have none of it.\n"
    )
    args.out.with_suffix(".md").write_text(f"{text}\n{table(lines)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
