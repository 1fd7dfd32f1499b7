"""All 1,000 classes of ImageNet by the default recipe: the `auto` rows of the paper's tables.

    python benchmarks/imagenet_auto.py --backbone vit_tiny
    python benchmarks/imagenet_auto.py --backbone resnet18 --train train1+k1+k2 --test k0
    python benchmarks/paper --tables

No setting but the backbone: the default targets and the default recipe, on three images of each
class. The part held out is run once and its features under every image's own row and five others,
as in ``auto.py``; ZRF compares answers under the own row, and the base model's, with those of a
freshly initialised network. Lines go to ``results/imagenet.jsonl``. ResNet-18 is torchvision's
after compression and fine-tuning by others (67 %), not the paper's.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import wfilter
from auto import answers_of, both_halves, forgets
from common import RESULTS, append_line, origin
from problems import IMAGENET
from wfilter import data, metrics, zoo

TESTED = ("k0", "k2")
BATCH = 50


@torch.inference_mode()
def fresh_logits(model: nn.Module, images: data.ImageSet) -> torch.Tensor:
    """Of a freshly initialised network of the same make, as ZRF wants them."""
    fresh = metrics.fresh_copy(model, seed=0).eval()
    return torch.cat([fresh(some) for some, _ in data.batches(images, BATCH)])


@torch.no_grad()
def figures(wf: wfilter.FilteredModel, test: data.ImageSet, reference: torch.Tensor) -> dict:
    """Acc_r, Acc_f and ZRF under the rows, accuracy and ZRF without any; in per cent but ZRF."""
    labels, rows = test.labels, forgets(test.labels, wf.num_classes)
    every = torch.arange(len(test))
    plain, answer = answers_of(wf, test)
    as_a_user = wf(test.batch(every[:BATCH])[0], forget=labels[:BATCH])
    scale = float(as_a_user.abs().max())
    here = answer(every[:BATCH], labels[:BATCH])
    torch.testing.assert_close(here, as_a_user, rtol=0.02, atol=0.01 * scale)
    logits = torch.cat([answer(every, forget) for forget in rows.T])
    retain, forget = both_halves(logits, labels.repeat(rows.shape[1]), rows.T.flatten())
    return {
        "original": round(100 * metrics.accuracy(plain, labels), 3),
        "acc_r": round(100 * retain.mean, 3),
        "acc_f": round(100 * forget.mean, 3),
        "zrf": round(metrics.zrf(answer(every, labels), reference), 4),
        "original_zrf": round(metrics.zrf(plain, reference), 4),
    }


def main() -> None:
    args = parse_arguments()
    code = origin()  # now: by the end of the run the repository may have moved on
    spec = IMAGENET[f"{args.backbone}-imagenet"]
    model = zoo.build(spec, weights=zoo.weights_path(spec)).eval()
    inputs = vars(zoo.input_format(spec))
    train, test = (data.load("imagenet", part, **inputs) for part in (args.train, args.test))
    reference = fresh_logits(model, test)
    wf = wfilter.apply_weight_filtering(model, class_names=train.class_names)
    began = time.process_time()
    history = wfilter.untrain(wf, data.batches(train, 64), seed=args.seed, progress=False)
    spent = round(time.process_time() - began)
    line = {"backbone": args.backbone, "method": "auto", "recipe": history.fixed["stages"]}
    line |= {"stage": history.fixed["stages"], "verdict": history.verdict}
    line |= figures(wf, test, reference) | {"cpu_seconds": spent, "seed": args.seed}
    line |= {"rows": wf.num_classes, "test_images": len(test), "train": args.train}
    append_line(
        RESULTS / "imagenet.jsonl", line | {"test": args.test, "table": in_table(args)} | code
    )
    print(line)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = tuple(name.partition("-")[0] for name in IMAGENET)
    parser.add_argument("--backbone", choices=names, default="vit_tiny")
    parser.add_argument("--train", default="train1+k0+k1", help="parts to untrain on")
    parser.add_argument("--test", default="k2", help="the part held out for the figures")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def in_table(args: argparse.Namespace) -> bool:
    """Whether a run is one for the table: all parts used but the one held out."""
    others = {"train1", "k0", "k1", "k2"} - {args.test}
    return args.test in TESTED and {*args.train.split("+")} == others


if __name__ == "__main__":
    main()
