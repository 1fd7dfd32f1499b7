"""Train an original: a classifier for the tables to start from, on a CPU, in few epochs.

    python benchmarks/originals.py --model resnet18-mnist --data mnist --epochs 8 --out originals/

writes ``originals/resnet18-mnist-s0.safetensors`` (read it with ``wfilter.zoo.load_weights``) and
adds a JSON line with accuracy, time and settings to ``originals/originals.jsonl``. A checkpoint is
kept beside it; the same command, given again, goes on where it stopped, and one that has finished
is not run twice. The last epoch's weights are kept: the test images choose nothing.

``--start FILE`` begins with the weights of a model trained on something else, wherever names and
shapes agree: minutes instead of hours. A ViT takes patches, positions and normalisation of an
ImageNet ViT scaled to its own, and one of twice the width is made of two copies side by side; what
couples them is fresh. ``--train-images`` takes fewer of them, at random. ``--warp`` also turns,
scales and slants them, and ``--bfloat16`` multiplies in half precision: up to twice as fast
on a CPU that has units for it (one that only claims to have AMX, as some virtual machines do,
needs ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16``). ``--half 4`` sees the images of the first four
epochs at half their size, for a quarter of the time. ``--hardest 20000`` trains only on the images
that the weights of ``--start`` are least sure of: of digits most teach nothing after an epoch.
``--without 3`` leaves class 3 out and writes
``resnet18-mnist-s0-without3.safetensors``: a retrained model. ``--without 1 3 8`` leaves out three,
which makes a common start for the three models that are to lack one of them each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from common import commit
from starts import start_from
from wfilter import data, zoo

# Peak learning rate and weight decay: one-cycle SGD for networks with BatchNorm, AdamW for ViTs.
RECIPES = {"sgd": {"lr": 0.1, "weight_decay": 5e-4}, "adamw": {"lr": 1e-3, "weight_decay": 0.05}}
CHECKPOINT_SECONDS = 120
CLASSES = 10  # of all the datasets


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / stem_name(args.model, args.seed, *args.without)
    weights = stem.with_name(f"{stem.name}.safetensors")
    if weights.exists():
        print(f"{weights} exists: nothing to do. Delete it to train again.")
        return
    code = commit()  # now: by the end of the run the repository may have moved on
    torch.manual_seed(args.seed)
    facts = vars(zoo.input_facts(f"wfilter:{args.model}"))
    train, test = (data.load(args.data, split, args.root, **facts) for split in ("train", "test"))
    if args.limit:
        train, test = (s.take(torch.arange(min(args.limit, len(s)))) for s in (train, test))
    if args.train_images:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(args.seed))
        train = train.take(order[: args.train_images].sort().values)
    left_out = torch.tensor(args.without, dtype=torch.long)
    train = train.take((~torch.isin(train.labels, left_out)).nonzero().flatten())
    model = zoo.create(args.model, train.num_classes).to(memory_format=torch.channels_last)
    as_products(model)
    if args.start:
        print(start_from(model, args.start), flush=True)
    args.chosen = None  # tells apart what different starts find hard, for the checkpoint
    if args.hardest:
        chosen = hardest(model, train, args.hardest)
        args.chosen = hashlib.sha256(chosen.numpy().tobytes()).hexdigest()[:16]
        train = train.take(chosen)
    seconds = fit(model, train, test, args, stem.with_name(f"{stem.name}.checkpoint.pt"))
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, weights)
    line = describe(args, *count_hits(model, test), seconds, code)
    with (args.out / "originals.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")
    print(json.dumps(line))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, choices=zoo.names())
    parser.add_argument("--data", required=True, choices=("digits", "mnist", "cifar10"))
    parser.add_argument("--root", type=Path, help="data folder (default: WFILTER_DATA)")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and log")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--optimiser", choices=tuple(RECIPES), help="default: adamw for ViTs")
    parser.add_argument("--lr", type=float, help="peak of the one-cycle schedule")
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--pad", type=int, default=2, help="largest shift of a training image")
    parser.add_argument("--flip", action="store_true", help="mirror training images (not digits)")
    parser.add_argument("--warp", action="store_true", help="turn, scale and slant them, too")
    parser.add_argument("--bfloat16", action="store_true", help="multiply in half precision")
    parser.add_argument("--start", type=Path, help="safetensors file to take weights from")
    parser.add_argument("--train-images", type=int, help="default: all")
    parser.add_argument(
        "--without", type=int, nargs="+", default=[], help="classes whose images are left out"
    )
    parser.add_argument("--half", type=int, default=0, help="epochs at half the image size")
    parser.add_argument("--hardest", type=int, help="images that --start finds hardest, only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="only so many images, to try the script out")
    args = parser.parse_args()
    args.without = sorted({*args.without})
    if any(label not in range(CLASSES) for label in args.without):
        parser.error(f"--without {args.without}: classes are 0 to {CLASSES - 1}")
    told = args.start.stem if args.start else ""
    lacking = {f"without{label}" for label in args.without} - {*told.split("-")}
    if lacking and args.model.split("-")[1] in told:
        parser.error(f"--start {args.start} has seen a class that --without is to leave out")
    if args.hardest is not None and not args.start:
        parser.error("--hardest asks the weights of --start: give them")
    if args.hardest is not None and args.hardest < args.batch_size:
        parser.error(
            f"--hardest {args.hardest} is less than one batch of {args.batch_size} images: give "
            "more, or a smaller --batch-size"
        )
    args.optimiser = args.optimiser or ("adamw" if args.model.startswith("vit") else "sgd")
    for name, value in RECIPES[args.optimiser].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def stem_name(model: str, seed: int, *without: int) -> str:
    """What the files of a training are called."""
    return f"{model}-s{seed}" + "".join(f"-without{label}" for label in without)


def as_products(model: nn.Module) -> None:
    """In place: 3 x 3 convolutions to a single pixel become the matrix products they are.

    Answers and gradients stay the same. The gradients of kernels that see one pixel, of which eight
    in nine taps are zero, take a good part of a ResNet-18's time on digits otherwise.
    """
    names = ("kernel_size", "padding", "dilation", "groups", "padding_mode")
    for conv in [module for module in model.modules() if isinstance(module, nn.Conv2d)]:
        facts = [getattr(conv, name) for name in names]
        if facts == [(3, 3), (1, 1), (1, 1), 1, "zeros"] and max(conv.stride) <= 2:
            conv.forward = partial(convolved, conv)


def convolved(conv: nn.Conv2d, images: Tensor) -> Tensor:
    """What a 3 x 3 convolution with padding makes of images."""
    height, width = images.shape[2:]
    if any(size > stride for size, stride in zip((height, width), conv.stride)):
        return nn.Conv2d.forward(conv, images)
    seen = conv.weight[:, :, 1 : height + 1, 1 : width + 1]  # other taps lie on the padding
    return F.linear(images.flatten(1), seen.flatten(1), conv.bias)[:, :, None, None]


@torch.no_grad()
def hardest(model: nn.Module, images: data.ImageSet, count: int) -> Tensor:
    """Indices of the images with the largest losses, ascending."""
    model.eval()
    losses = [
        F.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y, reduction="none")
        for x, y in data.batches(images, 500)
    ]
    return torch.cat(losses).topk(min(count, len(images))).indices.sort().values


def fit(
    model: nn.Module,
    train: data.ImageSet,
    test: data.ImageSet,
    args: argparse.Namespace,
    checkpoint: Path,
) -> float:
    """Train ``model`` in place; the seconds it took, those before an interruption included."""
    augment = partial(augmented, pad=args.pad, flip=args.flip, warp=args.warp)
    loader = data.batches(
        train, args.batch_size, shuffle=True, seed=args.seed, drop_last=True, augment=augment
    )
    optimiser = make_optimiser(model, args)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, args.lr, total_steps=args.epochs * len(loader) + 1, pct_start=0.2
    )
    parts = {"model": model, "optimiser": optimiser, "schedule": schedule}
    step, before = resume(parts, checkpoint, vars(args))
    start = saved = time.perf_counter()
    while step < args.epochs * len(loader):
        epoch, done = divmod(step, len(loader))
        loader.epoch = epoch
        total = 0.0
        model.train()
        for batch, (images, labels) in enumerate(loader):
            if batch < done:  # seen before the interruption
                continue
            if epoch < args.half:
                images = F.avg_pool2d(images, 2)
            total += train_step(model, images, labels, optimiser, args.bfloat16)
            schedule.step()
            step += 1
            if time.perf_counter() - saved > CHECKPOINT_SECONDS:
                saved = time.perf_counter()
                save(parts, checkpoint, step, before + saved - start, vars(args))
        right, seen = count_hits(model, test)
        seconds = before + time.perf_counter() - start
        mean_loss = total / (len(loader) - done)
        print(
            f"{args.model} epoch {step // len(loader)}/{args.epochs} loss {mean_loss:.4f} "
            f"test {100 * right.sum() / seen.sum():.2f} % {seconds:.0f} s",
            flush=True,
        )
        save(parts, checkpoint, step, seconds, vars(args))
    return before + time.perf_counter() - start


def augmented(
    images: Tensor, generator: torch.Generator, *, pad: int, flip: bool, warp: bool
) -> Tensor:
    """Training images as a step sees them, each changed in its own way."""
    images = warped(images, generator) if warp else images
    if pad or flip:
        images = data.shift_and_flip(images, generator, pad=pad, flip=flip)
    return images


def warped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image turned by up to 15 degrees, scaled and slanted by up to a tenth."""
    angle, slant, *scales = torch.rand(4, len(images), generator=generator) * 2 - 1
    sine, cosine = (angle * torch.pi / 12).sin(), (angle * torch.pi / 12).cos()
    turn = torch.stack([cosine, -sine, sine, cosine], 1).view(-1, 2, 2)
    shape = torch.diag_embed(1 + 0.1 * torch.stack(scales, 1))
    shape[:, 0, 1] = 0.1 * slant
    matrix = F.pad(turn @ shape, (0, 1))  # (batch, 2, 3), about the centre
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def make_optimiser(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Weight decay on matrices and kernels only."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if args.optimiser == "adamw":
        return torch.optim.AdamW(groups, lr=args.lr)
    return torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True)


