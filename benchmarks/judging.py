"""How well `auto` knows what gates cost images that the base model has not learned.

    python benchmarks/judging.py            # about two CPU minutes
    python benchmarks/judging.py --table    # only rebuild results/judging.md

A small network learns 1,000 of scikit-learn's training digits and is untrained with them. What its
rows lose is then compared on these images, on these blended with each other, and on the 438
training digits that it has never seen; no test image is looked at. The share by which `auto`
blends, and how many of a blend's changed answers it counts as lost, come from this table.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
from torch import Tensor

import wfilter
from common import RESULTS, append_line, origin, read_lines
from problems import SMALL, Small, targets_of, trained
from wfilter import data, zoo
from wfilter.untraining.recipes import AUTO

FILE = RESULTS / "judging.jsonl"
NETWORKS = {
    **{name: SMALL[name] for name in ("cnn-digits", "mlp-digits", "vit-digits")},
    "vgg-digits": Small(lambda: zoo.create("cnn-digits")),
}
RUNS = (("soft 1", 40), ("soft 1", 120), ("hard 1", 120))
SHARES = (0.0, 0.2, 0.3, 0.4, 0.5)


@torch.no_grad()
def differences(wf: wfilter.FilteredModel, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Points of accuracy lost, and answers other than the base model's without the class, in %."""
    base = wf(images)
    lost, changed = [], []
    for row in range(wf.num_classes):
        kept = (labels != row) & (base.argmax(1) != row)
        answers, wanted = wf(images, row).argmax(1), base.clone()
        wanted[:, row] = -torch.inf
        changed.append(float((answers != wanted.argmax(1))[kept].float().mean()))
        right = (base.argmax(1) == labels).float() - (answers == labels).float()
        lost.append(float(right[labels != row].mean()))
    return 100 * sum(lost) / len(lost), 100 * sum(changed) / len(changed)


def run(name: str, stages: str, steps: int) -> dict[str, Any]:
    train = data.load("digits")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(5))
    seen, new = train.take(order[:1000]), train.take(order[1000:])
    images, labels = seen.batch(torch.arange(len(seen)))
    model = trained(NETWORKS[name], seen, 0)
    targets = targets_of(model)
    wf = wfilter.apply_weight_filtering(model, targets=targets, example_input=images[:1])
    recipe = dataclasses.replace(AUTO, stages=stages, steps=steps)
    wfilter.untrain(wf, wfilter.InMemory(images, labels), recipe=recipe, progress=False)
    lost, changed = differences(wf, *new.batch(torch.arange(len(new))))
    generator = torch.Generator().manual_seed(1)
    other = images[torch.randperm(len(images), generator=generator)]
    blends = {}
    for share in SHARES:
        weight = (1 - share * torch.rand(len(images), generator=generator)).view(-1, 1, 1, 1)
        blends[share] = differences(wf, weight * images + (1 - weight) * other, labels)[1]
    figures = {"network": name, "stages": stages, "steps": steps, "lost": lost, "changed": changed}
    return {**figures, "blends": blends, **origin()}


def table() -> str:
    head = (
        "# What rows lose on images that the base model has not learned\n\nRebuilt by `python "
        "benchmarks/judging.py --table` from `judging.jsonl`; what it is about stands in the "
        "script. Per cent, mean over ten rows: accuracy lost on new images; answers other than the "
        "base model's without the class, on new images and on learned ones blended by up to a "
        "share.\n\n| network | gates | steps | lost, new | changed, new | "
    )
    head += " | ".join(f"blended by {share:g}" for share in SHARES)
    head += " |\n|---|---|" + "--:|" * (3 + len(SHARES)) + "\n"
    for x in read_lines(FILE):
        blends = " | ".join(f"{value:.1f}" for value in x["blends"].values())
        head += (
            f"| {x['network']} | {x['stages']} | {x['steps']} | {x['lost']:.1f} | "
            f"{x['changed']:.1f} | {blends} |\n"
        )
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, nargs="+", default=list(NETWORKS))
    parser.add_argument("--table", action="store_true", help="only rebuild the table")
    args = parser.parse_args()
    if not args.table:
        done = {(x["network"], x["stages"], x["steps"]) for x in read_lines(FILE)}
        for name in args.network:
            for stages, steps in RUNS:
                if (name, stages, steps) not in done:
                    append_line(FILE, run(name, stages, steps))
    (RESULTS / "judging.md").write_text(table())


if __name__ == "__main__":
    main()
