"""Untrain all 1,000 classes of ImageNet in a ViT with three images of each class, on a CPU.

    python benchmarks/imagenet.py
    python benchmarks/imagenet.py --train train1+k0 --test k1 --classes 100    # to choose settings
    python benchmarks/paper.py --tables

Only the last blocks get filters, so the blocks before them are run once: their output for several
views of each image (crops, mirrored) is kept, and the rest of the network is untrained on it. The
parts ``train1+k0+k1`` are used; ``k2`` is left for the figures, which are printed and added to
``results/imagenet.jsonl``, and from there to the tables. ``--classes 100`` untrains and tries the
first 100 rows only, in a tenth of the time. Settings of the recipe can be changed: ``--set
margin=2``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import v2

import wfilter
from recipe_options import add_set, changed
from wfilter import data, explain, metrics, zoo
from wfilter.bench import environment

RESULTS = Path(__file__).parent / "results"
SPEC = "timm:vit_tiny_patch16_224"
CUT, MOST = 0.4, 0.6  # share of images with foreign patches, and the largest share of those


class Tail(nn.Module):
    """A timm ViT from one of its blocks on; parameters keep their names.

    Of the last block only the class token is worked out: nothing else reaches the head.
    """

    def __init__(self, vit: nn.Module, first: int):
        super().__init__()
        self.blocks, self.norm, self.head = vit.blocks, vit.norm, vit.head
        self.first = first

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks[self.first : -1]:
            tokens = block(tokens)
        return self.head(self.norm(class_token(self.blocks[-1], tokens)))


@torch.inference_mode()
def check_tail(vit: nn.Module, first: int, images: data.ImageSet) -> None:
    """The network cut in two must be the network."""
    some, _ = images.batch(torch.arange(4))
    torch.testing.assert_close(Tail(vit, first)(tokens_before(vit, first, some)), vit(some))


def class_token(block: nn.Module, tokens: Tensor) -> Tensor:
    """What a timm block makes of the first token."""
    heads, qkv = block.attn.num_heads, block.attn.qkv(block.norm1(tokens))
    q, k, v = rearrange(qkv, "b n (three h d) -> three b h n d", three=3, h=heads)
    seen = F.scaled_dot_product_attention(q[:, :, :1], k, v)
    token = tokens[:, :1] + block.attn.proj(rearrange(seen, "b h n d -> b n (h d)"))
    return (token + block.mlp(block.norm2(token)))[:, 0]


@torch.inference_mode()
def tokens_before(vit: nn.Module, first: int, images: Tensor) -> Tensor:
    """What enters block ``first``."""
    tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    for block in vit.blocks[:first]:
        tokens = block(tokens)
    return tokens


def extract(
    vit: nn.Module, first: int, images: data.ImageSet, views: int, path: Path
) -> tuple[Tensor, Tensor]:
    """Tokens of every view, float16, and labels; kept in a file."""
    if path.exists():
        return torch.load(path, weights_only=True)
    torch.manual_seed(0)
    crop = v2.Compose(
        [v2.RandomResizedCrop(224, (0.4, 1.0), antialias=True), v2.RandomHorizontalFlip()]
    )
    tokens, labels = [], []
    for view in range(views):
        for batch, label in data.batches(images, 50):
            if view:
                batch = torch.stack([crop(image) for image in batch])
            tokens.append(tokens_before(vit, first, batch).half())
            labels.append(label)
        print(f"view {view + 1} of {views}", flush=True)
    stored = torch.cat(tokens).clone(), torch.cat(labels)
    torch.save(stored, path)
    return stored


def foreign_patches(every: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Tokens in float32; of some images a random part comes from other ones."""
    other = every[torch.randint(len(every), (len(tokens),), generator=generator)]
    chosen = torch.rand(len(tokens), 1, generator=generator) < CUT
    most = MOST * torch.rand(len(tokens), 1, generator=generator)
    foreign = (torch.rand(tokens.shape[:2], generator=generator) < most) & chosen
    foreign[:, 0] = False  # the class token stays
    return torch.where(foreign.unsqueeze(2), other, tokens).float()


@torch.inference_mode()
def accuracies(
    wf: wfilter.FilteredModel, tokens: Tensor, labels: Tensor, others: int, classes: int
) -> dict[str, float]:
    """On held-out images: plain, under the own row, under ``others`` random other rows."""
    generator = torch.Generator().manual_seed(0)
    hits: dict[str, list[Tensor]] = {"original": [], "acc_f": [], "acc_r": []}
    for x, y in zip(tokens.split(50), labels.split(50)):
        x, known = x.float(), y < classes
        hits["original"].append(wf(x).argmax(1) == y)
        if bool(known.any()):
            hits["acc_f"].append(wf(x[known], forget=y[known]).argmax(1) == y[known])
        for _ in range(others):
            row = torch.randint(classes, y.shape, generator=generator)
            row = torch.where(row == y, (row + 1) % classes, row)
            hits["acc_r"].append(wf(x, forget=row).argmax(1) == y)
    return {k: round(100 * torch.cat(v).float().mean().item(), 3) for k, v in hits.items()}


