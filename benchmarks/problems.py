"""Networks and images by one name: small ones trained on the spot, stored ones, ImageNet's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wfilter
from references import folder, stem_name
from wfilter import data, zoo


@dataclass(frozen=True)
class Small:
    """A network that is trained on the spot: how it is made, on what, and for how long."""

    make: Callable[[], nn.Module]
    dataset: str = "digits"
    epochs: int = 15
    images: int | None = None


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


def mobilenet(stride: int = 1) -> nn.Module:
    stem = [nn.Conv2d(1, 24, 3, stride, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU6()]
    blocks = [Inverted(24), Inverted(24, 2), Inverted(24), Inverted(24)]
    last = [nn.Conv2d(24, 96, 1, bias=False), nn.BatchNorm2d(96), nn.ReLU6()]
    return nn.Sequential(
        *stem, *blocks, *last, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)
    )


def convnext() -> nn.Module:
    import timm

    return timm.create_model(
        "convnext_atto", in_chans=1, num_classes=10, depths=(1, 1, 1, 1), dims=(16, 24, 48, 96),
        patch_size=1,
    )  # fmt: skip


SMALL = {
    "cnn-digits": Small(plain_cnn),
    "mlp-digits": Small(mlp),
    "vit-digits": Small(lambda: zoo.create("vit-digits"), epochs=25),
    "mobilenet-digits": Small(mobilenet),
    "convnext-digits": Small(convnext, epochs=25),
    "mobilenet-mnist": Small(lambda: mobilenet(2), "mnist", 3, 10_000),
    "convnext-mnist": Small(convnext, "mnist", 3, 10_000),
}
# CIFAR-10's first two come with the data; the others are made by `references.py`.
STORED = (
    *("resnet18-mnist", "vgg16-mnist", "vit_tiny-mnist"),
    *("resnet18-cifar", "vgg16-cifar", "vit_tiny-cifar"),
)
# This ResNet-18 is torchvision's after compression and fine-tuning.
IMAGENET = {
    "vit_tiny-imagenet": "timm:vit_tiny_patch16_224",
    "resnet18-imagenet": "torchvision:resnet18",
}
PROBLEMS = (*SMALL, *STORED, *IMAGENET)


def trained(small: Small, train: data.ImageSet, seed: int) -> nn.Module:
    """One cycle of AdamW, in eval mode."""
    torch.manual_seed(seed)
    model = small.make().train()
    batches = data.batches(train, 64, shuffle=True, seed=seed)
    optimiser = torch.optim.AdamW(model.parameters(), 4e-3, weight_decay=0.05)
    total = small.epochs * len(batches) + 1
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=total, pct_start=0.2)
    for _ in range(small.epochs):
        for images, labels in batches:
            optimiser.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimiser.step()
            cycle.step()
    return model.eval()


def problem(name: str, seed: int) -> tuple[nn.Module, data.ImageSet, data.ImageSet]:
    """The network, its training and its test images."""
    if name in SMALL:
        small = SMALL[name]
        train, test = (data.load(small.dataset, split) for split in ("train", "test"))
        train = train.take(torch.arange(len(train))[: small.images])
        return trained(small, train, seed), train, test
    spec = IMAGENET.get(name, f"wfilter:{name}")
    dataset = name.rpartition("-")[2].replace("cifar", "cifar10")
    inputs = vars(zoo.input_format(spec))
    train, test = (data.load(dataset, split, **inputs) for split in ("train", "test"))
    own = folder() / f"{stem_name(name, 0)}.safetensors"
    weights = own if own.exists() else zoo.weights_path(spec)
    return zoo.build(spec, weights=weights), train, test


def targets_of(model: nn.Module) -> Any:
    """The default targets; all but the head where there is no convolution and no attention."""
    try:
        wfilter.find_targets(model)
    except ValueError:
        names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        return [f"{n}.*" for n in names[:-1]]
    return "auto"
