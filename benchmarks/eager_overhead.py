"""Python's share of an eager forward: mixed batches and blocks against the base model.

    python benchmarks/eager_overhead.py                       # a minute on one core
    python benchmarks/eager_overhead.py --before CHECKOUT     # and those of another checkout
    python benchmarks/eager_overhead.py --before CHECKOUT --batch 16    # of the real networks

The networks have the layers of ResNet-18 and ViT-T with so few channels that the kernels take next
to no time; a GPU waits for the rest. One image, one thread, processor time, the paths interleaved;
ratios are medians over rounds. With ``--before`` both checkouts run in each round. Lines are added
to ``benchmarks/results/eager_overhead.jsonl``; the table, ``eager_overhead.md``, has the latest.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import wfilter
from common import RESULTS, append_line, origin, read_lines

CALLS, WARM = 20, 3


class Empty(TorchFunctionMode):
    """Passes every call on: what any ``TorchFunctionMode`` costs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


class Counting(TorchFunctionMode):
    """Counts the calls that a mode sees, each of which goes into Python."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **kwargs or {})


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


def real_networks() -> dict[str, tuple[nn.Module, int]]:
    """The networks themselves, small images: what a change does where arithmetic counts."""
    resnet = timm.create_model("resnet18", num_classes=10)
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64)
    return {"resnet18": (resnet, 64), "vit_tiny": (vit, 64)}


def paths(wf: Any, image: torch.Tensor, calls: int) -> dict[str, Callable[[], Any]]:
    """Every form of a call; each opens its block anew where it has one."""
    label = (torch.arange(len(image)) + 3) % 10
    chosen = torch.zeros(len(image), 10, dtype=torch.bool)

    def block() -> Any:
        with wf.forgetting(3):
            return [wf(image) for _ in range(calls)]

    def empty() -> Any:
        with Empty():
            return wf.base(image)

    many = lambda call: lambda: [call() for _ in range(calls)]  # noqa: E731
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
def measure(
    calls: dict[str, dict[str, Callable[[], Any]]], rounds: int, repeats: int
) -> Iterator[Any]:
    """For each checkout, microseconds of a forward of its base model and the ratios of its paths.

    All paths of all checkouts run once per round.
    """
    times: dict[tuple[str, str], list[float]] = {
        (which, name): [] for which, paths in calls.items() for name in paths
    }
    for number in range(rounds + WARM):
        for which, name in times:
            began = time.process_time()
            calls[which][name]()
            if number >= WARM:
                times[which, name].append(1e6 * (time.process_time() - began) / repeats)
    bases = [times[which, "base"] for which in calls]
    base = [statistics.mean(same) for same in zip(*bases)]  # one yardstick for all checkouts
    for which, own in calls.items():
        ratios = {
            name: statistics.median(a / b for a, b in zip(times[which, name], base)) for name in own
        }
        yield {"checkout": which, "base_us": statistics.median(base), "ratios": ratios}


@contextmanager
def package(checkout: Path | None) -> Iterator[Any]:
    """``wfilter`` of another checkout; inside, what it imports is its own."""
    if checkout is None:
        yield wfilter
        return
    ours = _taken()
    sys.path.insert(0, str(checkout))
    try:
        yield importlib.import_module("wfilter")
    finally:
        sys.path.remove(str(checkout))
        _taken()
        sys.modules.update(ours)


def _taken() -> dict[str, Any]:
    """In place: take wfilter out of the modules that Python has imported."""
    names = [name for name in sys.modules if name.split(".")[0] == "wfilter"]
    return {name: sys.modules.pop(name) for name in names}


def run(checkouts: dict[str, Path | None], rounds: int, batch: int) -> list[dict[str, Any]]:
    """A line for each network and checkout."""
    torch.set_num_threads(1)
    lines, repeats = [], CALLS if batch == 1 else 1
    for network, (model, pixels) in (networks() if batch == 1 else real_networks()).items():
        image, calls = torch.rand(batch, 3, pixels, pixels), {}
        for which, checkout in checkouts.items():
            with package(checkout) as library:
                own = copy.deepcopy(model).eval()
                wf = library.apply_weight_filtering(own, example_input=image)
                calls[which] = paths(wf, image, repeats)
                for call in calls[which].values():
                    call()  # what is imported on first use is imported now
        for found in measure(calls, rounds, repeats):
            with Counting() as counting:
                model.eval()(image)
            facts = {"targets": len(wf.targets), "batch": batch, "functions": counting.calls}
            of = commit_of(checkouts[found["checkout"]] or RESULTS.parents[1])
            lines.append({"network": network, **facts, "of": of, **found})
    return lines


def commit_of(checkout: Path) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True).stdout.strip()


def latest(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest line of each network and checkout, of the runs that compare two."""
    same = [line for line in lines if "--before" in line["command"]]
    return list({(line["network"], line["checkout"]): line for line in same}.values())


def table(lines: list[dict[str, Any]]) -> str:
    names = [name for name in lines[0]["ratios"] if name != "base"]
    text = ["| network | commit | targets | functions | base, µs | " + " | ".join(names) + " |"]
    text.append("|---|---|" + "---:|" * (3 + len(names)))
    for line in lines:
        ratios = [f"{line['ratios'][name]:.2f}" for name in names]
        of = line.get("of", line["commit"])
        counts = [str(line["targets"]), str(line.get("functions", ""))]
        first = [line["network"], of, *counts, f"{line['base_us']:.0f}"]
        text.append("| " + " | ".join(first + ratios) + " |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--before", type=Path, help="a checkout of an older commit")
    parser.add_argument("--batch", type=int, default=1, help="more than 1: of the real networks")
    parser.add_argument("--out", type=Path, default=RESULTS / "eager_overhead.jsonl")
    args = parser.parse_args()
    torch.manual_seed(0)
    facts, checkouts = {"rounds": args.rounds, **origin()}, {"after": None}
    if args.before is not None:
        checkouts = {"before": args.before.resolve(), **checkouts}
        facts["command"] = "python benchmarks/eager_overhead.py --before BEFORE"
        facts["command"] += "" if args.batch == 1 else f" --batch {args.batch}"
    for line in run(checkouts, args.rounds, args.batch):
        append_line(args.out, {**line, **facts})
        print(json.dumps(line), flush=True)
    write(args.out)


def write(out: Path) -> None:
    """The table of the run stored last."""
    lines = latest(read_lines(out))
    text = (
        f"# Python's share of an eager forward\n\nMade by `{lines[0]['command']}`: "
        "processor time of one image on networks with hardly any arithmetic, as ratios to the base "
        "model, and with `--batch 16` of 16 images on the networks themselves (torch "
        f"{lines[0]['torch']}). `empty mode` is the base model under a `TorchFunctionMode` that "
        "does nothing; `functions` counts what goes into Python under a mode, in one forward. "
        "Compiled forwards have none of it.\n"
    )
    out.with_suffix(".md").write_text(f"{text}\n{table(lines)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