@torch.inference_mode()
def zrf(
    wf: wfilter.FilteredModel, vit: nn.Module, test: tuple[Tensor, Tensor], images: data.ImageSet
) -> float:
    """Under the own row, against a freshly initialised ViT."""
    fresh = metrics.fresh_copy(vit, seed=0).eval()
    reference = torch.cat([fresh(x) for x, _ in data.batches(images, 50)])
    parts = zip(test[0].split(50), test[1].split(50))
    logits = torch.cat([wf(x.float(), forget=y) for x, y in parts])
    return round(metrics.zrf(logits, reference), 4)


def curves(
    wf: wfilter.FilteredModel, tokens: Tensor, labels: Tensor, rows: int, classes: int
) -> dict[str, float]:
    """Mean areas under insertion and deletion of some classes, by gate and in a random order."""
    chosen = torch.randperm(classes, generator=torch.Generator().manual_seed(0))[:rows].tolist()
    found = [explain.class_curves(wf, tokens[labels == row].float(), row) for row in chosen]
    names = ("insertion", "deletion", "random_insertion", "random_deletion")
    return {n: round(sum(getattr(f, n).auc for f in found) / len(found), 4) for n in names}


def main() -> None:
    args = parse_arguments()
    args.keep.mkdir(parents=True, exist_ok=True)
    vit = zoo.build(SPEC, weights=zoo.weights_path(SPEC)).eval()
    stem = args.keep / f"imagenet-block{args.first}"
    images, held_out = data.load("imagenet", args.train), data.load("imagenet", args.test)
    tokens, labels = extract(
        vit, args.first, images, args.views, Path(f"{stem}-{args.train}-{args.views}.pt")
    )
    test = extract(vit, args.first, held_out, 1, Path(f"{stem}-{args.test}-1.pt"))
    targets = tuple(f"blocks.{i}.attn.qkv.*" for i in range(args.first, len(vit.blocks)))
    check_tail(vit, args.first, held_out)
    wf = wfilter.apply_weight_filtering(
        Tail(vit, args.first), targets=targets, example_input=test[0][:2].float()
    )
    recipe = changed("distill-few", args.set)
    known = labels < args.classes
    augment = partial(foreign_patches, tokens)
    began = time.process_time()
    wfilter.untrain(
        wf, wfilter.InMemory(tokens[known], labels[known], args.batch_size, augment),
        recipe=recipe, steps=args.steps, seed=args.seed,
        checkpoint=f"{stem}-{args.train}-{args.classes}-{args.views}-{args.seed}.checkpoint",
        checkpoint_every=100, resume=True,
    )  # fmt: skip
    spent = time.process_time() - began
    figures: dict[str, Any] = accuracies(wf, *test, args.others, args.classes)
    figures |= {"recipe": recipe.to_dict(), "curve_images": args.curve_rows}
    gates = wf.alphas.detach()[: args.classes].sigmoid()
    figures |= {"closed": round(100 * float((gates < 0.5).float().mean()), 2)}
    if args.classes == wf.num_classes:
        figures |= {"zrf": zrf(wf, vit, test, held_out)}
        figures |= curves(wf, *test, args.curve_rows, args.classes)
        save(wf, targets, images.class_names, args.keep / "imagenet-vit_tiny.safetensors")
    store(args, figures | {"cpu_seconds": round(spent)}, len(test[1]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", default="train1+k0+k1", help="parts to untrain on")
    parser.add_argument("--test", default="k2", help="the part held out for the figures")
    parser.add_argument("--classes", type=int, default=1000, help="only the first rows")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--first", type=int, default=9, help="block from which on there are gates")
    parser.add_argument("--views", type=int, default=4, help="of each image")
    parser.add_argument("--others", type=int, default=5, help="other rows per held-out image")
    parser.add_argument("--curve-rows", type=int, default=50, help="for insertion and deletion")
    add_set(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("runs"))
    return parser.parse_args()


def store(args: argparse.Namespace, figures: dict[str, Any], test_images: int) -> None:
    """Print the line and add it to the file; the tables take the last of each seed on k2."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    line = figures | {"rows": args.classes, "test_images": test_images, "seed": args.seed}
    final = args.classes == 1000 and args.test == "k2"
    line |= {"table": final, "command": shlex.join(["python", *sys.argv])}
    line |= {"commit": commit.stdout.strip(), **environment()}
    print(json.dumps(line))
    with (RESULTS / "imagenet.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def save(
    wf: wfilter.FilteredModel, targets: tuple[str, ...], names: tuple[str, ...], path: Path
) -> None:
    """The filters as those of the whole network."""
    whole = zoo.build(SPEC, weights=zoo.weights_path(SPEC))
    whole = wfilter.apply_weight_filtering(whole, targets=targets, class_names=names)
    with torch.no_grad():
        for name, alpha in wf.alpha.items():
            whole.alpha[name].copy_(alpha)
    whole.save(path)


if __name__ == "__main__":
    main()
