"""Untrain all 1,000 classes of ImageNet in a ViT with three images of each class, on a CPU.

    python benchmarks/imagenet.py --steps 600
    python benchmarks/paper.py --dataset imagenet --backbone vit_tiny --method distill \\
        --filters runs/imagenet-vit_tiny.safetensors

Only the last blocks get filters, so the blocks before them are run once: their output for several
views of each image (crops, mirrored) is kept, and the rest of the network is untrained on it. The
parts ``train1+k0+k1`` are used; ``k2`` is left for the figures, which are printed and added to
``results/imagenet.jsonl``, and for ``paper.py``. Settings of the recipe can be changed:
``--set margin=2``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

import wfilter
from wfilter import data, zoo
from wfilter.bench import environment

RESULTS = Path(__file__).parent / "results"
SPEC = "timm:vit_tiny_patch16_224"
# What differs from `distill`: single classes (a thousand have too many sets to draw from), every
# filtered block (few as they are).
CHANGES = {"set_share": 0.0, "depth": 1.0, "blend": 0.3}


class Tail(nn.Module):
    """A timm ViT from one of its blocks on; parameters keep their names."""

    def __init__(self, vit: nn.Module, first: int):
        super().__init__()
        self.blocks, self.norm, self.fc_norm, self.head = (
            vit.blocks,
            vit.norm,
            vit.fc_norm,
            vit.head,
        )
        self.first = first

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks[self.first :]:
            tokens = block(tokens)
        return self.head(self.fc_norm(self.norm(tokens)[:, 0]))


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
    stored = torch.cat(tokens), torch.cat(labels)
    torch.save(stored, path)
    return stored


@torch.inference_mode()
def measure(wf: wfilter.FilteredModel, tokens: Tensor, labels: Tensor, rows: int) -> dict:
    """Accuracies on held-out images: plain, under the own row, under ``rows`` random others."""
    generator = torch.Generator().manual_seed(0)
    hits: dict[str, list[Tensor]] = {"original": [], "acc_f": [], "acc_r": []}
    for x, y in zip(tokens.split(50), labels.split(50)):
        x = x.float()
        hits["original"].append(wf(x).argmax(1) == y)
        hits["acc_f"].append(wf(x, forget=y).argmax(1) == y)
        for _ in range(rows):
            other = (
                y + torch.randint(1, wf.num_classes, y.shape, generator=generator)
            ) % wf.num_classes
            hits["acc_r"].append(wf(x, forget=other).argmax(1) == y)
    return {k: round(100 * torch.cat(v).float().mean().item(), 3) for k, v in hits.items()}


class Tokens(torch.utils.data.Dataset):
    """Stored tokens, back in float32."""

    def __init__(self, tokens: Tensor, labels: Tensor):
        self.tokens, self.labels = tokens, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index].float(), self.labels[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--first", type=int, default=10, help="block from which on there are gates")
    parser.add_argument("--views", type=int, default=4, help="of each image")
    parser.add_argument("--rows", type=int, default=5, help="other rows per held-out image")
    parser.add_argument("--set", action="append", default=[], help="recipe setting, name=value")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("runs"))
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    vit = zoo.build(SPEC, weights=zoo.weights_path(SPEC)).eval()
    stem = args.keep / f"imagenet-block{args.first}"
    images, held_out = data.load("imagenet"), data.load("imagenet", "test")
    train = extract(vit, args.first, images, args.views, Path(f"{stem}-train{args.views}.pt"))
    test = extract(vit, args.first, held_out, 1, Path(f"{stem}-test.pt"))

    targets = tuple(f"blocks.{i}.*.weight" for i in range(args.first, len(vit.blocks)))
    wf = wfilter.apply_weight_filtering(
        Tail(vit, args.first), targets=targets, example_input=test[0][:2].float()
    )
    changes = {k: ast.literal_eval(v) for k, v in (s.split("=", 1) for s in args.set)}
    recipe = dataclasses.replace(wfilter.RECIPES["distill"], **{**CHANGES, **changes})
    batches = torch.utils.data.DataLoader(
        Tokens(*train), args.batch_size, shuffle=True, drop_last=True
    )
    began = time.process_time()
    wfilter.untrain(
        wf, batches, recipe=recipe, steps=args.steps, seed=args.seed,
        checkpoint=args.keep / "imagenet.checkpoint", checkpoint_every=100, resume=True,
    )  # fmt: skip
    seconds = time.process_time() - began
    closed = float((wf.alphas < 0).float().mean())
    figures = measure(wf, *test, args.rows)
    line = {**figures, "closed": round(100 * closed, 2), "cpu_seconds": round(seconds)}
    line |= {"seed": args.seed, "command": shlex.join(["python", *sys.argv]), **environment()}
    print(json.dumps(line))
    with (RESULTS / "imagenet.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")

    whole = zoo.build(SPEC, weights=zoo.weights_path(SPEC))
    whole = wfilter.apply_weight_filtering(whole, targets=targets, class_names=images.class_names)
    with torch.no_grad():
        for name, alpha in wf.alpha.items():
            whole.alpha[name].copy_(alpha)
    whole.save(args.keep / "imagenet-vit_tiny.safetensors")


if __name__ == "__main__":
    main()
