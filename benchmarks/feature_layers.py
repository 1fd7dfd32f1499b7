"""Deeper than the last layer: what each depth tells of a class, and edits folded into weights.

    python benchmarks/feature_layers.py --references '~/wfilter-references' --forget 3 \
        --variant original
    python benchmarks/feature_layers.py --table

A variant is a plain network: ``original``, ``retrained`` (never saw the class), or a list of depths
such as ``12,19``: at each, the channels that the next convolution sees are edited by the linear map
of `wfilter.core.folding` (statistics of channel means, estimated under the edits before it), which
is multiplied into that convolution's weights; ``24`` is the head's input. The head loses the class.
Figures: Acc_r, Acc_f, and what a linear probe and a network of one hidden layer on the channel
means find of the class at each depth, fitted on training images. Lines go to
``benchmarks/results/feature_layers.jsonl``.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attacks import View, linear_probe, mlp_probe, nearest_mean
from common import RESULTS, append_line, origin, read_lines
from feature_rows import load
from wfilter import zoo
from wfilter.core.folding import ERASED, folded
from wfilter.untraining.fitting import FeatureStatistics, fit_rows

MODEL, DATA = "wfilter:cnn_small-cifar", "cifar10"
DEPTHS = (5, 8, 12, 15, 19, 24)  # of the network's layers: what each convolution or the head sees
FILE = RESULTS / "feature_layers.jsonl"


def main() -> None:
    args = parse_arguments()
    if not args.table:
        append_line(FILE, {**measure(args), **origin()})
    write_table(read_lines(FILE))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--references", type=lambda name: Path(name).expanduser())
    parser.add_argument("--forget", type=int, default=3)
    parser.add_argument("--variant", default="original")
    parser.add_argument("--images", type=int, default=5000, help="to fit edits and probes")
    parser.add_argument("--table", action="store_true", help="only rebuild the table")
    return parser.parse_args()


@torch.no_grad()
def measure(args: argparse.Namespace) -> dict[str, Any]:
    began = time.process_time()
    train, test = load(MODEL, DATA, "train", args.images), load(MODEL, DATA, "test")
    every = torch.arange(len(train))
    model = variant(args, *train.batch(every))
    seen = channel_means(model, train.batch(every)[0])
    parts = [channel_means(model, test.batch(part)[0]) for part in torch.arange(10_000).split(500)]
    asked = {depth: torch.cat([part[depth] for part in parts]) for depth in parts[0]}
    logits = asked.pop(-1)
    right, own = logits.argmax(1) == test.labels, test.labels == args.forget
    line = {"benchmark": "feature_layers", "model": MODEL, "data": DATA, "variant": args.variant}
    line |= {"forget": args.forget, "images": args.images}
    line["acc_r"] = round(100 * float(right[~own].float().mean()), 2)
    line["acc_f"] = round(100 * float(right[own].float().mean()), 2)
    for depth in DEPTHS:
        logged = (seen[-1], logits)
        view = View(
            args.forget, seen[depth], train.labels, asked[depth], test.labels, logged[0], logged[1]
        )
        with torch.enable_grad():
            found = {"linear": linear_probe(view), "network": mlp_probe(view, 0)}
        found["mean"] = nearest_mean(view)
        line |= {f"{name}_{depth}": round(value, 1) for name, value in found.items()}
    return line | {"cpu_seconds": round(time.process_time() - began, 1)}


def variant(args: argparse.Namespace, images: Tensor, labels: Tensor) -> nn.Sequential:
    """The network that is looked at."""
    name = f"{MODEL.partition(':')[2]}-s0"
    if args.variant == "retrained":
        name += f"-without{args.forget}"
    path = args.references / f"{name}.safetensors"
    model = zoo.build(MODEL, num_classes=10, weights=path).eval()
    assert isinstance(model, nn.Sequential)
    if args.variant == "retrained":
        return model
    without(model[-1], args.forget)
    if args.variant != "original":
        for depth in map(int, args.variant.split(",")):
            fold_at(model, depth, args.forget, channel_means(model, images)[depth], labels)
    return model


def without(head: nn.Module, forget: int) -> None:
    assert isinstance(head, nn.Linear)
    head.weight[forget] = 0
    head.bias[forget] = ERASED


def fold_at(model: nn.Sequential, depth: int, forget: int, seen: Tensor, labels: Tensor) -> None:
    """In place: multiply the edit into the layer after ``depth``."""
    statistics = FeatureStatistics(10, seen.shape[1])
    statistics.add(seen, labels)
    layers = folded(fit_rows(statistics), nn.Linear(seen.shape[1], 10), torch.arange(10) == forget)
    assert isinstance(layers, nn.Sequential)
    edit = layers[0]
    assert isinstance(edit, nn.Linear)
    after = model[depth + 1]
    assert isinstance(after, nn.Conv2d | nn.Linear)
    weight = after.weight.clone()
    new = copy.deepcopy(after) if after.bias is not None else biased(after)
    new.weight.copy_(torch.einsum("ok...,ki->oi...", weight, edit.weight))
    new.bias.add_(torch.einsum("ok...,k->o", weight, edit.bias))
    model[depth + 1] = new


def biased(layer: nn.Module) -> nn.Conv2d:
    """A convolution like this one, with a bias of 0."""
    assert isinstance(layer, nn.Conv2d)
    sizes: Any = (layer.kernel_size, layer.stride, layer.padding)
    new = nn.Conv2d(layer.in_channels, layer.out_channels, *sizes)
    new.bias.data.zero_()
    return new.requires_grad_(False)


def channel_means(model: nn.Sequential, images: Tensor) -> dict[int, Tensor]:
    """What each depth has of the images, averaged over places; at -1 the logits."""
    found: dict[int, list[Tensor]] = {depth: [] for depth in (*DEPTHS, -1)}
    for x in images.split(500):
        for number, layer in enumerate(model):
            x = layer(x)
            if number in DEPTHS:
                found[number].append(x.flatten(2).mean(2) if x.ndim > 2 else x)
        found[-1].append(x)
    return {depth: torch.cat(parts) for depth, parts in found.items()}


def write_table(lines: list[dict[str, Any]]) -> None:
    depths = " | ".join(f"depth {depth}" for depth in DEPTHS)
    header = f"| class | network | Acc_r | Acc_f | {depths} |"
    rows = []
    for line in sorted(lines, key=lambda x: (x["forget"], len(x["variant"]))):
        cells = [f"{line[f'linear_{d}']:.0f} / {line[f'network_{d}']:.0f}" for d in DEPTHS]
        name = line["variant"] if line["variant"][0].isalpha() else f"folded at {line['variant']}"
        start = f"| {line['forget']} | {name} | {line['acc_r']:.1f} | {line['acc_f']:.1f} | "
        rows.append(start + " | ".join(cells) + " |")
    title = (
        "# By layer\n\nMade by `python benchmarks/feature_layers.py --table` from "
        "`feature_layers.jsonl`, where each line has its command. Share of the forgotten class's "
        "test images that a linear probe / a network of one hidden layer finds in the channel "
        f"means at each depth, in percent; {MODEL} on {DATA}; the last depth is what the head "
        "sees. In all networks but the retrained one the head has lost the class."
    )
    bars = "|---|---|---:|---:|" + "---:|" * len(DEPTHS)
    text = "\n".join([title, "", header, bars, *rows])
    (RESULTS / "feature_layers.md").write_text(text + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
