"""Try to bring a forgotten class back from a baked model; one JSON line per attack.

    python benchmarks/revival.py FILTERS                      # classes 1, 3 and 8 as one set
    python benchmarks/revival.py FILTERS --references         # with a network retrained without
    python benchmarks/revival.py FILTERS --each --references  # the same, one class at a time
    python benchmarks/revival.py --table

FILTERS is a folder that `wfilter untrain` wrote for ``wfilter:resnet18-cifar``, ``cnn_small-cifar``
or ``cnn-cifar``. The attacker holds the baked model, knows its architecture, and has some of:
nothing else; 1, 5 or 50 training images of every class; the positions of zeros and of rows much
smaller than others, which the weights show; another network of the same architecture (``--other``;
with ``--each --references`` the one trained without another class, which knows this one).
``--seed`` draws other images for the attacker, and other noise.

Models handed out:

- soft: closed gates are 0.05 instead of 0; with ``--soft FILTERS`` gates learned soft.
- zeros: closed gates are 0, as ``wf.bake`` writes them.
- gaussian: zeros filled with noise of a tenth of the layer's spread, to hide where they were.
- pruned: ``wf.bake(prune=True)``. The attacker widens it again with zeros; where the new channels
  stand does not matter, but their BatchNorm entries and what read them are lost.
- pruned + rows: the same with feature rows (recipe ``reroute``, made for the baked model from
  2,000 training images) folded into the head.
- restarted: a control: zeros, with all layers that have closed gates and the head drawn anew. What
  images restore here, they restore without anything that was left in those layers.
- retrained: the network of `benchmarks/references.py` that never saw the class, or the set.

Of the ResNet-18 all gates lie in the last stage, so everything before it is run once and "all"
weights are those of the last stage and the head; of the others they are all weights. Few steps and
few test images, for a CPU: the numbers compare models, they are no bound on what a patient attacker
reaches.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wfilter
from common import RESULTS, add_table, append_line, origin, read_lines, write_table
from references import folder, stem_name
from revival_attacks import SHOTS, Tail, attacks, before_tail, fill, is_meant, zeros_of
from wfilter.cli.jobs import Filters, open_filters

FILE = RESULTS / "revival.jsonl"
FORGET = (1, 3, 8)
SOFT = 0.05
MODELS = ("soft", "zeros", "gaussian", "pruned", "pruned + rows", "restarted", "retrained")
ROW_IMAGES = 2000  # training images that feature rows are made from


# ---- the models handed out ----------------------------------------------------------------------


@torch.no_grad()
def handed_out(wf: wfilter.FilteredModel, kind: str, forget: set[int], seed: int = 0) -> Tail:
    """One of ``MODELS``, but for those that need other files."""
    tail = Tail(wf.bake(forget).eval()).eval()
    zeros = zeros_of(tail)
    if kind == "soft":
        whole = dict(Tail(wf.base).named_parameters())
        for name, closed in zeros.items():
            tail.get_parameter(name)[closed] = SOFT * whole[name][closed]
    if kind == "gaussian":
        fill(tail, zeros, torch.Generator().manual_seed(seed), 0.1)
    if kind.startswith("pruned"):
        return widened(wf, forget, tail)
    if kind == "restarted":
        torch.manual_seed(seed)
        for path in ("head", *(name.rpartition(".")[0] for name in zeros)):
            tail.get_submodule(path).reset_parameters()
    return tail


def widened(wf: wfilter.FilteredModel, forget: set[int], like: Tail) -> Tail:
    """The pruned model with new channels, silent and unread, up to its old widths."""
    small = wfilter.prune(wf.bake(forget).eval(), torch.zeros(1, 3, 32, 32)).model
    wide = copy.deepcopy(like)
    state = Tail(small).state_dict()
    for name, tensor in wide.state_dict().items():
        if tensor.ndim:
            one = name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight"))
            tensor.fill_(float(one))
            tensor[tuple(slice(0, n) for n in state[name].shape)] = state[name]
    return wide


# ---- running ------------------------------------------------------------------------------------


@torch.no_grad()
def accuracies(tail: Tail, x: Tensor, y: Tensor, forget: set[int]) -> dict[str, float]:
    right = torch.cat([tail(part).argmax(1) for part in x.split(100)]) == y
    own = torch.isin(y, torch.tensor(sorted(forget)))
    return {
        "acc_f": round(100 * float(right[own].float().mean()), 1),
        "acc_r": round(100 * float(right[~own].float().mean()), 1),
    }


def pick(images: Any, per_class: dict[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """The first images of each class; with a seed, others."""
    left, chosen = dict(per_class), []
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).tolist()
    for index in order if seed else range(len(images)):
        label = int(images[index][1])
        if left.get(label, 0):
            left[label] -= 1
            chosen.append(index)
        if not any(left.values()):
            break
    x = torch.stack([images[i][0] for i in chosen])
    return x, torch.tensor([int(images[i][1]) for i in chosen])


def with_rows(opened: Filters, forget: set[int], given: wfilter.InMemory) -> wfilter.FilteredModel:
    """Feature rows on the baked model: rows and trained gates do not go together otherwise."""
    baked = opened.wf.bake(forget).eval()
    wf = wfilter.apply_weight_filtering(baked, 10, example_input=given.images[:1])
    wfilter.untrain(wf, given, recipe="reroute")
    return wf


def run(args: argparse.Namespace) -> None:
    opened = open_filters(args.filters)
    each = dict.fromkeys(range(10), ROW_IMAGES // 10)
    given = wfilter.InMemory(*pick(opened.job.images("train"), each))
    shots = dict.fromkeys(range(10), max(SHOTS))
    train = pick(opened.job.images("train"), shots, args.seed)
    for forget in [{c} for c in args.classes] if args.each else [set(args.classes)]:
        tests = {c: args.tests if c in forget else args.tests // 2 for c in range(10)}
        test = pick(opened.job.images("test"), tests)
        attack_all(args, opened, models(args, opened, given, forget), forget, train, test)


def models(
    args: argparse.Namespace, opened: Filters, given: wfilter.InMemory, forget: set[int]
) -> dict[str, Tail]:
    """All that can be handed out with the files that are there."""
    found = {}
    for kind in [m for m in MODELS[:-1] if m in args.models or m == "zeros"]:
        wf = with_rows(opened, forget, given) if kind == "pruned + rows" else opened.wf
        found[kind] = handed_out(wf, kind, forget, args.seed)
    if args.soft:
        found["soft"] = Tail(open_filters(args.soft).wf.bake(forget).eval()).eval()
    if args.references:
        found["retrained"] = Tail(reference(args, opened, forget)).eval()
    return {kind: found[kind] for kind in args.models if kind in found} | {"zeros": found["zeros"]}


def reference(args: argparse.Namespace, opened: Filters, without: set[int]) -> nn.Module:
    """The network that was trained without some classes."""
    name = stem_name(opened.job.model.removeprefix("wfilter:"), 0, *sorted(without))
    weights = args.references / f"{name}.safetensors"
    return wfilter.zoo.build(opened.job.model, weights=weights).eval()


def another(args: argparse.Namespace, opened: Filters, forget: set[int]) -> Tail | None:
    """The attacker's second network, if there is one."""
    if args.other:
        return Tail(wfilter.zoo.build("torchvision:resnet18", weights=args.other).eval())
    if args.references and args.another and args.each:
        return Tail(reference(args, opened, {next(c for c in FORGET if c not in forget)})).eval()
    return None


