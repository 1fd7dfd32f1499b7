"""Attacks on the features: how well a class is found again from the input of the head.

Each attack is fitted on the training sample's features, the forgotten class among them, and judged
on the test sample's. Two more, linear probe and nearest class mean, are in
`wfilter.metrics.probe`. The bar is the retrained model's number, not zero: a network that never saw
cats still has features that tell cats from cars.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wfilter.data.running import seeded
from wfilter.metrics.cells import Column
from wfilter.metrics.method import Method
from wfilter.metrics.probe import Probe, linear_probe, nearest_class_mean, scored
from wfilter.metrics.problem import Problem
from wfilter.metrics.registry import Measured, by_class, metric

NEIGHBOURS = 20
REFIT = 0.02
"""The share of the training images on which a new head is fitted."""

PROTOTYPES = 10
"""Images of each class that make the prototypes."""

Attack: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Probe]
"""(training features, their labels, test features, their labels) -> test accuracy by class."""


def nearest_neighbours(
    features: Tensor,
    labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    k: int = NEIGHBOURS,
) -> Probe:
    """Accuracy when the ``k`` training images nearest by cosine vote on each test image.

    Arguments as in `linear_probe`.

    Example:
        >>> x, y = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), torch.tensor([0, 0, 1])
        >>> nearest_neighbours(x, y, x, y, k=1).accuracy
        1.0
    """
    x, test = F.normalize(features.float()), F.normalize(test_features.float())
    votes = F.one_hot(labels, int(labels.max()) + 1).float()
    predictions = [
        votes[(part @ x.T).topk(min(k, len(x)), 1).indices].sum(1).argmax(1)
        for part in torch.split(test, 1000)
    ]
    return scored(torch.cat(predictions), test_labels)


def mlp_probe(
    features: Tensor,
    labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    width: int = 256,
    steps: int = 400,
    lr: float = 1e-3,
    seed: int = 0,
) -> Probe:
    """Accuracy of a network with one hidden layer on standardised features (Adam, batches of 256).

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [9.0], [10.0]]), torch.tensor([0, 0, 1, 1])
        >>> mlp_probe(x, y, x, y, steps=50, lr=0.01).accuracy
        1.0
    """
    mean, std = features.float().mean(0), features.float().std(0).clamp_min(1e-6)
    x, test = (features.float() - mean) / std, (test_features.float() - mean) / std
    with seeded(seed), torch.enable_grad():
        layers = (nn.Linear(x.shape[1], width), nn.ReLU(), nn.Linear(width, int(labels.max()) + 1))
        network = nn.Sequential(*layers)
        optimiser = torch.optim.Adam(network.parameters(), lr, weight_decay=1e-4)
        for _ in range(steps):
            index = torch.randint(len(x), (min(256, len(x)),))
            loss = F.cross_entropy(network(x[index]), labels[index])
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
    with torch.no_grad():
        return scored(network(test).argmax(1), test_labels)


def refitted_head(
    features: Tensor, labels: Tensor, test_features: Tensor, test_labels: Tensor
) -> Probe:
    """Accuracy of a new head, a logistic regression on 2 % of each class's training images.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [9.0], [10.0]]), torch.tensor([0, 0, 1, 1])
        >>> refitted_head(x, y, x, y).accuracy
        1.0
    """
    picked = _first_share(labels, REFIT)
    return linear_probe(features[picked], labels[picked], test_features, test_labels)


def prototypes(
    features: Tensor, labels: Tensor, test_features: Tensor, test_labels: Tensor
) -> Probe:
    """Accuracy of the nearest prototype by cosine: means of ten images less their common mean.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [9.0], [10.0]]), torch.tensor([0, 0, 1, 1])
        >>> prototypes(x, y, x, y).accuracy
        1.0
    """
    present = sorted(set(labels.tolist()))
    picked = torch.cat([(labels == c).nonzero()[:PROTOTYPES, 0] for c in present])
    few, centre = features[picked], features[picked].mean(0)
    known = (few - centre, labels[picked], test_features - centre, test_labels)
    return nearest_class_mean(*known, distance="cosine")


ATTACKS: dict[str, tuple[Attack, str]] = {
    "k-NN": (nearest_neighbours, f"the {NEIGHBOURS} nearest training images, by cosine"),
    "MLP": (mlp_probe, "a network with one hidden layer of 256"),
    "refit": (refitted_head, f"a new linear head fitted on {REFIT:.0%} of the training images"),
    "prototype": (
        prototypes,
        f"the nearest prototype by cosine, each the mean of {PROTOTYPES} images",
    ),
}
"""Name of the attack -> how it is done, in code and in words."""


def separation(
    features: Tensor, labels: Tensor, test_features: Tensor, test_labels: Tensor, row: int
) -> float:
    """AUC of a class against the rest: logistic regression, both sides weighted alike.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [9.0], [10.0]]), torch.tensor([0, 0, 1, 1])
        >>> separation(x, y, x, y, row=1)
        1.0
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.preprocessing import StandardScaler

    scale = StandardScaler().fit(features.numpy())  # type: ignore[no-untyped-call]
    probe = LogisticRegression(class_weight="balanced", max_iter=1000)  # type: ignore[no-untyped-call]
    probe.fit(scale.transform(features.numpy()), (labels == row).numpy())
    scores = probe.decision_function(  # type: ignore[no-untyped-call]
        scale.transform(test_features.numpy())
    )
    return float(roc_auc_score((test_labels == row).numpy(), scores))


def _first_share(labels: Tensor, share: float) -> Tensor:
    """Positions of the first ``share`` of the images of every class, at least one of each."""
    places = [(labels == c).nonzero()[:, 0] for c in sorted(set(labels.tolist()))]
    return torch.cat([place[: max(1, round(share * len(place)))] for place in places])


def _columns(problem: Problem) -> list[Column]:
    group = "what the features still know"
    auc = (
        "Area under the ROC curve of logistic regression on penultimate features, the forgotten "
        "class against the rest; 50 is chance."
    )
    columns = [Column("one-vs-rest AUC", group, "retrained", auc)]
    for name, (_, text) in ATTACKS.items():
        own = f"Accuracy on the forgotten class of {text}, on penultimate features."
        columns.append(Column(f"{name} f", group, "retrained", own, over="forget sample"))
    return columns


@metric("attacks", _columns, order=42, needs_train=True)
def measure_attacks(method: Method, problem: Problem) -> Measured:
    """Every attack on the features of a class that is forgotten."""

    @method.once_if_shared
    def fitted(row: int) -> dict[str, Probe]:
        known = problem.features(method, row)
        return {name: attack(*known) for name, (attack, _) in ATTACKS.items()}

    def number(row: int) -> dict[str, float | None]:
        auc = separation(*problem.features(method, row), row)
        probes = {f"{name} f": probe.by_class[row] for name, probe in fitted(row).items()}
        return {"one-vs-rest AUC": auc, **probes}

    return by_class(method, number)
