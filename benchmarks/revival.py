"""Try to bring a forgotten class back from a baked model; one JSON line per attack.

    python benchmarks/revival.py FILTERS                      # classes 1, 3 and 8 as one set
    python benchmarks/revival.py FILTERS --each --references  # one by one, with retrained networks
    python benchmarks/revival.py --table

FILTERS is a folder that `wfilter untrain` wrote for ``wfilter:resnet18-cifar``, ``cnn_small-cifar``
or ``cnn-cifar``. The attacker holds the baked model, knows its architecture, and has some of:
nothing else; 1, 5 or 50 training images of every class; the positions of zeros (to be seen in a
model baked with zeros); another network of the same architecture (``--other``; with
``--references`` the one trained without another class, which knows this one).

Models handed out:

- soft: closed gates are 0.05 instead of 0; with ``--soft FILTERS`` gates learned soft.
- zeros: closed gates are 0, as ``wf.bake`` writes them.
- gaussian: zeros filled with noise of a tenth of the layer's spread, to hide where they were.
- pruned: ``wf.bake(prune=True)``. The attacker widens it again with zeros; where the new channels
  stand does not matter, but their BatchNorm entries and what read them are lost.
- pruned + rows: the same with feature rows (recipe ``reroute``) folded into the head.
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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wfilter
from common import RESULTS, append_line, origin, read_lines
from references import folder, stem_name
from wfilter.cli.jobs import Filters, open_filters

FILE = RESULTS / "revival.jsonl"
FORGET = (1, 3, 8)
SOFT = 0.05
MODELS = ("soft", "zeros", "gaussian", "pruned", "pruned + rows", "restarted", "retrained")
SHOTS = (1, 5, 50)
ROW_IMAGES = 2000  # training images that feature rows are made from
POSITIONS = 2000  # rows of the least squares problem of one layer


# ---- a network in parts -------------------------------------------------------------------------


def split(model: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """What no gate touches, what comes after it, and the head."""
    if isinstance(model, nn.Sequential):
        return nn.Identity(), model[:-1], model[-1]
    stem = (model.conv1, model.bn1, model.relu, model.maxpool)
    trunk = nn.Sequential(*stem, model.layer1, model.layer2, model.layer3)
    return trunk, nn.Sequential(model.layer4, nn.AdaptiveAvgPool2d(1), nn.Flatten()), model.fc


class Tail(nn.Module):
    """The part of a network that an attacker works on: from the first gates to the logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        _, body, head = split(model)
        self.body, self.head = copy.deepcopy(body), copy.deepcopy(head)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@torch.no_grad()
def before_tail(model: nn.Module, images: Tensor) -> Tensor:
    """What a tail is given for these images."""
    trunk = split(model)[0]
    return torch.cat([trunk(part) for part in images.split(50)])


# ---- the models handed out ----------------------------------------------------------------------


def zeros_of(tail: Tail) -> dict[str, Tensor]:
    """Weight name -> where it is zero: what an attacker sees."""
    found = {n: p == 0 for n, p in tail.body.named_parameters("body") if p.ndim > 1}
    return {name: zeros for name, zeros in found.items() if zeros.any()}


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


@torch.no_grad()
def fill(tail: Tail, zeros: dict[str, Tensor], generator: torch.Generator, scale: float) -> None:
    """In place: noise of the other weights' spread times ``scale`` where there were zeros."""
    for name, closed in zeros.items():
        weight = tail.get_parameter(name)
        noise = torch.randn(int(closed.sum()), generator=generator)
        weight[closed] = scale * weight[~closed].std() * noise


# ---- attacks without images ---------------------------------------------------------------------


@torch.no_grad()
def by_neighbours(tail: Tail, zeros: dict[str, Tensor], generator: torch.Generator) -> None:
    """In place: closed rows become mixtures of open ones of the same layer; other zeros noise."""
    rows = {name: closed.flatten(1).all(1) for name, closed in zeros.items()}
    fill(tail, zeros, generator, 1.0)
    for name, closed in rows.items():
        weight = tail.get_parameter(name)
        around = weight[~closed]
        pick = torch.randint(len(around), (2, int(closed.sum())), generator=generator)
        weight[closed] = (around[pick[0]] + around[pick[1]]) / 2**0.5


@torch.no_grad()
def by_scale(tail: Tail, zeros: dict[str, Tensor], generator: torch.Generator) -> None:
    """In place: rows much smaller than others are scaled up to the others' size."""
    for name in zeros:
        weight = tail.get_parameter(name)
        norms = weight.flatten(1).norm(dim=1)
        small = norms < 0.25 * norms.median()
        typical = norms[~small].median()
        factor = torch.where(small, typical / norms.clamp(min=1e-12), 1.0)
        weight *= factor.view(-1, 1, 1, 1)


