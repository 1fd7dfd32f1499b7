"""One untraining step against a fine-tuning step of the same model on as many samples.

    python benchmarks/untrain_step.py --models resnet18 vgg16

Also the cost of many classes: steps with 10, 1,000 and 21,841 rows. Lines go to
``benchmarks/results/untrain_step.jsonl``, the newest of each setting to ``untrain_step.md``.
Interleaved rounds, ratios within one run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import wfilter
from common import RESULTS, append_line, origin, read_lines
from wfilter.untraining.optimiser import RowAdam


def model_for(name: str, classes: int = 10) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, num_classes=classes)


def finetune_step(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> Callable[[], None]:
    """Forward, backward to all weights, SGD."""
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()
        optimiser.step()

    return step


def untrain_step(wf: wfilter.FilteredModel, images: torch.Tensor, forget: torch.Tensor) -> Callable:
    """Forward with mixed rows, backward to the alphas, one update; the base logits are cached."""
    optimiser = RowAdam(wf.trainable_parameters(), 0.1)
    with torch.no_grad():
        base = wf(images)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        wfilter.untraining.losses.distillation(wf(images, forget), base, forget).backward()
        optimiser.step()

    return step


def base_step(model: nn.Module, images: torch.Tensor) -> Callable[[], None]:
    """Forward and backward of the frozen base model: what no untraining step can go below."""
    model.eval().requires_grad_(False)
    inputs = images.clone().requires_grad_()
    with torch.no_grad():
        base = model(images)
    nothing = torch.full((len(images),), -1)

    def step() -> None:
        inputs.grad = None
        wfilter.untraining.losses.distillation(model(inputs), base, nothing).backward()

    return step


def interleave(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if number:
                times[name].append(time.perf_counter() - began)
    return times


def profile(step: Callable[[], None], steps: int = 3) -> str:
    """Where the time of a step goes, by operator."""
    with torch.profiler.profile() as found:
        for _ in range(steps):
            step()
    return found.key_averages().table(sort_by="self_cpu_time_total", row_limit=12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["resnet18", "resnet50", "vgg16"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", nargs="*", type=int, default=[10, 1000, 21841])
    parser.add_argument("--profile", action="store_true", help="also print time by operator")
    parser.add_argument("--out", default=str(RESULTS / "untrain_step.jsonl"))
    args = parser.parse_args()
    torch.manual_seed(0)
    images, labels = torch.rand(args.batch, 3, args.size, args.size), torch.arange(args.batch) % 10
    lines = []
    for name in args.models:
        full = wfilter.apply_weight_filtering(model_for(name), example_input=images[:2])
        deep = wfilter.apply_weight_filtering(model_for(name), example_input=images[:2])
        deep.pin_open([t.name for t in deep.targets][: -(len(deep.targets) // 4)])
        steps = {
            "fine-tuning": finetune_step(model_for(name), images, labels),
            "untraining, all targets": untrain_step(full, images, labels),
            "untraining, deepest quarter": untrain_step(deep, images, labels),
            "frozen base model, to its input": base_step(model_for(name), images),
        }
        lines += report(name, interleave(steps, args.rounds), "fine-tuning")
        if args.profile:
            for path in ("fine-tuning", "untraining, all targets"):
                print(f"{name}, {path}\n{profile(steps[path])}")
    if args.rows:
        lines += many_classes(args, images, labels)
    for line in lines:
        line |= {"batch": args.batch, "size": args.size}
        append_line(Path(args.out), {**line, **origin()})
    Path(args.out).with_suffix(".md").write_text(table(Path(args.out)))


def many_classes(
    args: argparse.Namespace, images: torch.Tensor, labels: torch.Tensor
) -> list[dict]:
    """Steps with more and more rows.

    Many classes make the model's own head larger too: the base model's step shows how much.
    """
    steps = {}
    for rows in args.rows:
        wf = wfilter.apply_weight_filtering(model_for("resnet18", rows), example_input=images[:2])
        wf.sparse = rows > 256
        steps[f"{rows} rows"] = untrain_step(wf, images, labels)
        steps[f"base model, {rows} outputs"] = base_step(model_for("resnet18", rows), images)
    times = interleave(steps, args.rounds)
    lines = report("resnet18", times, f"{args.rows[0]} rows")
    for rows in args.rows:
        names = f"{rows} rows", f"base model, {rows} outputs"
        lines += report("resnet18", {name: times[name] for name in names}, names[1])[:1]
    return lines


def table(path: Path) -> str:
    """The newest line of every model, path and yardstick."""
    lines = read_lines(path)
    settings = ("model", "path", "to", "batch", "size")
    newest = {tuple(line[key] for key in settings): line for line in lines}
    rows = [
        f"| {r['model']} | {r['batch']} x {r['size']} px | {r['path']} | {r['median_ms']:.0f} "
        f"| {r['ratio']:.2f} | {r['to']} "
        f"| {r.get('rounds', '-')} |"
        for r in newest.values()
        if r["path"] != r["to"]
    ]
    head = [
        "| model | images | a step of | ms | ratio | to | rounds |",
        "|---|---|---|---:|---:|---|---:|",
    ]
    return (
        "# A step of untraining\n\nMedian of the ratios within each interleaved round; commands, "
        "batch, image size and environment are in `untrain_step.jsonl`.\n\n"
        + "\n".join([*head, *rows, ""])
    )


def report(name: str, times: dict[str, list[float]], yardstick: str) -> list[dict]:
    lines: list[dict] = []
    for path, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, times[yardstick]))
        line = {
            "model": name,
            "path": path,
            "median_ms": 1000 * statistics.median(seconds),
            "ratio": ratio,
            "to": yardstick,
            "rounds": len(seconds),
        }
        lines.append(line)
        print(f"{name:10s} {path:28s} {line['median_ms']:9.1f} ms  {ratio:.2f} x {yardstick}")
    return lines


if __name__ == "__main__":
    main()
