"""Does it pay to close whole groups of channels? The end of CIFAR-10 networks, untrained each way.

    python benchmarks/groups.py --network resnet18-cifar --filters FOLDER
    python benchmarks/groups.py --network vgg16-cifar --filters FOLDER
    python benchmarks/groups.py --table

The recipe ``distill`` with and without ``groups``, and with a reward for closing (``lambda_alpha``
below 0). Only the part of a network that the recipe gates is run: what it is given is computed once
for each image, so images are blended there and not shifted. Accuracies and sizes are those of sets
of three classes, baked and pruned. Settings are compared on training images that no step has seen;
test images are there for the record. ``--filters`` writes the filters of the whole network for each
variant, to be used by `benchmarks/pruning.py --cifar` and `benchmarks/revival.py`; it trains again
what has a line but no filters in that folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wfilter
from common import RESULTS, add_table, append_line, origin, read_lines, write_table
from wfilter import data, zoo
from wfilter.cli import settings
from wfilter.data.formats import cache_folder

FILE = RESULTS / "groups.jsonl"
SETS = ((1, 3, 8), (0, 4, 6), (2, 5, 9))
SPLITS = ("train", "held out", "test")
KEY = itemgetter("network", "variant", "images", "steps")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": True},
    "reward": {"lambda_alpha": -1.0},
    "groups, reward": {"groups": True, "lambda_alpha": -1.0},
}


def split(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """What the recipe leaves open, and the rest: the last stage, or the last six convolutions."""
    if hasattr(model, "layer4"):
        stem = (model.conv1, model.bn1, model.relu, model.maxpool)
        trunk = nn.Sequential(*stem, model.layer1, model.layer2, model.layer3)
        pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return trunk, nn.Sequential(model.layer4, *pool, model.fc)
    return model.features[:24], nn.Sequential(
        model.features[24:], nn.Flatten(), *model.classifier.children()
    )


@torch.no_grad()
def given_to_tail(network: str, model: nn.Module, images: int) -> dict[str, tuple[Tensor, Tensor]]:
    """For each split, what the tail is given and the labels; kept on disk for the next time."""
    path = cache_folder() / "tails" / f"{network}-{images}.pt"
    if path.exists():
        return torch.load(path)
    trunk, inputs = split(model)[0], vars(zoo.input_format(f"wfilter:{network}"))
    sets = {name: data.load("cifar10", name, **inputs) for name in ("train", "test")}
    order = torch.randperm(len(sets["train"]), generator=torch.Generator().manual_seed(0))
    chosen = {"train": order[:images], "held out": order[images : images + images // 2]}
    parts = {name: sets["train"].take(index) for name, index in chosen.items()}
    parts["test"] = sets["test"].take(torch.arange(images // 2))
    found = {}
    for name, part in parts.items():
        seen = [(trunk(x), y) for x, y in data.batches(part, 50)]
        found[name] = torch.cat([x for x, _ in seen]), torch.cat([y for _, y in seen])
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(found, path)
    return found


@torch.no_grad()
def measure(
    wf: wfilter.FilteredModel, tail: nn.Module, shown: dict[str, tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """Accuracies under each set, and what is left of the tail's parameters when pruned."""
    found: dict[str, list[Any]] = {f"{a} {s}": [] for a in ("acc_r", "acc_f") for s in SPLITS[1:]}
    found["parameters"] = []
    for forget in SETS:
        whole = wf.bake(set(forget)).eval()
        pruned = wfilter.prune(whole, shown["test"][0][:1])
        found["parameters"].append(pruned.parameters)
        for name in SPLITS[1:]:
            x, y = shown[name]
            right = torch.cat([whole(part).argmax(1) for part in x.split(100)]) == y
            own = torch.isin(y, torch.tensor(forget))
            found[f"acc_f {name}"].append(round(100 * float(right[own].float().mean()), 2))
            found[f"acc_r {name}"].append(round(100 * float(right[~own].float().mean()), 2))
    shares = {
        target.name: round(float((wf.alpha[target.name] <= 0).float().mean()), 3)
        for target in wf.targets
    }
    return {**found, "closed": shares}


