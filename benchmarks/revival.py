"""Try to bring a forgotten class back from a baked model; one JSON line per attack.

    python benchmarks/revival.py FILTERS            # a folder of `wfilter untrain resnet18-cifar`
    python benchmarks/revival.py --table

ResNet-18 for CIFAR-10 without three classes. The attacker holds the baked model, knows its
architecture, and has some of: nothing else; 1, 5 or 50 training images of every class; the
positions of zeros (to be seen in a model baked with zeros); another public network of the same
architecture (ResNet-18 for ImageNet, compressed and fine-tuned).

Models handed out:

- soft: closed gates are 0.05 instead of 0.
- zeros: closed gates are 0, as ``wf.bake`` writes them.
- gaussian: zeros filled with noise of a tenth of the layer's spread, to hide where they were.
- pruned: ``wf.bake(prune=True)``. The attacker widens it again with zeros; where the new channels
  stand does not matter, but their BatchNorm entries and what read them are lost.
- restarted: a control: zeros, with all layers that have closed gates and the head drawn anew. What
  images restore here, they restore without anything that was left in those layers.

All gates of the recipe lie in the last stage, so everything before it is run once and "all" weights
are those of the last stage and the head. Few steps and few test images, for a CPU: the numbers
compare models, they are no bound on what a patient attacker reaches.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wfilter
from common import RESULTS, append_line, origin, read_lines
from wfilter.cli.jobs import open_filters

FILE = RESULTS / "revival.jsonl"
FORGET = (1, 3, 8)
SOFT = 0.05
MODELS = ("soft", "zeros", "gaussian", "pruned", "restarted")
SHOTS = (1, 5, 50)


class Tail(nn.Module):
    """The last stage and the head of a torchvision ResNet, on what comes before them."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.layer4, self.fc = copy.deepcopy(model.layer4), copy.deepcopy(model.fc)

    def features(self, x: Tensor) -> Tensor:
        return self.layer4(x).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


@torch.no_grad()
def trunk(model: nn.Module, images: Tensor) -> Tensor:
    """Everything before the last stage."""
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    body = nn.Sequential(stem, model.layer1, model.layer2, model.layer3)
    return torch.cat([body(part) for part in images.split(50)])


# ---- the models handed out ----------------------------------------------------------------------


def zeros_of(tail: Tail) -> dict[str, Tensor]:
    """Weight name -> where it is zero: what an attacker sees."""
    found = {n: p == 0 for n, p in tail.named_parameters() if p.ndim > 1 and "fc" not in n}
    return {name: zeros for name, zeros in found.items() if zeros.any()}


@torch.no_grad()
def handed_out(wf: wfilter.FilteredModel, kind: str, generator: torch.Generator) -> Tail:
    """One of ``MODELS``."""
    tail = Tail(wf.bake(set(FORGET)).eval()).eval()
    zeros = zeros_of(tail)
    if kind == "soft":
        whole = dict(Tail(wf.base).named_parameters())
        for name, closed in zeros.items():
            tail.get_parameter(name)[closed] = SOFT * whole[name][closed]
    if kind == "gaussian":
        fill(tail, zeros, generator, 0.1)
    if kind == "pruned":
        return widened(wf, tail)
    if kind == "restarted":
        torch.manual_seed(0)
        for module in tail.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return tail


def widened(wf: wfilter.FilteredModel, like: Tail) -> Tail:
    """The pruned model with new channels, silent and unread, up to its old widths."""
    small = wfilter.prune(wf.bake(set(FORGET)).eval(), torch.zeros(1, 3, 32, 32)).model
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


def from_another(path: Path) -> Callable[[Tail, dict[str, Tensor], torch.Generator], None]:
    """Closed rows from another network of the same architecture."""

    @torch.no_grad()
    def attack(tail: Tail, zeros: dict[str, Tensor], generator: torch.Generator) -> None:
        other = wfilter.zoo.build("torchvision:resnet18", weights=path)
        for name, closed in zeros.items():
            tail.get_parameter(name)[closed] = other.get_parameter(name)[closed]

    return attack


def by_noise(tail: Tail, zeros: dict[str, Tensor], generator: torch.Generator) -> None:
    """In place: noise of the other weights' spread."""
    fill(tail, zeros, generator, 1.0)


# ---- attacks with images ------------------------------------------------------------------------


@torch.no_grad()
def least_squares(tail: Tail, x: Tensor, y: Tensor) -> None:
    """In place: a new head, by ridge regression of labels on features."""
    features = torch.cat([tail.features(part) for part in x.split(100)])
    mean = features.mean(0)
    centred, wanted = features - mean, F.one_hot(y, 10).float() - 0.1
    ridge = 0.1 * centred.square().sum() / len(x) * torch.eye(len(x))
    solved = centred.T @ torch.linalg.solve(centred @ centred.T + ridge, wanted)
    tail.fc.weight.copy_(solved.T)
    tail.fc.bias.copy_(-mean @ solved)


