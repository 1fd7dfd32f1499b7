"""What the features still know: linear probe and nearest class mean on penultimate features.

Output forgetting is cheap (mask the logit); these two classifiers ask whether a new head finds the
class again. The bar is the retrained model's number, not zero.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from wfilter.data.checks import check_labels
from wfilter.metrics.accuracy import confusion
from wfilter.metrics.cells import Column
from wfilter.metrics.method import Method
from wfilter.metrics.problem import Problem
from wfilter.metrics.registry import Measured, by_class, metric


@dataclass(frozen=True)
class Probe:
    """Test accuracy of a classifier put on frozen features, in all and for each class.

    Example:
        >>> Probe(0.75, {0: 1.0, 1: 0.5}).by_class[1]
        0.5
    """

    accuracy: float
    by_class: dict[int, float]


def linear_probe(
    features: Tensor,
    labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    regularisation: float = 1.0,
    max_iter: int = 1000,
) -> Probe:
    """Logistic regression on standardised features of *all* classes, the forgotten one included.

    Args:
        features: (samples, width), of training images under the row in question.
        labels: (samples,).
        test_features: (test samples, width), under the same row.
        test_labels: (test samples,).
        regularisation: scikit-learn's C; larger is weaker.
        max_iter: of the solver; scikit-learn warns if it was not enough.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [9.0], [10.0]]), torch.tensor([0, 0, 1, 1])
        >>> linear_probe(x, y, x, y).by_class
        {0: 1.0, 1: 1.0}
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    _check_features(features, labels, test_features, test_labels)
    steps = (
        StandardScaler(),  # type: ignore[no-untyped-call]
        LogisticRegression(C=regularisation, max_iter=max_iter),  # type: ignore[no-untyped-call]
    )
    probe = make_pipeline(*steps)  # type: ignore[no-untyped-call]
    probe.fit(_numpy(features), _numpy(labels))
    return scored(torch.from_numpy(probe.predict(_numpy(test_features))), test_labels)


def nearest_class_mean(
    features: Tensor,
    labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    distance: Literal["euclidean", "cosine"] = "euclidean",
) -> Probe:
    """Classify each test sample by the nearest mean of the training features of a class.

    Arguments as in `linear_probe`; nothing is fitted but the means.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([0, 0, 2])
        >>> nearest_class_mean(x, y, torch.tensor([[8.0]]), torch.tensor([2])).accuracy
        1.0
    """
    _check_features(features, labels, test_features, test_labels)
    if distance not in ("euclidean", "cosine"):
        raise ValueError(f"distance={distance!r} is unknown; expected 'euclidean' or 'cosine'.")
    x, test = features.double(), test_features.double()
    if distance == "cosine":
        x, test = (nn.functional.normalize(part) for part in (x, test))
    classes = sorted(set(labels.tolist()))
    means = torch.stack([x[labels == label].mean(0) for label in classes])
    if distance == "cosine":
        means = nn.functional.normalize(means)
    nearest = torch.cdist(test, means).argmin(1)
    return scored(torch.tensor(classes)[nearest.cpu()], test_labels)


def _check_features(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor) -> None:
    for name, features, labels in (("features", x, y), ("test_features", test_x, test_y)):
        if features.ndim != 2 or not len(features):
            raise ValueError(
                f"{name} has shape {tuple(features.shape)}; expected (samples, width), not empty."
            )
        if not features.isfinite().all():
            raise ValueError(f"{name} contains NaN or infinity.")
        check_labels(labels, len(features))
    unseen = sorted(set(test_y.tolist()) - set(y.tolist()))
    if unseen:
        raise ValueError(f"class(es) {unseen[:10]} of test_labels have no training samples.")


def _numpy(tensor: Tensor) -> object:
    return tensor.detach().cpu().numpy()


def scored(predictions: Tensor, labels: Tensor) -> Probe:
    """Accuracy of predictions, in all and for each class.

    Example:
        >>> scored(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1])).by_class
        {0: 0.5, 1: 1.0}
    """
    predictions, labels = predictions.cpu(), labels.cpu()
    counts = confusion(predictions, labels, int(max(predictions.max(), labels.max())) + 1)
    hits, totals = counts.diagonal(), counts.sum(1)
    present: Iterable[int] = totals.nonzero().flatten().tolist()
    by_class = {label: int(hits[label]) / int(totals[label]) for label in present}
    return Probe(int(hits.sum()) / len(labels), by_class)


def _columns(problem: Problem) -> list[Column]:
    """Columns of two classifiers on features, each for the forget and the retain half."""
    group, columns = "what the features still know", []
    for name, text in (("probe", "logistic regression"), ("NCM", "the nearest class mean")):
        own = f"Accuracy of {text} on penultimate features, forgotten class."
        columns.append(Column(f"{name} f", group, "retrained", own, over="forget sample"))
        columns.append(
            Column(
                f"{name} r",
                group,
                "higher",
                "The same, mean of the other classes.",
                over="retain sample",
            )
        )
    return columns


@metric("probe", _columns, order=40, needs_train=True)
def measure_probe(method: Method, problem: Problem) -> Measured:
    """Linear probe and nearest class mean on the features of training and test sample."""

    @method.once_if_shared
    def fitted(row: int) -> dict[str, Probe]:
        known = problem.features(method, row)
        return {"probe": linear_probe(*known), "NCM": nearest_class_mean(*known)}

    def number(row: int) -> dict[str, float | None]:
        return {
            f"{name} {half}": value
            for name, probe in fitted(row).items()
            for half, value in zip("fr", _halves(probe.by_class, row))
        }

    return by_class(method, number)


def _halves(by_class: Mapping[int, float], row: int) -> tuple[float, float]:
    """The number of the class ``row``, and the mean of the other classes' numbers."""
    others = [value for label, value in by_class.items() if label != row]
    return by_class[row], sum(others) / len(others)