def run(args: argparse.Namespace) -> None:
    spec = f"wfilter:{args.network}"
    model = zoo.build(spec, weights=zoo.weights_path(spec)).eval()
    shown = given_to_tail(args.network, model, args.images)
    variants = {**VARIANTS, **{f"{n:g}": {"lambda_alpha": n} for n in args.reward}}
    done = [KEY(ln) for ln in read_lines(args.out)]
    for name, changes in variants.items():
        tied = changes.get("groups") and args.network.startswith("vgg")  # it adds nothing up
        wanted = not args.only or name in args.only
        folder = args.filters and args.filters / name.replace(", ", "-")
        is_there = (args.network, name, args.images, args.steps) in done
        if tied or not wanted or (is_there and (not folder or folder.exists())):
            continue
        start = time.process_time()
        wf = untrained(split(model)[1], changes, shown["train"], args)
        line = {"network": args.network, "variant": name, "changes": changes, "steps": args.steps}
        line |= {"batch": args.batch, "images": args.images, **measure(wf, model, shown)}
        line["seconds"] = round(time.process_time() - start)
        print(line, flush=True)
        append_line(args.out, {**line, "origin": origin()})
        if folder:
            write(wf, model, args.network, folder)


def untrained(
    tail: nn.Module,
    changes: dict[str, Any],
    train: tuple[Tensor, Tensor],
    args: argparse.Namespace,
) -> wfilter.FilteredModel:
    """Filters of a tail, learned by one variant of the recipe."""
    recipe = dataclasses.replace(wfilter.RECIPES["distill"], depth=1.0, **changes)
    wf = wfilter.apply_weight_filtering(tail, 10, example_input=train[0][:1])
    images = wfilter.InMemory(*train, batch_size=args.batch)
    wfilter.untrain(wf, images, recipe=recipe, steps=args.steps, amp=args.bfloat16, progress=False)
    return wf


@torch.no_grad()
def write(tail: wfilter.FilteredModel, model: nn.Module, network: str, folder: Path) -> None:
    """The filters of the whole network: those of its tail, and open gates before it."""
    wf = wfilter.apply_weight_filtering(model, 10, example_input=torch.zeros(1, 3, 32, 32))
    units = tail.alphas.shape[1]
    wf.alphas.fill_(1000.0)
    wf.alphas[:, -units:] = tail.alphas
    assert [t.shape for t in wf.targets][-len(tail.targets) :] == [t.shape for t in tail.targets]
    wf.save(folder)
    job = {"model": f"wfilter:{network}", "weights": "data", "dataset": "cifar10"}
    (folder / settings.FILE).write_text(settings.write(job))
    wfilter.remove_weight_filtering(wf)


def table(lines: list[dict[str, Any]]) -> str:
    text = [
        f"Means over the sets {', '.join(map(str, SETS))}; parameters of the part with gates, "
        "pruned / whole.",
        "",
        "| network | variant | training images | steps | parameters | Acc_r, held out | "
        "Acc_f, held out | Acc_r, test | Acc_f, test |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for line in {KEY(ln): ln for ln in lines}.values():
        left = sum(after / before for before, after in line["parameters"]) / len(SETS)
        accuracies = [
            f"{sum(line[f'{name} {part}']) / len(SETS):.2f}"
            for part in SPLITS[1:]
            for name in ("acc_r", "acc_f")
        ]
        variant = line["variant"] if line["variant"] in VARIANTS else f"reward {line['variant']}"
        text.append(
            f"| {line['network']} | {variant} | {line['images']} | {line['steps']} | {left:.3f} | "
            f"{' | '.join(accuracies)} |"
        )
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=("resnet18-cifar", "vgg16-cifar"))
    parser.add_argument("--only", nargs="+", default=[], help="variants by name")
    parser.add_argument("--reward", type=float, nargs="+", default=[], help="other lambda_alpha")
    parser.add_argument("--images", type=int, default=1500, help="training images")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--filters", type=Path, help="folder for the filters of each variant")
    add_table(parser, FILE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.network:
        run(args)
    write_table(args, table)


if __name__ == "__main__":
    main()
