"""Attacks on features: how much of a forgotten class does whoever sees them still find?

Every attack is trained on features of training images *under the row in question*, so it knows the
row; each gives the share of the class's test images that it finds, in percent.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wfilter import metrics

SEEDS = (0, 1, 2)
NEIGHBOURS = 20


@dataclass(frozen=True)
class View:
    """What an attacker sees of one class under one method: features and logits of both splits."""

    forget: int
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    train_logits: Tensor
    test_logits: Tensor
    raw: tuple[Tensor, Tensor] | None = None  # what relearning starts from, if not the features
    together: tuple[int, ...] = ()  # all classes that are forgotten, where they are several

    def retained(self, labels: Tensor) -> Tensor:
        """Which labels are of classes that are not forgotten."""
        return ~torch.isin(labels, torch.tensor([self.forget, *self.together]))

    @property
    def own(self) -> Tensor:
        """Which test images are of the forgotten class."""
        return self.test_labels == self.forget

    def found(self, predictions: Tensor) -> float:
        """Share of the class's test images that are found, in percent."""
        return 100 * float((predictions == self.forget)[self.own].float().mean())


def standardised(view: View) -> tuple[Tensor, Tensor]:
    mean, spread = view.train.mean(0), view.train.std(0) + 1e-6
    return (view.train - mean) / spread, (view.test - mean) / spread


def linear_probe(view: View) -> float:
    probe = metrics.linear_probe(view.train, view.train_labels, view.test, view.test_labels)
    return 100 * probe.by_class[view.forget]


def one_against_rest(view: View) -> float:
    """Area under the ROC curve of a logistic regression: the class or not."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    train, test = (part.numpy() for part in standardised(view))
    probe = LogisticRegression(max_iter=1000).fit(train, (view.train_labels == view.forget).numpy())
    return 100 * float(roc_auc_score(view.own.numpy(), probe.decision_function(test)))


def nearest_mean(view: View) -> float:
    probe = metrics.nearest_class_mean(view.train, view.train_labels, view.test, view.test_labels)
    return 100 * probe.by_class[view.forget]


def neighbours(view: View) -> float:
    """The majority of the 20 nearest training images; only the class's test images are asked."""
    near = torch.cdist(view.test[view.own], view.train).topk(NEIGHBOURS, largest=False).indices
    votes = F.one_hot(view.train_labels[near]).sum(1)
    return 100 * float((votes.argmax(1) == view.forget).float().mean())


def network(view: View, train: Tensor, test: Tensor, seed: int, epochs: int = 12) -> float:
    """A network with one hidden layer of 256 units."""
    torch.manual_seed(seed)
    classes = int(view.train_labels.max()) + 1
    model = nn.Sequential(nn.Linear(train.shape[1], 256), nn.ReLU(), nn.Linear(256, classes))
    optimiser = torch.optim.Adam(model.parameters(), 1e-3, weight_decay=1e-4)
    for _ in range(epochs):
        for part in torch.randperm(len(train)).split(256):
            loss = F.cross_entropy(model(train[part]), view.train_labels[part])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        return view.found(model(test).argmax(1))


def mlp_probe(view: View, seed: int) -> float:
    return network(view, *standardised(view), seed)


def inverter(view: View, seed: int, undo: Callable[[Tensor], Tensor]) -> float:
    """Knows the rows: undoes the edit as if every image were of the class, and looks at both."""
    parts = []
    for features in (view.train, view.test):
        parts.append(torch.cat([features, undo(features)], 1))
    mean, spread = parts[0].mean(0), parts[0].std(0) + 1e-6
    train, test = ((part - mean) / spread for part in parts)
    return network(view, train, test, seed)


