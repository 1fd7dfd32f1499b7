"""The default recipe on one problem after the other, with no setting for any of them.

    python benchmarks/auto.py --problem cnn-digits --seed 0
    python benchmarks/auto.py --all            # from cheap to dear, those that have no line yet
    python benchmarks/auto.py --table          # only rebuild results/auto.md

The recipe was developed on ``cnn-digits``, ``mlp-digits`` and ``resnet18-cifar``, by held-out
training images; all others were only run at the end. Small networks are trained on the spot. Each
test image (the first ``--test-images``) is run under every row, and under one random set of 2, 3
and 5 classes with and without its class. A JSON line a run goes to results/auto.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wfilter
from common import RESULTS, append_line, origin, read_lines
from wfilter import data, zoo

FILE = RESULTS / "auto.jsonl"
DEVELOPED_ON = ("cnn-digits", "mlp-digits", "resnet18-cifar")
EPOCHS = {"vit-digits": 25, "convnext-digits": 25}
Images = tuple[Tensor, Tensor]


def plain_cnn() -> nn.Module:
    """Three convolutions without BatchNorm."""
    layers: list[nn.Module] = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in ((64, 128), (128, 128), (128, 64)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


class Inverted(nn.Module):
    """A block as MobileNetV2 has them: widen, depthwise, narrow, and a shortcut."""

    def __init__(self, width: int, stride: int = 1):
        super().__init__()
        wide = 4 * width
        self.stride = stride
        self.layers = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.ReLU6(), nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.stride == 1 else y


def mobilenet() -> nn.Module:
    stem = [nn.Conv2d(1, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU6()]
    blocks = [Inverted(24), Inverted(24, 2), Inverted(24), Inverted(24)]
    last = [nn.Conv2d(24, 96, 1, bias=False), nn.BatchNorm2d(96), nn.ReLU6()]
    return nn.Sequential(
        *stem, *blocks, *last, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)
    )


def convnext() -> nn.Module:
    import timm

    return timm.create_model(
        "convnext_atto", in_chans=1, num_classes=10, depths=(1, 1, 2), dims=(24, 48, 96),
        patch_size=1,
    )  # fmt: skip


def digits() -> tuple[data.ImageSet, data.ImageSet]:
    return data.load("digits"), data.load("digits", "test")


def trained(make: Callable[[], nn.Module], train: data.ImageSet, epochs: int, seed: int) -> Any:
    """One cycle of AdamW, in eval mode."""
    torch.manual_seed(seed)
    model = make().train()
    batches = data.batches(train, 64, shuffle=True, seed=seed)
    optimiser = torch.optim.AdamW(model.parameters(), 4e-3, weight_decay=0.05)
    total = epochs * len(batches) + 1
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=total, pct_start=0.2)
    for _ in range(epochs):
        for images, labels in batches:
            optimiser.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimiser.step()
            cycle.step()
    return model.eval()


SMALL: dict[str, Callable[[], nn.Module]] = {
    "cnn-digits": plain_cnn,
    "mlp-digits": mlp,
    "mobilenet-digits": mobilenet,
    "convnext-digits": convnext,
    "vit-digits": lambda: zoo.create("vit-digits"),
}
STORED = {"resnet18-cifar": "cifar10", "vgg16-bn-cifar": "cifar10"}
PROBLEMS = (*SMALL, *STORED)


def problem(name: str, seed: int) -> tuple[nn.Module, data.ImageSet, data.ImageSet]:
    """The network, its training and its test images."""
    if name in SMALL:
        train, test = digits()
        return trained(SMALL[name], train, EPOCHS.get(name, 15), seed), train, test
    facts = vars(zoo.input_facts(f"wfilter:{name}"))
    train, test = (data.load(STORED[name], split, **facts) for split in ("train", "test"))
    model = zoo.load_weights(zoo.create(name), zoo.weights_path(f"wfilter:{name}"))
    return model.eval(), train, test


def targets_of(model: nn.Module, example: Tensor) -> Any:
    """The default targets; all but the head where there is no convolution and no attention."""
    try:
        wfilter.find_targets(model)
    except ValueError:
        names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        return [f"{n}.*" for n in names[:-1]]
    return "auto"


@torch.no_grad()
def measure(wf: wfilter.FilteredModel, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Acc_r, Acc_f, the worst class and sets, in per cent."""
    classes = range(wf.num_classes)
    parts = list(torch.split(torch.arange(len(labels)), 100))
    logits = torch.cat([torch.cat([wf(images[i], row) for i in parts]) for row in classes])
    rows = torch.arange(wf.num_classes).repeat_interleave(len(labels))
    pairs = (logits, labels.repeat(wf.num_classes), rows)
    retain, forget = (
        wfilter.metrics.retain_accuracy(*pairs),
        wfilter.metrics.forget_accuracy(*pairs),
    )
    plain = torch.cat([wf(images[i]) for i in parts])
    figures = {"original": 100 * wfilter.metrics.accuracy(plain, labels)}
    figures |= {"acc_r": 100 * retain.mean, "acc_f": 100 * forget.mean}
    figures |= {"worst_forget": 100 * forget.worst, "worst_retain": 100 * retain.worst}
    for size in (2, 3, 5):
        generator = torch.Generator().manual_seed(size)
        scores = torch.rand(len(labels), wf.num_classes, generator=generator)
        for name, score in (("r", -1.0), ("f", 2.0)):
            ranks = scores.scatter(1, labels[:, None], score).argsort(1, descending=True).argsort(1)
            answers = torch.cat([wf(images[i], (ranks < size)[i]) for i in parts])
            figures[f"sets_{size}_{name}"] = 100 * wfilter.metrics.accuracy(answers, labels)
    return figures