def fine_tune(tail: Tail, x: Tensor, y: Tensor, zeros: dict[str, Tensor] | None, args: Any) -> None:
    """In place: a few steps of Adam on the zeros and the head, or on everything."""
    chosen = [tail.fc.weight, tail.fc.bias]
    chosen += list(tail.layer4.parameters()) if zeros is None else map(tail.get_parameter, zeros)
    optimiser = torch.optim.Adam(chosen, 1e-3)
    tail.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        batch = torch.randperm(len(x), generator=generator)[: args.batch]
        F.cross_entropy(tail(x[batch]), y[batch]).backward()
        for name, closed in (zeros or {}).items():
            tail.get_parameter(name).grad[~closed] = 0
        optimiser.step()
        optimiser.zero_grad()


# ---- running ------------------------------------------------------------------------------------


@torch.no_grad()
def accuracies(tail: Tail, x: Tensor, y: Tensor) -> dict[str, float]:
    right = torch.cat([tail(part).argmax(1) for part in x.split(100)]) == y
    own = torch.isin(y, torch.tensor(FORGET))
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


def run(args: argparse.Namespace) -> None:
    opened = open_filters(args.filters)
    wf = opened.wf
    tests = {c: args.tests if c in FORGET else args.tests // 2 for c in range(10)}
    test_x, test_y = pick(opened.job.images("test"), tests)
    train_x, train_y = pick(opened.job.images("train"), dict.fromkeys(range(10), max(SHOTS)))
    test_x, train_x = trunk(wf.base, test_x), trunk(wf.base, train_x)
    everything = [
        (kind, name, shots, work)
        for name, shots, work in attacks(args, train_x, train_y)
        for kind in MODELS
    ]
    kinds = {kind: handed_out(wf, kind, torch.Generator().manual_seed(0)) for kind in MODELS}
    zeros = {kind: zeros_of(kinds["pruned" if kind == "pruned" else "zeros"]) for kind in MODELS}
    done = {(ln["model"], ln["attack"], ln["shots"]) for ln in read_lines(args.out)}
    for kind, name, shots, work in everything:
        if (kind, name, shots) in done or (kind == "restarted" and shots == 0):
            continue
        generator, start = torch.Generator().manual_seed(0), time.perf_counter()
        tail = copy.deepcopy(kinds[kind])
        work(tail, zeros[kind], generator)
        line = {"model": kind, "attack": name, "shots": shots, **accuracies(tail, test_x, test_y)}
        line |= {"tests": len(test_y), "steps": args.steps, "batch": args.batch}
        print(line, flush=True)
        line["seconds"] = round(time.perf_counter() - start, 1)
        append_line(args.out, {**line, "origin": origin()})


def attacks(args: argparse.Namespace, x: Tensor, y: Tensor) -> list[tuple[str, int, Any]]:
    """Name, images per class, and what is done to the model in place."""
    other = from_another(args.other) if args.other else None
    plain: list[tuple[str, int, Any]] = [
        ("none", 0, lambda *_: None),
        ("scale small rows up", 0, by_scale),
        ("noise", 0, by_noise),
        ("neighbours", 0, by_neighbours),
        *([("another network", 0, other)] if other else []),
    ]
    for shots in SHOTS:
        few = torch.cat([(y == c).nonzero().flatten()[:shots] for c in range(10)])
        given = x[few], y[few]

        def head(tail: Tail, rows: Any, _: Any, given: Any = given) -> None:
            least_squares(tail, *given)

        def closed(tail: Tail, rows: Any, _: Any, given: Any = given) -> None:
            fine_tune(tail, *given, rows, args)

        def everything(tail: Tail, rows: Any, _: Any, given: Any = given) -> None:
            fine_tune(tail, *given, None, args)

        plain += [("least squares head", shots, head)]
        plain += [("tune zeros and head", shots, closed), ("tune all", shots, everything)]
        if other:

            def both(tail: Tail, rows: Any, g: Any, given: Any = given) -> None:
                other(tail, rows, g)
                least_squares(tail, *given)

            plain.append(("another network, least squares head", shots, both))
    return sorted(plain, key=lambda attack: attack[0].startswith("tune"))


def table(lines: list[dict[str, Any]]) -> str:
    cells = {(ln["attack"], ln["shots"], ln["model"]): ln for ln in lines}
    text = [
        "Acc_f / Acc_r after the attack, on " + f"{lines[0]['tests']} test images.",
        "",
        "| attack | images per class | " + " | ".join(MODELS) + " |",
        "|---|---:|" + "---:|" * len(MODELS),
    ]
    for name, shots in dict.fromkeys((a, s) for a, s, _ in cells):
        row = [cells.get((name, shots, model)) for model in MODELS]
        shown = [f"{ln['acc_f']:.0f} / {ln['acc_r']:.0f}" if ln else "-" for ln in row]
        text.append(f"| {name} | {shots} | " + " | ".join(shown) + " |")
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("filters", type=Path, nargs="?")
    parser.add_argument("--other", type=Path, help="weights of torchvision's resnet18")
    parser.add_argument("--tests", type=int, default=40, help="test images per forgotten class")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.filters:
        run(args)
    if args.table:
        args.out.with_suffix(".md").write_text(table(read_lines(args.out)))


if __name__ == "__main__":
    main()
