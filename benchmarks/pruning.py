"""Prune baked models: one architecture of every family, and CIFAR-10 networks without classes.

    python benchmarks/pruning.py --sweep            # small random models, closed at random
    python benchmarks/pruning.py --sweep --compiled # one of each family: compiled times, too
    python benchmarks/pruning.py --cifar FILTERS    # a folder that `benchmarks/groups.py` wrote
    python benchmarks/pruning.py --table

The sweep builds one architecture of each timm family and every torchvision classifier, as small as
it runs, closes 30 % of the rows of all convolutions and linear layers but the last (and the values
of one attention head), prunes, and compares logits. ``--rival`` does the same with torch-pruning's
dependency graph, told to remove only channels that are closed in all layers it couples. Lines go to
``benchmarks/results/pruning.jsonl``; a failure is a line too.

``--compiled`` adds compiled times to lines that are there, those that were pruned fastest first,
until ``--minutes`` of CPU time are spent. What it stores stands beside those lines and replaces
none of their figures.
"""

from __future__ import annotations

import argparse
import resource
import signal
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import wfilter
from common import RESULTS, add_table, append_line, origin, read_lines, write_table
from groups import split
from pruning_lines import became_smaller, merged, one_of_each_family, tables
from pruning_rival import LAYERS, by_dependency_graph
from registry.models import Architecture, architectures, build
from wfilter.cli.jobs import open_filters

FILE = RESULTS / "pruning.jsonl"
SHARE = 0.3
FORGET = (1, 3, 8)