def drawn(labels: Tensor, forget: int, own: int, others: int, seed: int) -> Tensor:
    """Indices of some images of the class and some of all others."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    mine, rest = order[labels[order] == forget], order[labels[order] != forget]
    return torch.cat([mine[:own], rest[:others]])


def refit_head(view: View, seed: int, share: float = 0.02) -> float:
    """A new head from 2 % of the training images, by logistic regression."""
    order = torch.randperm(len(view.train), generator=torch.Generator().manual_seed(seed))
    some = order[: int(share * len(order))]
    labels = view.train_labels[some]
    probe = metrics.linear_probe(view.train[some], labels, view.test, view.test_labels)
    return 100 * probe.by_class[view.forget]


def prototype(view: View, seed: int, images: int = 5) -> float:
    """The class by the mean of five of its images, all others by their own means."""
    classes = int(view.train_labels.max()) + 1
    means = torch.stack([view.train[view.train_labels == c].mean(0) for c in range(classes)])
    some = drawn(view.train_labels, view.forget, images, 0, seed)
    means[view.forget] = view.train[some].mean(0)
    return view.found(torch.cdist(view.test, means).argmin(1))


def relearn(view: View, seed: int, images: int, head: nn.Module, steps: int = 100) -> float:
    """Train layers after the backbone on ``images`` of the class and 500 others, by Adam.

    ``head`` starts as the method left it. The backbone is not trained: the figure is a lower bound
    for whoever can train all of it.
    """
    torch.manual_seed(seed)
    some = drawn(view.train_labels, view.forget, images, 500, seed)
    train, test = view.raw or (view.train, view.test)
    x, y = train[some], view.train_labels[some]
    weight = torch.ones(int(y.max()) + 1)
    weight[view.forget] = max(1.0, 55 / images)  # as many as another class has, in all
    optimiser = torch.optim.Adam(head.requires_grad_().parameters(), 1e-2)
    for _ in range(steps):
        loss = F.cross_entropy(head(x), y, weight=weight)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        return view.found(head(test).argmax(1))


def membership(view: View) -> tuple[float, float]:
    """The two attacks of `wfilter.metrics`: judged non-members (confidence), members (entropy)."""
    own = view.train_labels == view.forget
    logits, labels = view.train_logits, view.train_labels
    seen, others = view.retained(labels), view.retained(view.test_labels)
    confidence = metrics.confidence_attack(
        (logits[seen], labels[seen]),
        (view.test_logits[others], view.test_labels[others]),
        (logits[own], labels[own]),
    )
    entropy = metrics.entropy_attack(logits[seen], view.test_logits[others], logits[own])
    return 100 * confidence, 100 * entropy


def answers(view: View) -> tuple[float, float]:
    """Acc_r and Acc_f, in percent."""
    right = view.test_logits.argmax(1) == view.test_labels
    retain = right[view.retained(view.test_labels)].float().mean()
    forget = right[view.own].float().mean()
    return 100 * float(retain), 100 * float(forget)


def routes(view: View) -> list[float]:
    """Where the class's test images go: the share of each answer."""
    classes = view.test_logits.shape[1]
    counts = torch.bincount(view.test_logits[view.own].argmax(1), minlength=classes)
    return [round(float(count) / int(view.own.sum()), 4) for count in counts]


def judge(
    view: View,
    new_head: Callable[[], nn.Module],
    undo: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, object]:
    """All figures of one class under one method; what is drawn at random, by the mean of 3 seeds.

    Args:
        view: What the attacker sees.
        new_head: The layers after the backbone as the method leaves them, a fresh copy each call.
        undo: For the attacker who knows the rows.
    """

    def mean(attack: Callable[[int], float]) -> float:
        return round(statistics.mean(attack(seed) for seed in SEEDS), 2)

    acc_r, acc_f = answers(view)
    confidence, entropy = membership(view)
    figures: dict[str, object] = {
        "acc_r": round(acc_r, 2),
        "acc_f": round(acc_f, 2),
        "linear_probe": round(linear_probe(view), 2),
        "auc": round(one_against_rest(view), 2),
        "nearest_mean": round(nearest_mean(view), 2),
        "20_nn": round(neighbours(view), 2),
        "mlp_probe": mean(lambda seed: mlp_probe(view, seed)),
        "refit_2_percent": mean(lambda seed: refit_head(view, seed)),
        "prototype": mean(lambda seed: prototype(view, seed)),
        "mia_confidence": round(confidence, 2),
        "mia_entropy": round(entropy, 2),
        "routes": routes(view),
    }
    for images in (1, 5, 10, 500):
        figures[f"relearn_{images}"] = mean(
            lambda seed, images=images: relearn(view, seed, images, new_head())
        )
    if undo is not None:
        figures["inverter"] = mean(lambda seed: inverter(view, seed, undo))
    return figures
