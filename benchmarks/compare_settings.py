"""What ``compare.py`` runs: networks, budgets by dataset, and each rival's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MODELS = {"cifar10": "wfilter:resnet18-cifar", "mnist": "wfilter:resnet18-mnist"}
TITLES = {"cifar10": "CIFAR-10", "mnist": "MNIST"}
DEFAULTS = {
    "cifar10": {},
    "mnist": {
        "test_images": 2000,
        "train_images": 2000,
        "probe_images": 500,
        "sample_images": 500,
        "shared_images": 20_000,
        "shared_epochs": 1,
        "retrain_images": 4000,
        "relearn_samples": 200,
        "relearn_epochs": 5,
        "shots": [1, 5, 10],
        "curve_images": 20,
    },
}


@dataclass(frozen=True)
class Setting:
    """Options of a rival, the size of its batches, and what they replace."""

    options: dict[str, Any]
    batch_size: int
    note: str


# The papers fine-tune on all of CIFAR-10: 5,000 images of the forgotten class, hundreds of steps.
# Here a rival gets about the processor time that our filters need for a class.
SETTINGS = {
    "logit_mask": Setting({}, 64, "nothing is trained."),
    "projection": Setting({}, 64, "nothing is trained; the logit is masked as well."),
    "negative_gradients": Setting(
        {"epochs": 20},
        32,
        "up to 20 passes over the forgotten class in batches of 32, SGD 0.01; stops when a batch "
        "is at 0 % (ours: the papers give no settings).",
    ),
    "ssd": Setting(
        {},
        64,
        "alpha 10, lambda 1 and batches of 64 as in the paper, but importances from these images.",
    ),
    "bad_teaching": Setting(
        {"epochs": 2, "lr": 3e-4, "batch_size": 16},
        64,
        "2 epochs, Adam 3e-4, batches of 16 (paper: 1 epoch, Adam 1e-4, batches of 256).",
    ),
    "random_labels": Setting(
        {"epochs": 1},
        32,
        "1 epoch, SGD 0.01, batches of 32 (ours: the papers give no settings).",
    ),
    "salun": Setting(
        {"epochs": 1},
        16,
        "1 epoch, SGD 0.013, batches of 16 (paper: 10 epochs, SGD 0.013, batches of 256).",
    ),
    "scrub": Setting(
        {"epochs": 1, "max_epochs": 1, "forget_batch_size": 16, "lr": 2e-3},
        32,
        "1 epoch in batches of 32 after a forget pass in batches of 16, SGD 2e-3 (paper: 3 epochs, "
        "2 of them with a forget pass in batches of 512, SGD 5e-4).",
    ),
    "retrained": Setting(
        {"lr": 0.02},
        64,
        "from scratch without the class, in two parts; how far it got: see its Acc_r.",
    ),
}
UNTRAINED = ("logit_mask", "projection")
