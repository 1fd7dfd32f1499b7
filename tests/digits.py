"""A small real problem for tests: scikit-learn's digits and a convolutional network on them."""

import copy
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from wfilter import metrics

NUM_CLASSES = 10
FORGET = 3  # the digit that tests of rivals forget


@cache
def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test (images, labels): 1,297 and 500 real 8 x 8 digits."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return (images[500:], labels[500:]), (images[:500], labels[:500])


def batches(pair: tuple[Tensor, Tensor], size: int = 64) -> list[tuple[Tensor, Tensor]]:
    return list(zip(pair[0].split(size), pair[1].split(size), strict=True))


def train() -> list[tuple[Tensor, Tensor]]:
    """Batches of the training digits."""
    return batches(data()[0])


def accuracies(model: nn.Module, forget: int | list[int] = FORGET) -> tuple[float, float]:
    """Acc_r and Acc_f on the test digits."""
    logits, labels = metrics.collect_logits(model, batches(data()[1]))
    return metrics.set_accuracies(logits, labels, forget)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, NUM_CLASSES),
    )


def trained_cnn() -> nn.Module:
    """About 98 % on the test digits; a copy, so tests cannot disturb each other."""
    return copy.deepcopy(_trained_once())


@cache
def _trained_once() -> nn.Module:
    return trained_on(data()[0])


def trained_on(pair: tuple[Tensor, Tensor]) -> nn.Module:
    """A network of the same kind, trained on these images."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = cnn().train()
        optimiser = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(8):
            for images, labels in batches(pair):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimiser.step()
    model.zero_grad(set_to_none=True)
    return model.eval()