def attack_all(
    args: argparse.Namespace,
    opened: Filters,
    kinds: dict[str, Tail],
    forget: set[int],
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
) -> None:
    """Every attack on every model, but for those whose lines are there."""
    facts = {"network": opened.job.model.removeprefix("wfilter:"), "forget": sorted(forget)}
    facts |= {"tests": len(test[1]), "steps": args.steps, "batch": args.batch, "seed": args.seed}
    lines = [{"seed": 0, **line} for line in read_lines(args.out)]
    done = [{key: ln.get(key) for key in (*facts, "model", "attack", "shots")} for ln in lines]
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    other = another(args, opened, forget)
    for kind in [kind for kind in kinds if kind in args.models]:
        # a retrained network has its own layers before the tail
        network = reference(args, opened, forget) if kind == "retrained" else opened.wf.base
        if network not in seen:
            seen[network] = before_tail(network, train[0]), before_tail(network, test[0])
        shown, asked = seen[network]
        zeros = zeros_of(kinds["zeros" if kind == "restarted" else kind])
        for name, shots, work in attacks(args, shown, train[1], other):
            what = {**facts, "model": kind, "attack": name, "shots": shots}
            wanted = not args.attacks or name in args.attacks
            if not wanted or what in done or not is_meant(kind, name, shots, kinds[kind]):
                continue
            start, tail = time.process_time(), copy.deepcopy(kinds[kind])
            work(tail, zeros, torch.Generator().manual_seed(args.seed))
            line = {**what, **accuracies(tail, asked, test[1], forget)}
            line["seconds"] = round(time.process_time() - start, 1)
            print(line, flush=True)
            append_line(args.out, {**line, "origin": origin()})


