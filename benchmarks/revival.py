"""Try to bring a forgotten class back from a baked model; one JSON line per attack.

    python benchmarks/revival.py FILTERS                      # classes 1, 3 and 8 as one set
    python benchmarks/revival.py FILTERS --each --references  # one by one, with retrained networks
    python benchmarks/revival.py --table

FILTERS is a folder that `wfilter untrain` wrote for ``wfilter:resnet18-cifar``, ``cnn_small-cifar``
or ``cnn-cifar``. The attacker holds the baked model, knows its architecture, and has some of:
nothing else; 1, 5 or 50 training images of every class; the positions of zeros and of rows much
smaller than others, which the weights show; another network of the same architecture (``--other``;
with ``--references`` the one trained without another class, which knows this one).

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
- retrained: the network of `benchmarks/references.py` that never saw the class.

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
from torch import Tensor

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


def pick(images: Any, per_class: dict[int, int]) -> tuple[Tensor, Tensor]:
    """The first images of each class."""
    left, chosen = dict(per_class), []
    for index in range(len(images)):
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
    train = pick(opened.job.images("train"), dict.fromkeys(range(10), max(SHOTS)))
    for forget in [{c} for c in args.classes] if args.each else [set(args.classes)]:
        tests = {c: args.tests if c in forget else args.tests // 2 for c in range(10)}
        test = pick(opened.job.images("test"), tests)
        attack_all(args, opened, models(args, opened, given, forget), forget, train, test)


def models(
    args: argparse.Namespace, opened: Filters, given: wfilter.InMemory, forget: set[int]
) -> dict[str, Tail]:
    """All that can be handed out with the files that are there."""
    found = {}
    for kind in MODELS[:-1]:
        wf = with_rows(opened, forget, given) if kind == "pruned + rows" else opened.wf
        found[kind] = handed_out(wf, kind, forget)
    if args.soft:
        found["soft"] = Tail(open_filters(args.soft).wf.bake(forget).eval()).eval()
    if args.references:
        found["retrained"] = reference(args, opened, *forget)
    return found


def reference(args: argparse.Namespace, opened: Filters, *without: int) -> Tail:
    """The network that was trained without some classes."""
    name = stem_name(opened.job.model.removeprefix("wfilter:"), 0, *without)
    weights = args.references / f"{name}.safetensors"
    return Tail(wfilter.zoo.build(opened.job.model, weights=weights).eval()).eval()


def another(args: argparse.Namespace, opened: Filters, forget: set[int]) -> Tail | None:
    """The attacker's second network, if there is one."""
    if args.other:
        return Tail(wfilter.zoo.build("torchvision:resnet18", weights=args.other).eval())
    if args.references and args.another:
        return reference(args, opened, next(c for c in FORGET if c not in forget))
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
    facts |= {"tests": len(test[1]), "steps": args.steps, "batch": args.batch}
    done = [{key: line.get(key) for key in (*facts, "model", "attack", "shots")}
            for line in read_lines(args.out)]  # fmt: skip
    shown = before_tail(opened.wf.base, train[0]), train[1]
    asked = before_tail(opened.wf.base, test[0]), test[1]
    for name, shots, work in attacks(args, *shown, another(args, opened, forget)):
        for kind, tail in kinds.items():
            if kind not in args.models:
                continue
            what = {**facts, "model": kind, "attack": name, "shots": shots}
            if what in done or not is_meant(kind, name, shots):
                continue
            zeros = zeros_of(kinds["zeros"] if kind == "restarted" else tail)
            start, tail = time.process_time(), copy.deepcopy(tail)
            work(tail, zeros, torch.Generator().manual_seed(0))
            line = {**what, **accuracies(tail, *asked, forget)}
            line["seconds"] = round(time.process_time() - start, 1)
            print(line, flush=True)
            append_line(args.out, {**line, "origin": origin()})


# ---- the table ----------------------------------------------------------------------------------


def tables(lines: list[dict[str, Any]]) -> str:
    """One table for each network; a mean where classes were forgotten one by one."""
    lines = [{"network": "resnet18-cifar", "forget": FORGET, **ln} for ln in lines]
    return "\n".join(
        table(name, [ln for ln in lines if ln["network"] == name])
        for name in dict.fromkeys(ln["network"] for ln in lines)
    )


def table(network: str, lines: list[dict[str, Any]]) -> str:
    cells: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for line in lines:
        cells.setdefault((line["attack"], line["shots"], line["model"]), []).append(line)
    forgotten = " and ".join(str(f) for f in dict.fromkeys(str(ln["forget"]) for ln in lines))
    columns = [m for m in MODELS if any(m == model for _, _, model in cells)]
    text = [
        f"## {network}",
        "",
        f"Acc_f / Acc_r after the attack, forgetting {forgotten}, on {lines[0]['tests']} test "
        f"images; {lines[0]['steps']} steps where weights are tuned.",
        "",
        "| attack | images per class | " + " | ".join(columns) + " |",
        "|---|---:|" + "---:|" * len(columns),
    ]
    for name, shots in sorted(dict.fromkeys((a, s) for a, s, _ in cells), key=lambda row: row[1]):
        row = [mean_of(cells.get((name, shots, model), [])) for model in columns]
        text.append(f"| {name} | {shots} | " + " | ".join(row) + " |")
    return "\n".join(text) + "\n"


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
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    add_table(parser, FILE)
    args = parser.parse_args()
    if args.references and not args.each:
        parser.error("--references has networks without one class each: give --each, too")
    torch.set_num_threads(1)
    if args.filters:
        run(args)
    write_table(args, tables)


if __name__ == "__main__":
    main()