@torch.no_grad()
def by_another(
    other: Tail, tail: Tail, zeros: dict[str, Tensor], generator: torch.Generator
) -> None:
    """In place: closed weights from another network of the same architecture."""
    for name, closed in zeros.items():
        tail.get_parameter(name)[closed] = other.get_parameter(name)[closed]


def by_noise(tail: Tail, zeros: dict[str, Tensor], generator: torch.Generator) -> None:
    """In place: noise of the other weights' spread."""
    fill(tail, zeros, generator, 1.0)


# ---- attacks with images ------------------------------------------------------------------------


def ridge(features: Tensor, wanted: Tensor) -> Tensor:
    """Weights ``(features, outputs)`` that make centred outputs of centred features."""
    shrink = 0.1 * features.square().sum() / len(features) * torch.eye(len(features))
    return features.T @ torch.linalg.solve(features @ features.T + shrink, wanted)


@torch.no_grad()
def new_head(tail: Tail, x: Tensor, y: Tensor, last: bool = False) -> None:
    """In place: all that follows the features, or only its last layer, solved from labels."""
    keeps = tail.head[:-1] if last and isinstance(tail.head, nn.Sequential) else nn.Identity()
    features = torch.cat([keeps(tail.features(part)) for part in x.split(100)])
    mean = features.mean(0)
    solved = ridge(features - mean, F.one_hot(y, 10).float() - 0.1)
    layer = nn.Linear(features.shape[1], 10)
    layer.weight.copy_(solved.T)
    layer.bias.copy_(0.1 - mean @ solved)
    tail.head = nn.Sequential(keeps, layer)


def new_rows(
    tail: Tail, zeros: dict[str, Tensor], x: Tensor, y: Tensor, generator: torch.Generator
) -> None:
    """In place: closed rows by least squares, so that they give what the next layers ask for.

    That is the step down the loss of the layer's output, seen through the weights that are left
    behind it. Rows start as noise, since a silent ReLU asks for nothing, and get the norm of open
    rows.
    """
    fill(tail, zeros, generator, 0.5)
    rows = {name: closed.flatten(1).all(1) for name, closed in zeros.items()}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        tail.get_submodule(name.removesuffix(".weight")).register_forward_hook(
            lambda _, given, made, name=name: seen.update({name: (given[0], made)})
        )
        for name in rows
    ]
    tail.requires_grad_(True)
    loss = F.cross_entropy(tail(x), y)
    for hook in hooks:
        hook.remove()
    steps = torch.autograd.grad(loss, [made for _, made in seen.values()])
    for (name, (given, _)), step in zip(seen.items(), steps):
        layer = tail.get_submodule(name.removesuffix(".weight"))
        _solve_rows(layer, rows[name], given.detach(), -step, generator)


