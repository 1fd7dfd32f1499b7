"""Prune baked models: one architecture of every family, and CIFAR-10 networks without classes.

    python benchmarks/pruning.py --sweep            # small random models, closed at random
    python benchmarks/pruning.py --sweep --compiled # one of each family again, compiled, too
    python benchmarks/pruning.py --cifar FILTERS    # a folder that `wfilter untrain` wrote
    python benchmarks/pruning.py --table

The sweep builds one architecture of each timm family and every torchvision classifier, as small as
it runs, closes 30 % of the rows of all convolutions and linear layers but the last (and the values
of one attention head), prunes, and compares logits. ``--rival`` does the same with torch-pruning's
dependency graph, told to remove only channels that are closed in all layers it couples. Lines go to
``benchmarks/results/pruning.jsonl``; a failure is a line too.
"""

from __future__ import annotations

import argparse
import copy
import signal
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import wfilter
from common import RESULTS, add_table, append_line, origin, read_lines, write_table
from registry.models import Architecture, architectures, build, representatives
from wfilter.cli.jobs import open_filters

FILE = RESULTS / "pruning.jsonl"
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
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


def compare(whole: nn.Module, x: Tensor, rounds: int, compiled: bool = False) -> dict[str, Any]:
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
    line = {
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
    if compiled:
        torch._dynamo.reset()
        both = {name: torch.compile(model) for name, model in models.items()}
        line["compiled_ms"] = interleaved(both, x, rounds)
    return line


# ---- the rival ----------------------------------------------------------------------------------


def by_dependency_graph(whole: nn.Module, x: Tensor) -> dict[str, Any]:
    """Remove what torch-pruning's graph couples and is closed throughout; logits compared."""
    import torch_pruning as tp

    model = copy.deepcopy(whole).requires_grad_(True)
    before = sum(p.numel() for p in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = tp.DependencyGraph().build_dependency(model, example_inputs=x[:1])
        _remove_closed(tp, graph, model)
    with torch.no_grad():
        expected, found = whole(x), model(x)
    after = sum(p.numel() for p in model.parameters())
    difference = float((expected - found).abs().max() / expected.abs().max())
    return {"parameters": [before, after], "difference": difference}


def _remove_closed(tp: Any, graph: Any, model: nn.Module) -> None:
    closed = {
        m: (m.weight == 0).flatten(1).all(1) for m in model.modules() if isinstance(m, LAYERS)
    }
    producers = (tp.prune_conv_out_channels, tp.prune_linear_out_channels)
    for layer in list(closed)[:-1]:
        if isinstance(layer, nn.Conv2d) and layer.groups > 1:
            continue
        rows = (layer.weight == 0).flatten(1).all(1)
        remove = producers[isinstance(layer, nn.Linear)]
        indices = rows.nonzero().flatten().tolist()
        group = graph.get_pruning_group(layer, remove, idxs=indices) if indices else []
        for item in group:  # only what is closed in every layer that makes these channels
            if item.dep.handler in producers and len(item.idxs) == len(indices):
                weight = item.dep.target.module.weight
                rows[indices] &= (weight[item.idxs] == 0).flatten(1).all(1)
        indices = rows.nonzero().flatten().tolist()
        if indices and len(indices) < len(rows):
            group = graph.get_pruning_group(layer, remove, idxs=indices)
            if graph.check_pruning_group(group):
                group.prune()


# ---- running ------------------------------------------------------------------------------------


def sweep(args: argparse.Namespace) -> None:
    done = {
        line["key"]
        for line in read_lines(args.out)
        if line["kind"] == "sweep"
        and not (args.compiled and "compiled_ms" not in line)
        and not (args.retry and "error" in line)
    }
    known = architectures()
    vision = [a for a in known if a.library == "torchvision"]
    first = {a.family: a for a in reversed(vision)}  # one of each family before the others
    todo = [*first.values(), *representatives(known)]
    for architecture in todo if args.compiled else [*todo, *vision]:
        if architecture.key not in done and any(o in architecture.key for o in args.only):
            done.add(architecture.key)
            line = {"kind": "sweep", "key": architecture.key, "family": architecture.family}
            line |= examine(architecture, args)
            print(line["key"], line.get("parameters"), line.get("error", ""), flush=True)
            append_line(args.out, {**line, "origin": origin()})


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
            line = compare(whole, x, args.rounds, args.compiled)
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
    line = {
        "kind": "cifar",
        "model": f"{opened.job.model}, {args.cifar.name}",
        "forget": FORGET,
        "full": sum(p.numel() for p in opened.wf.base.parameters()),
        **compare(whole, x, args.rounds, compiled=True),
        **accuracies(whole, images, args.images),
    }
    print(line)
    append_line(args.out, {**line, "origin": origin()})


@torch.no_grad()
def accuracies(model: nn.Module, images: Any, count: int) -> dict[str, Any]:
    """Acc_r and Acc_f on the first test images, the same for both since their logits are."""
    x = torch.stack([images[i][0] for i in range(count)])
    y = torch.tensor([int(images[i][1]) for i in range(count)])
    right = torch.cat([model(part).argmax(1) for part in x.split(200)]) == y
    forgotten = torch.isin(y, torch.tensor(FORGET))
    return {
        "acc_r": round(100 * float(right[~forgotten].float().mean()), 2),
        "acc_f": round(100 * float(right[forgotten].float().mean()), 2),
        "images": count,
    }


# ---- tables -------------------------------------------------------------------------------------


def _ratio(pair: Iterable[float]) -> str:
    before, after = pair
    return f"{after / before:.3f}"


def tables(lines: list[dict[str, Any]]) -> str:
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:  # a later line need not have measured everything
        key = line["kind"], line.get("key") or line["model"]
        before = newest.get(key, {})
        kept = {k: before[k] for k in ("torch_pruning", "compiled_ms") if k in before}
        newest[key] = {**kept, **line}
    rows = [ln for ln in newest.values() if ln["kind"] == "cifar"]
    text = [
        "| model | parameters, whole | pruned | multiply-adds, whole | pruned | eager ms | "
        "compiled ms | Acc_r / Acc_f | largest difference, float64 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for line in rows:
        times = [
            f"{t['whole']:.0f} -> {t['pruned']:.0f}"
            for t in (line["eager_ms"], line["compiled_ms"])
        ]
        text.append(
            f"| {line['model']} | {line['parameters'][0]:,} | {line['parameters'][1]:,} | "
            f"{line['multiply_adds'][0] / 1e6:.0f} M | {line['multiply_adds'][1] / 1e6:.0f} M | "
            f"{' | '.join(times)} | {line['acc_r']} / {line['acc_f']} | "
            f"{line['difference_float64']:.0e} |"
        )
    text += ["", *_sweep_table([ln for ln in newest.values() if ln["kind"] == "sweep"])]
    return "\n".join(text) + "\n"


def _sweep_table(rows: list[dict[str, Any]]) -> list[str]:
    text = [
        "Ratios are pruned / whole; of torch-pruning parameters and largest difference of logits.",
        "",
        "| architecture | parameters | multiply-adds | eager time | compiled time | "
        "largest difference (float64) | closed units left | most of them because | torch-pruning |",
        "|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for line in rows:
        if "error" in line:
            text.append(f"| {line['key']} | - | - | - | - | - | - | {line['error']} | |")
            continue
        rival = line.get("torch_pruning", {})
        shown = rival.get("error", "")[:60].replace("|", "/")
        if "parameters" in rival:
            shown = f"{_ratio(rival['parameters'])}, {rival['difference']:.0e}"
        compiled = _ratio(line["compiled_ms"].values()) if "compiled_ms" in line else "-"
        why = line["left"][0][0][:70].replace("|", "/") if line["left"] else ""
        text.append(
            f"| {line['key']} | {_ratio(line['parameters'])} | {_ratio(line['multiply_adds'])} | "
            f"{_ratio(line['eager_ms'].values())} | {compiled} | "
            f"{line['difference_float64']:.0e} | "
            f"{line['left_units']} | {why} | {shown} |"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="time compiled models, too")
    parser.add_argument("--retry", action="store_true", help="again what was refused before")
    parser.add_argument("--rival", action="store_true", help="also torch-pruning")
    parser.add_argument(
        "--double",
        action="store_true",
        help="float64 for larger models, too: random ones can blow rounding up until it looks as "
        "if they mixed samples",
    )
    parser.add_argument("--only", nargs="+", default=[""], help="parts of architectures' names")
    parser.add_argument("--seconds", type=int, default=120, help="for one architecture")
    parser.add_argument("--cifar", type=Path, help="a folder of filters")
    parser.add_argument("--images", type=int, default=2000, help="test images for accuracies")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    add_table(parser, FILE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.sweep:
        sweep(args)
    if args.cifar:
        cifar(args)
    write_table(args, tables)


if __name__ == "__main__":
    main()