def train_step(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    optimiser: torch.optim.Optimizer,
    bfloat16: bool = False,
) -> float:
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits = model(images.contiguous(memory_format=torch.channels_last))
    loss = F.cross_entropy(logits.float(), labels)
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.item()


@torch.inference_mode()
def count_hits(model: nn.Module, dataset: data.ImageSet) -> tuple[Tensor, Tensor]:
    """How many images of each class are right, and how many there are, both ``(num_classes,)``."""
    model.eval()
    right, seen = torch.zeros(2, dataset.num_classes)
    for images, labels in data.batches(dataset, 500):
        hits = model(images.contiguous(memory_format=torch.channels_last)).argmax(1) == labels
        seen += torch.bincount(labels, minlength=dataset.num_classes)
        right += torch.bincount(labels[hits], minlength=dataset.num_classes)
    return right, seen


def resume(parts: dict[str, Any], checkpoint: Path, settings: dict[str, Any]) -> tuple[int, float]:
    """Load the checkpoint, if there is one, in place; the steps and seconds behind it."""
    if not checkpoint.exists():
        return 0, 0.0
    stored = torch.load(checkpoint, weights_only=True)
    if stored["settings"] != plain(settings):
        raise SystemExit(f"{checkpoint} is of other settings: delete it, or choose another --out.")
    for name, part in parts.items():
        part.load_state_dict(stored[name])
    print(f"resumed at step {stored['step']}", flush=True)
    return stored["step"], stored["seconds"]


