"""The linear probe layer by layer: how deep into the network a class is still told apart.

After the information difference index (IDI) of Jeon et al., "An Information Theoretic Evaluation
Metric For Strong Unlearning", arXiv 2405.17878: there the mutual information between a layer's
features and "is it the forgotten class" is estimated by a trained network; here by a linear probe,
which gives a lower bound: ``ln 2`` less its cross-entropy on test images, where the class and the
rest weigh the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wfilter.data.running import device_of, evaluating
from wfilter.metrics.cells import Column
from wfilter.metrics.features import find_head
from wfilter.metrics.method import PAIRS, Method
from wfilter.metrics.problem import Problem
from wfilter.metrics.registry import Measured, by_class, metric

DEPTHS = 4
"""How many layers are looked at, spread evenly from input to head."""

LEAVES = (nn.Conv2d, nn.Linear)


@torch.no_grad()
def layer_features(
    model: nn.Module, images: Tensor, count: int = DEPTHS, *, like: nn.Module | None = None
) -> list[Tensor] | None:
    """Outputs of some layers, input to head: means over positions, ``(samples, width)`` each.

    The layers are convolutions and linear ones in the order in which they run, spread evenly; the
    last entry is what the head sees.

    Args:
        model: The one to look into.
        images: One batch.
        count: How many layers.
        like: The model whose layers set the places, by default ``model``: one with a layer more,
            such as a linear one before its head, is then looked at in the same places. The
            answer is ``None`` if ``model`` does not begin with layers of the kinds ``like`` has.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> [x.shape[1] for x in layer_features(model, torch.zeros(5, 1, 2, 2), 2)]
        [8, 8]
    """
    head, device = find_head(model), device_of(model)
    with evaluating(model):
        order = _order(model, images[:1].to(device), head)
        counted = order if like is None or like is model else _counted(like, images)
        if [*map(_kind, counted)] != [*map(_kind, order[: len(counted)])]:
            return None
        places = [round(i * (len(counted) - 1) / max(1, count - 2)) for i in range(count - 1)]
        chosen = [order[place] for place in places] if counted else []
        parts = [_look(model, part.to(device), chosen, head) for part in torch.split(images, PAIRS)]
    return [torch.cat(layer) for layer in zip(*parts)]


def _counted(model: nn.Module, images: Tensor) -> list[nn.Module]:
    with evaluating(model):
        return _order(model, images[:1].to(device_of(model)), find_head(model))


def _kind(layer: nn.Module) -> bool:
    """Whether a layer is linear: all that must agree, since pruned layers have other widths."""
    return isinstance(layer, nn.Linear)


def _order(model: nn.Module, image: Tensor, head: nn.Module) -> list[nn.Module]:
    """Layers with weights in the order in which they run, without the head."""
    ran: dict[nn.Module, None] = {}
    leaves = [m for m in model.modules() if isinstance(m, LEAVES) and m is not head]
    handles = [m.register_forward_hook(lambda m, *_: ran.setdefault(m)) for m in leaves]
    try:
        model(image)
    finally:
        for handle in handles:
            handle.remove()
    return list(ran)


def _look(
    model: nn.Module, images: Tensor, chosen: Sequence[nn.Module], head: nn.Module
) -> list[Tensor]:
    """Outputs of the chosen layers and the input of the head, for one batch."""
    seen: dict[int, Tensor] = {}
    handles = [
        layer.register_forward_hook(lambda _, __, out, i=i: seen.update({i: _pooled(out)}))
        for i, layer in enumerate(chosen)
    ]
    handles.append(
        head.register_forward_pre_hook(lambda _, args: seen.update({len(chosen): _pooled(args[0])}))
    )
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return [seen[i] for i in sorted(seen)]


def _pooled(output: Tensor) -> Tensor:
    """Means over positions, of maps ``(batch, channels, h, w)`` or tokens ``(batch, t, width)``."""
    if output.ndim == 4:
        output = output.mean((-2, -1))
    elif output.ndim == 3:
        output = output.mean(1)
    return output.flatten(1).float().cpu()


def information(
    features: Tensor, labels: Tensor, test_features: Tensor, test_labels: Tensor, row: int
) -> float:
    """Nats that a linear probe finds about "is it this class", from 0 to ln 2.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [9.0], [10.0]]), torch.tensor([0, 0, 1, 1])
        >>> 0 < information(x, y, x, y, row=1) < math.log(2)
        True
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils.class_weight import compute_sample_weight

    scale = StandardScaler().fit(features.numpy())  # type: ignore[no-untyped-call]
    probe = LogisticRegression(C=0.1, class_weight="balanced", max_iter=1000)  # type: ignore[no-untyped-call]
    probe.fit(scale.transform(features.numpy()), (labels == row).numpy())
    truth = (test_labels == row).numpy()
    weights = compute_sample_weight("balanced", truth)
    chances = probe.predict_proba(  # type: ignore[no-untyped-call]
        scale.transform(test_features.numpy())
    )
    loss = log_loss(truth, chances, sample_weight=weights, labels=[False, True])
    return max(0.0, math.log(2) - float(loss))


def information_index(
    own: Sequence[float], original: Sequence[float], retrained: Sequence[float]
) -> float | None:
    """IDI: nats above the retrained model's, summed over layers, relative to the original's sum.

    ``None`` where a layer lacks a number, or the original knows no more than the retrained model.

    Example:
        >>> information_index([0.2, 0.3], original=[0.3, 0.6], retrained=[0.2, 0.2])
        0.2
    """
    if not own or len({len(own), len(original), len(retrained)}) > 1:
        return None
    most = sum(original) - sum(retrained)
    return None if most <= 0 else round((sum(own) - sum(retrained)) / most, 12)


def _columns(problem: Problem) -> list[Column]:
    group = "how deep the class is known"
    names = [f"depth {i}/{DEPTHS}" for i in range(1, DEPTHS + 1)]
    text = (
        "Nats that a linear probe finds about the forgotten class against the rest (ln 2 less its "
        "cross-entropy on test images; 0.693 at most) in"
    )
    columns = [
        Column(name, group, "retrained", f"{text} layer {i} of {DEPTHS}.", "number")
        for i, name in enumerate(names, 1)
    ]
    idi = (
        "Sum over those layers of the nats above the retrained model's, divided by the same of the "
        "original: 1 as much as the original, 0 as the retrained model, below 0 less than that."
    )
    return [
        *columns,
        Column("IDI", group, "lower", idi, "number", derived="idi", source=", ".join(names)),
    ]


@metric("depth", _columns, order=44, needs_train=True)
def measure_depth(method: Method, problem: Problem) -> Measured:
    """Nats about the class in every layer looked at."""

    @method.once_if_shared
    def layers(row: int) -> list[tuple[Tensor, Tensor]] | None:
        model = method.model(row)
        train = layer_features(model, problem.train[0], like=problem.base)
        test = layer_features(model, problem.test[0], like=problem.base)
        return None if train is None or test is None else list(zip(train, test))

    def number(row: int) -> dict[str, float | None]:
        features = layers(row)
        if features is None:  # other layers than the base model has
            return {f"depth {i}/{DEPTHS}": None for i in range(1, DEPTHS + 1)}
        return {
            f"depth {i}/{DEPTHS}": information(x, problem.train[1], test, problem.test[1], row)
            for i, (x, test) in enumerate(features, 1)
        }

    return by_class(method, number)