def run(name: str, seed: int, test_images: int) -> dict[str, Any]:
    model, train, test = problem(name, seed)
    images, labels = test.batch(torch.arange(min(test_images, len(test))))
    wf = wfilter.apply_weight_filtering(
        model, targets=targets_of(model, images[:1]), example_input=images[:1]
    )
    began = time.process_time()
    history = wfilter.untrain(wf, data.batches(train, 64), seed=seed, progress=False)
    seconds = time.process_time() - began
    return {
        "problem": name,
        "seed": seed,
        "cpu_seconds": seconds,
        "steps": len(history.records),
        "met": history.ended.value,
        "stage": history.fixed["stages"],
        "verdict": history.verdict,
        "choices": history.choices,
        "test_images": len(labels),
        "closed": 100 * float((wf.alphas <= 0).float().mean()),
        **measure(wf, images, labels),
        **origin(),
    }


def table() -> str:
    lines = read_lines(FILE)
    head = (
        "# The default recipe, no setting for any problem\n\nRebuilt by `python benchmarks/auto.py "
        "--table` from `auto.jsonl`. Developed on problems marked with *, whose test figures were "
        "seen on the way; the others were only run at the end. Per cent on test images; sets: "
        "right without / with the image's class in the set. The last column is what the run "
        "said of itself, on held-out training images.\n\n"
        "| problem | seed | test images | original | Acc_r | Acc_f (worst class) | sets of 2 | "
        "sets of 3 | sets of 5 | closed | cpu s | stage | says it met the bar |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|---|\n"
    )
    for x in lines:
        mark = "*" if x["problem"] in DEVELOPED_ON else ""
        sets = " | ".join(f"{x[f'sets_{n}_r']:.1f} / {x[f'sets_{n}_f']:.1f}" for n in (2, 3, 5))
        head += (
            f"| {x['problem']}{mark} | {x['seed']} | {x['test_images']} | {x['original']:.2f} | "
            f"{x['acc_r']:.2f} | {x['acc_f']:.2f} ({x['worst_forget']:.1f}) | {sets} | "
            f"{x['closed']:.1f} | {x['cpu_seconds']:.0f} | {x['stage']} | "
            f"{'yes' if x['met'] == 'met' else 'no'} |\n"
        )
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problem", choices=PROBLEMS)
    parser.add_argument("--all", action="store_true", help="all that have no line yet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test-images", type=int, default=2000)
    parser.add_argument("--table", action="store_true", help="only rebuild the table")
    args = parser.parse_args()
    chosen = [] if args.table else list(PROBLEMS) if args.all else [args.problem]
    done = {(x["problem"], x["seed"]) for x in read_lines(FILE)}
    for name in chosen:
        if not (args.all and (name, args.seed) in done):
            append_line(FILE, run(name, args.seed, args.test_images))
    (RESULTS / "auto.md").write_text(table())


if __name__ == "__main__":
    main()