def save(
    parts: dict[str, Any], checkpoint: Path, step: int, seconds: float, settings: dict[str, Any]
) -> None:
    stored = {name: part.state_dict() for name, part in parts.items()}
    stored |= {"step": step, "seconds": seconds, "settings": plain(settings)}
    temporary = checkpoint.with_suffix(".part")
    torch.save(stored, temporary)
    os.replace(temporary, checkpoint)


def describe(
    args: argparse.Namespace, right: Tensor, seen: Tensor, seconds: float, code: str
) -> dict[str, Any]:
    per_class = (100 * right / seen.clamp(min=1)).tolist()
    return {
        "benchmark": "originals",
        "accuracy": round(100 * right.sum().item() / seen.sum().item(), 3),
        "worst_class": round(min(per_class), 3),
        "per_class": [round(value, 2) for value in per_class],
        "test_images": int(seen.sum()),
        "seconds": round(seconds, 1),
        "settings": plain(vars(args)),
        "command": " ".join(["python", *sys.argv]),
        "seed": args.seed,
        "commit": code,
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        },
    }


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that decide the result, as JSON can hold them."""
    left_out = ("out", "root")
    kept = {k: v for k, v in settings.items() if k not in left_out}
    return {k: v.name if isinstance(v, Path) else v for k, v in kept.items()}


if __name__ == "__main__":
    main()
