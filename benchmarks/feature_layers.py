"""Deeper than the last layer: what each depth tells of a class, and edits folded into weights.

    python benchmarks/feature_layers.py --references '~/wfilter-references' --forget 3 \
        --variants original retrained 24 19,24 12,19,24
    python benchmarks/feature_layers.py --model wfilter:resnet18-cifar --forget 3 \
        --variants original fc layer3,fc layer2,layer3,fc --images 1000 --test-images 1000
    python benchmarks/feature_layers.py --references '~/wfilter-references' --forget 3 \
        --variants original 19,24 --stages 'soft 0.5'
    python benchmarks/feature_layers.py --table

A variant is a plain network: ``original``, ``retrained`` (never saw the class), or a list of places
such as ``12,19``: at each, the channels that the next layers see are edited by the linear map of
`wfilter.core.folding` (statistics of channel means, estimated under the edits before it), which is
multiplied into the weights of all layers that read these channels; the last place is the head's
input. The head loses the class. Where a convolution pads, its rim is off by the edit's offset.
With ``--stages`` of recipe "auto", gates are trained and folded into the network first.
Figures: Acc_r, Acc_f, and what a linear probe and a network of one hidden layer on the channel
means find of the class at each place, before its own edit and after the edits of earlier places,
and at ``edited``, what the last of the edits leaves; fitted on training images. Lines go to
``benchmarks/results/feature_layers.jsonl``.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attacks import View, linear_probe, mlp_probe, nearest_mean
from common import RESULTS, append_line, origin, read_lines
from feature_rows import load
from gated_rows import gated
from wfilter import metrics, zoo
from wfilter.core.folding import ERASED, folded
from wfilter.untraining.fitting import FeatureStatistics, fit_rows

DATA = "cifar10"
# Of each network the places that are looked at, and the layers that read there.
PLACES: dict[str, dict[str, tuple[str, ...]]] = {
    "wfilter:cnn_small-cifar": {str(n): (str(n + 1),) for n in (5, 8, 12, 15, 19, 24)},
    "wfilter:resnet18-cifar": {
        "layer1": ("layer2.0.conv1", "layer2.0.downsample.0"),
        "layer2": ("layer3.0.conv1", "layer3.0.downsample.0"),
        "layer3": ("layer4.0.conv1", "layer4.0.downsample.0"),
        "fc": ("fc",),
    },
}
FILE = RESULTS / "feature_layers.jsonl"


def main() -> None:
    args = parse_arguments()
    if not args.table:
        start = original(args)
        for name in args.variants:
            append_line(FILE, {**measure(args, name, start), **origin()})
    write_table(read_lines(FILE))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="wfilter:cnn_small-cifar", choices=list(PLACES))
    parser.add_argument("--references", type=lambda name: Path(name).expanduser())
    parser.add_argument("--forget", type=int, default=3)
    parser.add_argument("--variants", nargs="+", default=["original"])
    parser.add_argument("--images", type=int, default=5000, help="to fit edits and probes")
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--stages", default="", help="train gates by these and fold them in first")
    parser.add_argument("--table", action="store_true", help="only rebuild the table")
    return parser.parse_args()


def original(args: argparse.Namespace) -> nn.Module:
    """The network before any edit, with the gates of the class folded in where there are any."""
    model = zoo.build(args.model, num_classes=10, weights=weights(args, "")).eval()
    if not args.stages:
        return model
    train = load(args.model, DATA, "train", args.images)
    return gated(model, train, args.stages)[0].bake(args.forget)


@torch.no_grad()
def measure(args: argparse.Namespace, name: str, start: nn.Module) -> dict[str, Any]:
    began = time.process_time()
    train = load(args.model, DATA, "train", args.images)
    test = load(args.model, DATA, "test", args.test_images)
    images, labels = train.batch(torch.arange(len(train)))
    model, edit = variant(args, name, start, images, labels)
    places = PLACES[args.model]
    seen, logits_seen = channel_means(model, places, images)
    asked, logits = channel_means(model, places, test.batch(torch.arange(len(test)))[0])
    if edit is not None:
        seen["edited"], asked["edited"] = (edit[1](part[edit[0]]) for part in (seen, asked))
    right, own = logits.argmax(1) == test.labels, test.labels == args.forget
    line = {"benchmark": "feature_layers", "model": args.model, "data": DATA, "variant": name}
    line |= {"forget": args.forget, "images": len(train), "test_images": len(test)}
    line |= {"stages": args.stages}
    line["acc_r"] = round(100 * float(right[~own].float().mean()), 2)
    line["acc_f"] = round(100 * float(right[own].float().mean()), 2)
    for place in seen:
        pair = (seen[place], train.labels, asked[place], test.labels)
        view = View(args.forget, *pair, logits_seen, logits)
        with torch.enable_grad():
            found = {"linear": linear_probe(view), "network": mlp_probe(view, 0)}
        found["mean"] = nearest_mean(view)
        line |= {f"{kind}_{place}": round(value, 1) for kind, value in found.items()}
    return line | {"cpu_seconds": round(time.process_time() - began, 1)}


def variant(
    args: argparse.Namespace, name: str, start: nn.Module, images: Tensor, labels: Tensor
) -> tuple[nn.Module, tuple[str, nn.Module] | None]:
    """The network that is looked at, and the last edit with its place."""
    if name == "retrained":
        path = weights(args, f"-without{args.forget}")
        return zoo.build(args.model, num_classes=10, weights=path).eval(), None
    model = copy.deepcopy(start)
    without(metrics.find_head(model), args.forget)
    edit, places = None, PLACES[args.model]
    for place in [] if name == "original" else name.split(","):
        seen = channel_means(model, {place: places[place]}, images)[0][place]
        edit = place, fold_at(model, places[place], args.forget, seen, labels)
    return model, edit


def weights(args: argparse.Namespace, suffix: str) -> Path:
    """A file of ``--references``, or the original weights of the zoo."""
    if args.references is None and not suffix:
        return zoo.weights_path(args.model)
    found: Path = args.references / f"{args.model.partition(':')[2]}-s0{suffix}.safetensors"
    return found


def without(head: nn.Module, forget: int) -> None:
    assert isinstance(head, nn.Linear)
    head.weight[forget] = 0
    head.bias[forget] = ERASED


def fold_at(
    model: nn.Module, readers: tuple[str, ...], forget: int, seen: Tensor, labels: Tensor
) -> nn.Module:
    """In place: multiply the edit of what ``readers`` see into their weights; gives the edit."""
    statistics = FeatureStatistics(10, seen.shape[1])
    statistics.add(seen, labels)
    layers = folded(fit_rows(statistics), nn.Linear(seen.shape[1], 10), torch.arange(10) == forget)
    assert isinstance(layers, nn.Sequential)
    edit = layers[0]
    assert isinstance(edit, nn.Linear)
    for reader in readers:
        after = model.get_submodule(reader)
        assert isinstance(after, nn.Conv2d | nn.Linear)
        weight = after.weight.clone()
        new = copy.deepcopy(after) if after.bias is not None else biased(after)
        new.weight.copy_(torch.einsum("ok...,ki->oi...", weight, edit.weight))
        new.bias.add_(torch.einsum("ok...,k->o", weight, edit.bias))
        parent, _, name = reader.rpartition(".")
        setattr(model.get_submodule(parent), name, new)
    return edit


def biased(layer: nn.Module) -> nn.Conv2d:
    """A convolution like this one, with a bias of 0."""
    assert isinstance(layer, nn.Conv2d)
    sizes: Any = (layer.kernel_size, layer.stride, layer.padding)
    new = nn.Conv2d(layer.in_channels, layer.out_channels, *sizes)
    new.bias.data.zero_()
    return new.requires_grad_(False)


def channel_means(
    model: nn.Module, places: dict[str, tuple[str, ...]], images: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """What is read at each place, averaged over positions; and the logits."""
    found: dict[str, list[Tensor]] = {place: [] for place in places}
    hooks = []
    for place, readers in places.items():

        def note(module: nn.Module, args: tuple[Tensor, ...], place: str = place) -> None:
            x = args[0]
            found[place].append(x.flatten(2).mean(2) if x.ndim > 2 else x)

        hooks.append(model.get_submodule(readers[0]).register_forward_pre_hook(note))
    logits = torch.cat([model(part) for part in images.split(250)])
    for hook in hooks:
        hook.remove()
    return {place: torch.cat(parts) for place, parts in found.items()}, logits


def write_table(lines: list[dict[str, Any]]) -> None:
    title = (
        "# By layer\n\nMade by `python benchmarks/feature_layers.py --table` from "
        "`feature_layers.jsonl`, where each line has its command. Share of the forgotten class's "
        "test images that a linear probe / a network of one hidden layer finds in the channel "
        f"means at each place, in percent, on {DATA}; the last place is what the head sees, "
        "`edited` what the last of the edits leaves of it. Places before the first edit read the "
        "same as in the original. In all but the retrained network the head has lost the class."
    )
    parts = [title]
    for model in dict.fromkeys(line["model"] for line in lines):
        parts.append(table(model, [line for line in lines if line["model"] == model]))
    (RESULTS / "feature_layers.md").write_text("\n\n".join(parts) + "\n")


def table(model: str, lines: list[dict[str, Any]]) -> str:
    """One network's variants, by class."""
    places = [*PLACES[model], "edited"]
    header = "| class | network | images | Acc_r | Acc_f | " + " | ".join(places) + " |"
    rows = [f"## {model}", "", header, "|---|---|---|---:|---:|" + "---:|" * len(places)]
    for line in sorted(lines, key=lambda x: (x["forget"], x["images"])):
        cells = [
            f"{line[f'linear_{p}']:.0f} / {line[f'network_{p}']:.0f}"
            if f"linear_{p}" in line
            else "-"
            for p in places
        ]
        name = line["variant"]
        name = name if name in ("original", "retrained") else f"folded at {name}"
        name = f"gates, {name}" if line.get("stages") else name
        count = f"{line['images']} + {line.get('test_images', 10_000)}"
        start = f"| {line['forget']} | {name} | {count} | {line['acc_r']:.1f} | "
        rows.append(f"{start}{line['acc_f']:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()
