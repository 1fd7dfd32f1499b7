"""What the features still know: linear probe and nearest class mean on penultimate features.

Output forgetting is cheap (mask the logit); these ask whether a new head finds the class again.
The bar is the retrained model's number, not zero.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wfilter.data.checks import check_labels, unpack
from wfilter.data.running import Batches, Forward, device_of, evaluating
from wfilter.metrics.accuracy import confusion


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
    return _score(torch.from_numpy(probe.predict(_numpy(test_features))), test_labels)


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
    return _score(torch.tensor(classes)[nearest.cpu()], test_labels)


def find_head(model: nn.Module) -> nn.Module:
    """The layer that makes the logits: timm's classifier, or the last ``nn.Linear`` registered.

    A model without linear layers gives its last convolution (SqueezeNet).

    Example:
        >>> find_head(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
        Linear(in_features=8, out_features=3, bias=True)
    """
    get_classifier = getattr(model, "get_classifier", None)
    classifier = get_classifier() if callable(get_classifier) else model
    root = classifier if isinstance(classifier, nn.Module) else model
    for kind in (nn.Linear, nn.Conv2d):
        found = [module for module in root.modules() if isinstance(module, kind)]
        if found:
            return found[-1]
    raise ValueError(
        f"{type(model).__name__} has neither a linear nor a convolutional layer. "
        "Pass head=, the module that makes the logits."
    )


def penultimate_features(
    model: nn.Module,
    images: Tensor,
    *,
    forward: Forward | None = None,
    head: nn.Module | None = None,
) -> Tensor:
    """What the classifier's head sees, (samples, width): its input, caught by a hook.

    Gradients flow through it where the forward has them.
    A model with several heads (distilled DeiT) gives timm's ``forward_head(pre_logits=True)``.

    Args:
        model: the module that holds the head. Run as it is: call ``model.eval()`` first.
        images: one batch.
        forward: how to run it, if not ``model(images)``: for a filtered model, a function that
            passes the row.
        head: the module whose input counts; default `find_head`.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> penultimate_features(model, torch.zeros(5, 1, 2, 2)).shape
        torch.Size([5, 8])
    """
    timm_model: Any = model
    if forward is None and head is None and _many_heads(model):
        return _flat(timm_model.forward_head(timm_model.forward_features(images), pre_logits=True))
    seen: list[Tensor] = []
    module = head or find_head(model)
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        (forward or model)(images)
    finally:
        handle.remove()
    if not seen or len(seen[-1]) != len(images):
        raise ValueError(
            f"{type(module).__name__} was called {len(seen)} times, last with a batch of "
            f"{len(seen[-1]) if seen else 0} for {len(images)} images: it is not the head. "
            "Pass head=, the module that makes the logits."
        )
    return _flat(seen[-1])


@torch.no_grad()
def collect_features(
    model: nn.Module,
    batches: Batches,
    *,
    forward: Forward | None = None,
    head: nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    """Penultimate features (samples, width) and labels of all batches in eval mode, on the CPU.

    Arguments as in `penultimate_features`.

    Example:
        >>> features, labels = collect_features(
        ...     nn.Linear(4, 3), [(torch.ones(2, 4), torch.tensor([0, 1]))]
        ... )
        >>> features.shape
        torch.Size([2, 4])
    """
    device, parts = device_of(model), []
    with evaluating(model):
        for images, labels in map(unpack, batches):
            found = penultimate_features(model, images.to(device), forward=forward, head=head)
            parts.append((found.cpu(), labels.cpu()))
    if not parts:
        raise ValueError("the data has no batches. A generator used up by an earlier pass?")
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _many_heads(model: nn.Module) -> bool:
    get_classifier = getattr(model, "get_classifier", None)
    several = callable(get_classifier) and not isinstance(get_classifier(), nn.Module)
    return several and hasattr(model, "forward_features") and hasattr(model, "forward_head")


def _flat(features: Tensor) -> Tensor:
    """(samples, width): a convolutional head's input is averaged over its positions."""
    return features.mean((-2, -1)) if features.ndim == 4 else features.flatten(1)


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


def _score(predictions: Tensor, labels: Tensor) -> Probe:
    predictions, labels = predictions.cpu(), labels.cpu()
    counts = confusion(predictions, labels, int(max(predictions.max(), labels.max())) + 1)
    hits, totals = counts.diagonal(), counts.sum(1)
    present: Iterable[int] = totals.nonzero().flatten().tolist()
    by_class = {label: int(hits[label]) / int(totals[label]) for label in present}
    return Probe(int(hits.sum()) / len(labels), by_class)