# ---- the table ----------------------------------------------------------------------------------


def tables(lines: list[dict[str, Any]]) -> str:
    """One table for each network, number of tests and steps."""
    parts: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        line = {"network": "resnet18-cifar", "forget": FORGET, "seed": 0, **line}
        parts.setdefault((line["network"], line["tests"], line["steps"]), []).append(line)
    return "\n".join(table(part) for part in parts.values())


def table(lines: list[dict[str, Any]]) -> str:
    """A mean where classes were forgotten one by one, and where there are several seeds."""
    cells: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for line in lines:
        cells.setdefault((line["attack"], line["shots"], line["model"]), []).append(line)
    forgotten = " and ".join(str(f) for f in dict.fromkeys(str(ln["forget"]) for ln in lines))
    columns = [m for m in MODELS if any(m == model for _, _, model in cells)]
    text = [
        f"## {lines[0]['network']}, {lines[0]['tests']} test images",
        "",
        f"Acc_f / Acc_r after the attack, forgetting {forgotten}; {lines[0]['steps']} steps where "
        f"weights are tuned. {seeds_of(list(cells.values()))}",
        "",
        "| attack | images per class | " + " | ".join(columns) + " |",
        "|---|---:|" + "---:|" * len(columns),
    ]
    for name, shots in sorted(dict.fromkeys((a, s) for a, s, _ in cells), key=lambda row: row[1]):
        row = [mean_of(cells.get((name, shots, model), [])) for model in columns]
        text.append(f"| {name} | {shots} | " + " | ".join(row) + " |")
    return "\n".join(text) + "\n"


def seeds_of(cells: list[list[dict[str, Any]]]) -> str:
    """How many seeds there are, and by how much Acc_f differs between them."""
    seeds = sorted({line["seed"] for cell in cells for line in cell})
    if len(seeds) == 1:
        return "One seed."
    apart = sorted(
        max(ln["acc_f"] for ln in cell) - min(ln["acc_f"] for ln in cell)
        for cell in cells
        if len({line["seed"] for line in cell}) > 1 and len({str(ln["forget"]) for ln in cell}) == 1
    )
    return (
        f"Means of seeds {', '.join(map(str, seeds))}: their Acc_f is {apart[len(apart) // 2]:.0f} "
        f"points apart in the median of the cells, {apart[-1]:.0f} at most."
    )


def mean_of(lines: list[dict[str, Any]]) -> str:
    if not lines:
        return "-"
    means = [sum(ln[key] for ln in lines) / len(lines) for key in ("acc_f", "acc_r")]
    return f"{means[0]:.0f} / {means[1]:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("filters", type=Path, nargs="?")
    parser.add_argument("--classes", type=int, nargs="+", default=FORGET)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--attacks", nargs="+", default=[], help="by name; default: all")
    parser.add_argument("--shots", type=int, nargs="+", default=SHOTS, help="images per class")
    parser.add_argument("--each", action="store_true", help="one class at a time, not a set")
    parser.add_argument("--soft", type=Path, help="filters with soft gates")
    parser.add_argument(
        "--references", type=Path, nargs="?", const=folder(), help="folder of retrained networks"
    )
    parser.add_argument("--other", type=Path, help="weights of torchvision's resnet18")
    parser.add_argument(
        "--another",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="attacks that need a second network of --references",
    )
    parser.add_argument("--tests", type=int, default=40, help="test images per forgotten class")
    parser.add_argument("--seed", type=int, default=0, help="of the attacker's images and noise")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    add_table(parser, FILE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.filters:
        run(args)
    write_table(args, tables)


if __name__ == "__main__":
    main()