@torch.no_grad()
def close_rows(model: nn.Module, share: float = SHARE, seed: int = 0) -> nn.Module:
    """In place: rows at random, and the values of the first head where heads are plain to see."""
    generator = torch.Generator().manual_seed(seed)
    for layer in [m for m in model.modules() if isinstance(m, LAYERS)][:-1]:
        closed = torch.rand(len(layer.weight), generator=generator) < share
        layer.weight[closed] = 0
    for module in model.modules():
        qkv, heads = getattr(module, "qkv", None), getattr(module, "num_heads", 0)
        if isinstance(qkv, nn.Linear) and isinstance(heads, int) and heads > 1:
            third = len(qkv.weight) // 3
            qkv.weight[2 * third : 2 * third + third // heads] = 0
    return model


def multiply_adds(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x[:1])
    return counter.get_total_flops() // 2


@torch.no_grad()
def interleaved(models: dict[str, Callable[[Tensor], Any]], x: Tensor, rounds: int) -> dict:
    """Median CPU milliseconds of each, taken in turn so that a busy machine slows all alike."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 2):
        for name, model in models.items():
            start = time.process_time()
            model(x)
            times[name].append(1000 * (time.process_time() - start))
    return {name: round(statistics.median(t[2:]), 3) for name, t in times.items()}


def compare(whole: nn.Module, x: Tensor, rounds: int) -> tuple[nn.Module, dict[str, Any]]:
    """Prune, and what that brought."""
    start = time.process_time()
    result = wfilter.prune(whole, x)
    seconds = time.process_time() - start
    with torch.no_grad():
        before, after = whole(x), result.model(x)
    scale = float(before.abs().max())
    models: dict[str, Any] = {"whole": whole, "pruned": result.model}
    reasons: Counter[str] = Counter()
    for left in result.left:
        reasons[left.why] += left.units
    return result.model, {
        "parameters": result.parameters,
        "multiply_adds": [multiply_adds(m, x) for m in models.values()],
        "eager_ms": interleaved(models, x, rounds),
        "difference_float64": result.largest_difference,
        "difference": float((before - after).abs().max()) / scale,
        "dtype": str(x.dtype).removeprefix("torch."),
        "sizes": result.sizes,
        "batch": len(x),
        "cuts": len(result.cuts),
        "left_units": sum(reasons.values()),
        "left": reasons.most_common(5),
        "seconds": round(seconds, 1),
    }


def all_times(whole: nn.Module, pruned: nn.Module, x: Tensor, rounds: int) -> dict[str, Any]:
    """Both eager and compiled for their own sizes, in turn, and how far their logits are apart."""
    torch._dynamo.reset()
    models = {"whole": whole, "pruned": pruned}
    compiled = {f"compiled {n}": torch.compile(m, dynamic=False) for n, m in models.items()}
    with torch.no_grad():
        expected, found = whole(x), compiled["compiled pruned"](x)
    times = interleaved({**models, **compiled}, x, rounds)
    return {
        "eager_ms": {name: times[name] for name in models},
        "compiled_ms": {name: times[f"compiled {name}"] for name in models},
        "compiled_difference": float((expected - found).abs().max() / expected.abs().max()),
    }


def compare_compiled(whole: nn.Module, x: Tensor, rounds: int) -> dict[str, Any]:
    """What `--compiled` adds: times of both, and enough to tell whether the same was pruned."""
    start = cpu_seconds()
    result = wfilter.prune(whole, x)
    line = {
        "parameters": result.parameters,
        "difference_float64": result.largest_difference,
        "dtype": str(x.dtype).removeprefix("torch."),
        "batch": len(x),
        **all_times(whole, result.model, x, rounds),
    }
    return {**line, "seconds": round(cpu_seconds() - start, 1)}


def cpu_seconds() -> float:
    """Of this process and of the compilers it started."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


# ---- running ------------------------------------------------------------------------------------


def sweep(args: argparse.Namespace) -> None:
    lines = read_lines(args.out)
    choose = to_compile if args.compiled else to_prune
    for architecture in choose(lines, args.retry):
        if not any(o in architecture.key for o in args.only):
            continue
        if cpu_seconds() > 60 * args.minutes:
            print(f"{args.minutes} minutes are spent; {architecture.key} would have been next")
            return
        line = {"kind": "compiled" if args.compiled else "sweep", "key": architecture.key}
        line |= {"family": architecture.family, **examine(architecture, args)}
        print(line["key"], line.get("parameters"), line.get("error", ""), flush=True)
        append_line(args.out, {**line, "origin": origin()})


def to_prune(lines: list[dict[str, Any]], retry: bool) -> list[Architecture]:
    """What has no line yet, with ``retry`` also what failed, or what was cut otherwise since."""
    newest = {(ln["kind"], ln["key"]): ln for ln in lines if ln["kind"] != "cifar"}
    again = {
        key
        for (kind, key), line in newest.items()
        if kind == "sweep" and ("error" in line or cut_otherwise(line, newest))
    }
    done = {key for _, key in newest} - (again if retry else set())
    vision = [a for a in architectures() if a.library == "torchvision"]
    todo = {a.key: a for a in [*one_of_each_family(), *vision]}
    return [a for key, a in todo.items() if key not in done]


def cut_otherwise(line: dict[str, Any], newest: dict[tuple[str, str], dict[str, Any]]) -> bool:
    """Whether a model was left with other parameters when it was compiled."""
    compiled = newest.get(("compiled", line["key"]), {})
    return compiled.get("parameters", line["parameters"]) != line["parameters"]


def to_compile(lines: list[dict[str, Any]], retry: bool = False) -> list[Architecture]:
    """One of each family that became smaller and was not compiled before, fastest pruned first."""
    smaller = {ln["key"]: ln["seconds"] for ln in merged(lines) if became_smaller(ln)}
    tried = {
        ln["key"] for ln in lines if ln["kind"] == "compiled" and not (retry and "error" in ln)
    }
    todo = [a for a in one_of_each_family() if a.key in smaller and a.key not in tried]
    return sorted(todo, key=lambda a: smaller[a.key])


def examine(architecture: Architecture, args: argparse.Namespace) -> dict[str, Any]:
    """One architecture: figures, or the words in which it was refused."""
    torch.manual_seed(0)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(args.seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = build(architecture)
            model, x = built.model, built.x
            if args.double:
                model, x = model.double(), x.double()
            whole = close_rows(_plain(model, x))
            if args.compiled:
                return compare_compiled(whole, x, args.rounds)
            _, line = compare(whole, x, args.rounds)
            if args.rival and built.parameters < 2e7:
                line["torch_pruning"] = _attempt(by_dependency_graph, whole, x)
        return line
    except (Exception, TooLong) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    finally:
        signal.alarm(0)


def _plain(model: nn.Module, x: Tensor) -> nn.Module:
    """As baked: standardised convolutions become plain ones."""
    last = [n for n, p in model.named_parameters() if p.ndim > 1][-1]
    return wfilter.apply_weight_filtering(model, 10, targets=last, example_input=x).bake(set())


def _attempt(function: Callable[..., dict], *args: Any) -> dict[str, Any]:
    try:
        return function(*args)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {(str(error) or '?').splitlines()[0][:120]}"}


class TooLong(BaseException):
    """Not an Exception: `prune` would take it for a model that cannot be followed."""


def _too_long(*_: object) -> None:
    raise TooLong("it took too long on this machine")


def cifar(args: argparse.Namespace) -> None:
    opened = open_filters(args.cifar)
    whole = opened.wf.bake(set(FORGET)).eval()
    images = opened.job.images("test")
    x = torch.stack([images[i][0] for i in range(args.batch)])
    pruned, figures = compare(whole, x, args.rounds)
    models = {"original": opened.wf.base, "whole": whole, "pruned": pruned}
    line = {
        "kind": "cifar",
        "model": f"{opened.job.model}, {args.cifar.name}",
        "forget": FORGET,
        **figures,
        **all_times(whole, pruned, x, args.rounds),
        **accuracies(models, images, args.images),
    }
    print(line)
    append_line(args.out, {**line, "origin": origin()})


@torch.no_grad()
def accuracies(models: dict[str, nn.Module], images: Any, count: int) -> dict[str, Any]:
    """Acc_r and Acc_f of each on the first test images; what comes before the gates is run once."""
    trunks, tails = zip(*map(split, models.values()))
    if not all(is_same(trunks[0], trunk) for trunk in trunks):
        raise SystemExit("These models differ before the last layers, where groups.py puts gates.")
    count = min(count, len(images))
    right = torch.zeros(len(models), count, dtype=torch.bool)
    y = torch.tensor([int(images[i][1]) for i in range(count)])
    for part in torch.arange(count).split(200):
        given = trunks[0](torch.stack([images[i][0] for i in part.tolist()]))
        for row, tail in zip(right, tails):
            row[part] = tail(given).argmax(1) == y[part]
    forgotten = torch.isin(y, torch.tensor(FORGET))
    found: dict[str, Any] = {"acc_r": {}, "acc_f": {}, "images": count}
    for name, row in zip(models, right):
        found["acc_r"][name] = round(100 * float(row[~forgotten].float().mean()), 2)
        found["acc_f"][name] = round(100 * float(row[forgotten].float().mean()), 2)
    return found


def is_same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules hold the same numbers."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(s, t) for (a, s), (b, t) in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="add compiled times to lines")
    parser.add_argument("--minutes", type=float, default=600, help="CPU time of a sweep")
    parser.add_argument("--retry", action="store_true", help="again what failed before")
    parser.add_argument("--rival", action="store_true", help="also torch-pruning")
    parser.add_argument(
        "--double",
        action="store_true",
        help="float64 for larger models, too: random ones can blow rounding up until it looks as "
        "if they mixed samples",
    )
    parser.add_argument("--only", nargs="+", default=[""], help="parts of architectures' names")
    parser.add_argument(
        "--seconds", type=int, default=120, help="for one architecture, on the clock"
    )
    parser.add_argument("--cifar", type=Path, help="a folder of filters")
    parser.add_argument("--images", type=int, default=10_000, help="test images for accuracies")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    add_table(parser, FILE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # in this process, where the time is counted
    if args.sweep:
        sweep(args)
    if args.cifar:
        cifar(args)
    write_table(args, tables)


if __name__ == "__main__":
    main()
