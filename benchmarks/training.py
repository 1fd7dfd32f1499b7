"""The training loop of `references.py`: seeded, resumable, with what a CPU gains from."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wfilter import data

CHECKPOINT_SECONDS = 120
LOOK_EVERY = 6  # epochs, at the test accuracy, for the log alone
WHITENING_IMAGES = 5000
WHITENING_FLOOR = 5e-4  # added to a patch direction's variance: the rarest are mostly noise


def fit(
    model: nn.Module,
    train: data.ImageSet,
    test: data.ImageSet,
    args: argparse.Namespace,
    checkpoint: Path,
) -> float:
    """Train ``model`` in place; the seconds it took, those before an interruption included."""
    augment = partial(augmented, pad=args.pad, flip=args.flip == "random", warp=args.warp)
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
        if args.flip == "alternate":
            loader.dataset = mirrored(train, epoch, args.seed)
        total = 0.0
        model.train()
        for batch, (images, labels) in enumerate(loader):
            if batch < done:  # seen before the interruption
                continue
            if epoch < args.half:
                images = F.avg_pool2d(images, 2)
            total += train_step(model, images, labels, optimiser, args.bfloat16, args.smoothing)
            schedule.step()
            step += 1
            if time.perf_counter() - saved > CHECKPOINT_SECONDS:
                saved = time.perf_counter()
                save(parts, checkpoint, step, before + saved - start, vars(args))
        seconds = before + time.perf_counter() - start
        told = f"loss {total / (len(loader) - done):.4f} {seconds:.0f} s"
        if (epoch + 1) % LOOK_EVERY == 0:  # a look takes a sixth of an epoch
            right, seen = count_hits(model, test)
            told += f", test {100 * right.sum() / seen.sum():.2f} %"
        name = checkpoint.name.partition(".")[0]
        print(f"{name} epoch {epoch + 1}/{args.epochs} {told}", flush=True)
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


def mirrored(images: data.ImageSet, epoch: int, seed: int) -> data.ImageSet:
    """Half of the images mirrored, and the other half in the next epoch.

    Two epochs in a row then show both sides of every image, which drawing anew would not.
    """
    drawn = torch.rand(len(images), generator=torch.Generator().manual_seed(seed)) < 0.5
    turned = (drawn ^ bool(epoch % 2))[:, None, None, None]
    pixels = images.images[torch.arange(len(images))]
    return replace(images, images=torch.where(turned, pixels.flip(3), pixels))


@torch.no_grad()
def whiten(model: nn.Module, images: data.ImageSet) -> None:
    """In place: the first convolution answers with uncorrelated parts of a patch, and stays so.

    Its kernels are the eigenvectors of the patches' covariance over the root of their eigenvalues,
    one of each sign; the bias still learns.
    """
    conv = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    pixels, _ = images.batch(order[:WHITENING_IMAGES])
    patches = F.unfold(pixels, conv.kernel_size).transpose(1, 2).flatten(0, 1).double()
    values, vectors = torch.linalg.eigh(patches.T.cov())
    kernels = (vectors / (values + WHITENING_FLOOR).sqrt()).T.flip(0)  # the strongest first
    both = torch.cat([kernels, -kernels]).view(-1, *conv.weight.shape[1:])
    if both.shape != conv.weight.shape:
        raise SystemExit(f"--whiten makes {len(both)} kernels; the first convolution has "
                         f"{len(conv.weight)}. Choose a cnn for colour images.")  # fmt: skip
    conv.weight.copy_(both)
    conv.weight.requires_grad_(False)


def make_optimiser(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Weight decay on matrices and kernels only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed, others = ([p for p in trained if (p.ndim > 1) == wide] for wide in (True, False))
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
    smoothing: float = 0.0,
) -> float:
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits = model(images.contiguous(memory_format=torch.channels_last))
    loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
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


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that decide the result, as JSON can hold them."""
    left_out = ("out", "root", "recipe", "each", "collect")
    kept = {k: v for k, v in settings.items() if k not in left_out}
    return {k: v.name if isinstance(v, Path) else v for k, v in kept.items()}