@torch.no_grad()
def _solve_rows(
    layer: nn.Conv2d, rows: Tensor, given: Tensor, wanted: Tensor, generator: torch.Generator
) -> None:
    patches = F.unfold(given, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    inputs = patches.transpose(1, 2).flatten(0, 1)  # (positions, weights of a row)
    outputs = wanted.flatten(2).transpose(1, 2).flatten(0, 1)[:, rows]
    some = torch.randperm(len(inputs), generator=generator)[:POSITIONS]
    inputs, outputs = inputs[some] - inputs.mean(0), outputs[some] - outputs.mean(0)
    solved = ridge(inputs, outputs).T
    norm = layer.weight[~rows].flatten(1).norm(dim=1).median()
    solved *= norm / solved.norm(dim=1, keepdim=True).clamp(min=1e-12)
    layer.weight[rows] = solved.view(-1, *layer.weight.shape[1:])


def fine_tune(tail: Tail, x: Tensor, y: Tensor, zeros: dict[str, Tensor] | None, args: Any) -> None:
    """In place: a few steps of Adam on the zeros and the head, or on everything."""
    tail.requires_grad_(True)
    chosen = list(tail.head.parameters())
    chosen += list(tail.body.parameters()) if zeros is None else map(tail.get_parameter, zeros)
    optimiser = torch.optim.Adam(chosen, 1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        batch = torch.randperm(len(x), generator=generator)[: args.batch]
        F.cross_entropy(tail(x[batch]), y[batch]).backward()
        for name, closed in (zeros or {}).items():
            tail.get_parameter(name).grad[~closed] = 0
        optimiser.step()
        optimiser.zero_grad()


Attack = Callable[[Tail, dict[str, Tensor], torch.Generator], None]


def attacks(
    args: argparse.Namespace, x: Tensor, y: Tensor, other: Tail | None
) -> Iterator[tuple[str, int, Attack]]:
    """Name, images per class, and what is done to the model in place."""
    fills = {"scale small rows up": by_scale, "noise": by_noise, "neighbours": by_neighbours}
    if other is not None:
        fills["another network"] = partial(by_another, other)
    yield "none", 0, lambda *_: None
    for name, work in fills.items():
        yield name, 0, work
    for shots in SHOTS:
        few = torch.cat([(y == c).nonzero().flatten()[:shots] for c in range(10)])
        for name, attack in with_images(args, x[few], y[few], fills).items():
            yield name, shots, attack


def with_images(
    args: argparse.Namespace, x: Tensor, y: Tensor, fills: dict[str, Attack]
) -> dict[str, Attack]:
    """Attacks by someone who has these images."""

    def filled(tail: Tail, zeros: Any, generator: torch.Generator) -> None:
        fills["another network"](tail, zeros, generator)
        new_head(tail, x, y)

    found: dict[str, Attack] = {
        "new head": lambda tail, *_: new_head(tail, x, y),
        "new last layer": lambda tail, *_: new_head(tail, x, y, last=True),
        "new rows": lambda tail, zeros, generator: new_rows(tail, zeros, x, y, generator),
        "tune zeros and head": lambda tail, zeros, _: fine_tune(tail, x, y, zeros, args),
        "tune all": lambda tail, *_: fine_tune(tail, x, y, None, args),
    }
    return {**found, "another network, new head": filled} if "another network" in fills else found


NEEDS_ZEROS = ("noise", "neighbours", "another network", "new rows", "tune zeros")


def is_meant(kind: str, attack: str, shots: int) -> bool:
    """Not for networks without zeros what fills zeros, nor what a restart leaves untouched."""
    if kind == "retrained":
        return not attack.startswith((*NEEDS_ZEROS, "scale"))
    return shots > 0 or kind != "restarted"


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


def with_rows(opened: Filters) -> wfilter.FilteredModel:
    """The same filters with feature rows, made from training images."""
    wf = copy.deepcopy(opened.wf)
    each = dict.fromkeys(range(10), ROW_IMAGES // 10)
    wfilter.untrain(wf, wfilter.InMemory(*pick(opened.job.images("train"), each)), recipe="reroute")
    return wf


def run(args: argparse.Namespace) -> None:
    opened = open_filters(args.filters)
    rows = with_rows(opened)
    train = pick(opened.job.images("train"), dict.fromkeys(range(10), max(SHOTS)))
    for forget in [{c} for c in FORGET] if args.each else [set(FORGET)]:
        tests = {c: args.tests if c in forget else args.tests // 2 for c in range(10)}
        test = pick(opened.job.images("test"), tests)
        attack_all(args, opened, models(args, opened, rows, forget), forget, train, test)


def models(
    args: argparse.Namespace, opened: Filters, rows: wfilter.FilteredModel, forget: set[int]
) -> dict[str, Tail]:
    """All that can be handed out with the files that are there."""
    found = {}
    for kind in MODELS[:-1]:
        wf = rows if kind == "pruned + rows" else opened.wf
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
    if args.references:
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
            what = {**facts, "model": kind, "attack": name, "shots": shots}
            if what in done or not is_meant(kind, name, shots):
                continue
            zeros = zeros_of(kinds[kind if kind.startswith("pruned") else "zeros"])
            start, tail = time.process_time(), copy.deepcopy(tail)
            work(tail, zeros, torch.Generator().manual_seed(0))
            line = {**what, **accuracies(tail, *asked, forget)}
            line["seconds"] = round(time.process_time() - start, 1)
            print(line, flush=True)
            append_line(args.out, {**line, "origin": origin()})


# ---- the table ----------------------------------------------------------------------------------


def tables(lines: list[dict[str, Any]]) -> str:
    """One table for each network; a mean where classes were forgotten one by one."""
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
    parser.add_argument("--each", action="store_true", help="one class at a time, not a set")
    parser.add_argument("--soft", type=Path, help="filters with soft gates")
    parser.add_argument(
        "--references", type=Path, nargs="?", const=folder(), help="folder of retrained networks"
    )
    parser.add_argument("--other", type=Path, help="weights of torchvision's resnet18")
    parser.add_argument("--tests", type=int, default=40, help="test images per forgotten class")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    if args.references and not args.each:
        parser.error("--references has networks without one class each: give --each, too")
    torch.set_num_threads(1)
    if args.filters:
        run(args)
    if args.table:
        args.out.with_suffix(".md").write_text(tables(read_lines(args.out)))


if __name__ == "__main__":
    main()
