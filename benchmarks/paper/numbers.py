"""The names and numbers of the paper's tables, as printed there."""

from __future__ import annotations

DATASETS = ("mnist", "cifar10", "imagenet")
BACKBONES = ("vgg16", "resnet18", "vit_tiny", "vit_small", "resnet50", "resnet101")
FILTERED = ("paper", "auto", "distill", "distill-soft")
RIVALS = ("retrained", "random_labels", "negative_gradients")
METHODS = ("original", *FILTERED, *RIVALS)
# The backbones that have every number in the paper.
NAMES = {"vgg16": "VGG-16", "resnet18": "ResNet-18", "vit_tiny": "ViT-T", "vit_small": "ViT-S"}

# Tables 1 and 2 of the paper: Acc_r, Acc_f, ZRF, relearn epochs (classes never relearned);
# insertion, deletion. ZRF of ImageNet is printed there as a share of two digits, here in per cent.
PAPER: dict[tuple[str, str, str], tuple[float | str, ...]] = {
    ("mnist", "vgg16", "original"): (99.6, 99.6, 48.0),
    ("mnist", "vgg16", "retrained"): (99.4, 0.0, 48.7, "74.5 (5)"),
    ("mnist", "vgg16", "random_labels"): (99.6, 0.0, 53.3, "40.3 (0)"),
    ("mnist", "vgg16", "negative_gradients"): (99.4, 0.0, 48.3, "24.6 (0)"),
    ("mnist", "vgg16", "paper"): (73.2, 0.0, 79.2, "27.6 (1)"),
    ("mnist", "resnet18", "original"): (99.6, 99.6, 47.0),
    ("mnist", "resnet18", "retrained"): (99.4, 0.0, 48.7, "43.6 (0)"),
    ("mnist", "resnet18", "random_labels"): (99.4, 0.0, 57.1, "15.7 (0)"),
    ("mnist", "resnet18", "negative_gradients"): (99.2, 0.0, 52.1, "20.1 (0)"),
    ("mnist", "resnet18", "paper"): (94.0, 9.68, 63.1, "22.7 (0)"),
    ("mnist", "vit_tiny", "original"): (98.9, 98.9, 47.2),
    ("mnist", "vit_tiny", "retrained"): (99.0, 0.0, 50.2, "71.4 (7)"),
    ("mnist", "vit_tiny", "random_labels"): (98.3, 0.0, 48.7, "81.9 (8)"),
    ("mnist", "vit_tiny", "negative_gradients"): (98.4, 0.0, 54.6, "71.6 (7)"),
    ("mnist", "vit_tiny", "paper"): (93.5, 0.0, 47.4, ">100 (10)"),
    ("mnist", "vit_small", "original"): (99.0, 98.9, 47.1),
    ("mnist", "vit_small", "retrained"): (99.0, 0.0, 49.5, "91.5 (8)"),
    ("mnist", "vit_small", "random_labels"): (99.5, 0.0, 50.4, "74.1 (7)"),
    ("mnist", "vit_small", "negative_gradients"): (99.6, 0.0, 52.3, "44.1 (4)"),
    ("mnist", "vit_small", "paper"): (94.0, 0.0, 48.0, "91.0 (9)"),
    ("cifar10", "vgg16", "original"): (93.0, 93.0, 48.3),
    ("cifar10", "vgg16", "retrained"): (89.9, 0.0, 50.1, "65.3 (5)"),
    ("cifar10", "vgg16", "random_labels"): (88.7, 0.0, 52.5, "56.5 (5)"),
    ("cifar10", "vgg16", "negative_gradients"): (89.4, 0.0, 51.6, "76.7 (7)"),
    ("cifar10", "vgg16", "paper"): (80.2, 18.3, 57.4, "54.2 (5)"),
    ("cifar10", "resnet18", "original"): (93.9, 94.0, 48.0),
    ("cifar10", "resnet18", "retrained"): (90.5, 0.0, 51.4, ">100 (10)"),
    ("cifar10", "resnet18", "random_labels"): (90.6, 0.0, 59.4, "21.6 (0)"),
    ("cifar10", "resnet18", "negative_gradients"): (92.4, 0.0, 55.2, "31.3 (3)"),
    ("cifar10", "resnet18", "paper"): (79.7, 9.25, 63.9, "94.3 (9)"),
    ("cifar10", "vit_tiny", "original"): (78.0, 78.0, 49.8),
    ("cifar10", "vit_tiny", "retrained"): (71.2, 0.0, 67.6, "52.2 (4)"),
    ("cifar10", "vit_tiny", "random_labels"): (73.2, 0.0, 57.7, "83.5 (8)"),
    ("cifar10", "vit_tiny", "negative_gradients"): (74.4, 0.0, 50.1, "81.7 (8)"),
    ("cifar10", "vit_tiny", "paper"): (73.5, 0.0, 59.8, ">100 (10)"),
    ("cifar10", "vit_small", "original"): (85.2, 85.2, 53.6),
    ("cifar10", "vit_small", "retrained"): (75.5, 0.0, 61.3, "51.1 (4)"),
    ("cifar10", "vit_small", "random_labels"): (74.8, 0.0, 50.8, "75.0 (6)"),
    ("cifar10", "vit_small", "negative_gradients"): (75.5, 0.0, 51.7, "61.7 (5)"),
    ("cifar10", "vit_small", "paper"): (74.7, 0.0, 59.7, "81.1 (8)"),
    ("imagenet", "vgg16", "original"): (71.2, 71.3, 35),
    ("imagenet", "vgg16", "paper"): (64.1, 1.89, 53),
    ("imagenet", "resnet18", "original"): (70.5, 70.3, 35),
    ("imagenet", "resnet18", "paper"): (64.4, 1.47, 40),
    ("imagenet", "vit_tiny", "original"): (75.6, 75.5, 34),
    ("imagenet", "vit_tiny", "paper"): (68.0, 2.51, 44),
    ("imagenet", "vit_small", "original"): (82.3, 82.2, 34),
    ("imagenet", "vit_small", "paper"): (69.2, 9.46, 45),
    ("imagenet", "resnet50", "paper"): (72.6, 0.0),
    ("imagenet", "resnet101", "paper"): (74.4, 0.0),
}
PAPER_CURVES = {
    ("mnist", "vgg16"): (0.78, 0.09),
    ("cifar10", "vgg16"): (0.79, 0.10),
    ("imagenet", "vgg16"): (0.73, 0.05),
    ("mnist", "resnet18"): (0.79, 0.05),
    ("cifar10", "resnet18"): (0.69, 0.06),
    ("imagenet", "resnet18"): (0.75, 0.04),
    ("mnist", "vit_tiny"): (0.90, 0.07),
    ("cifar10", "vit_tiny"): (0.88, 0.05),
    ("imagenet", "vit_tiny"): (0.60, 0.04),
    ("mnist", "vit_small"): (0.90, 0.08),
    ("cifar10", "vit_small"): (0.88, 0.14),
    ("imagenet", "vit_small"): (0.75, 0.04),
}
