"""Fold a feature row of one class or set into plain linear layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from wfilter.core.feature_rows import FeatureRows

# The bias that stands for a forgotten class in a folded head, whose weights are 0.
ERASED = -1e4
# What is added to the covariance within classes, as a share of its mean variance.
SHRINKAGE = 0.01


def fold_head(model: nn.Module, rows: FeatureRows, forget: Tensor) -> nn.Module:
    """In place: the head of a plain model becomes two linear layers, see ``folded``."""
    path, _, _ = rows.head_of(model).weights[0].rpartition(".")  # type: ignore[union-attr]
    head = model.get_submodule(path)
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{path} is a {type(head).__name__}; only an nn.Linear can be folded.")
    layers = folded(rows, head, forget)
    if not path:
        return layers
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layers)
    return model


@torch.no_grad()
def folded(rows: FeatureRows, head: nn.Linear, forget: Tensor) -> nn.Sequential | nn.Linear:
    """A linear edit and the head without its forgotten rows, as two plain layers.

    A linear layer can neither choose by the image nor draw. It moves each class of the set to one
    place, its nearest class outside, and along that direction nothing of the class is left::

        h' = h + sum over c in S of q_c(h) * (mean_j - mean_c)

    ``q_c`` is a detector, see ``detectors``. The head's weights of the forgotten classes are 0 and
    their biases so low that they are never the answer. Where the means of the classes do not tell
    them apart, there are no detectors: the head alone is left, and features stay as they are.

    Args:
        rows: Means and covariances of the classes.
        head: The layer that makes the logits.
        forget: One set, bool ``(num_classes,)``, not all classes.

    Example:
        >>> eye, head = torch.eye(2), torch.nn.Linear(2, 2)
        >>> rows = FeatureRows(eye, torch.zeros(1, 1, 2), 0 * eye + 0.1, eye, torch.zeros(2, 3))
        >>> folded(rows, head, torch.tensor([True, False]))[0](eye[:1]).round(decimals=4).abs()
        tensor([[0., 1.]])
    """
    if bool(forget.all()):
        raise ValueError("a set of all classes leaves no class to move features to.")
    rest = nn.Linear(rows.width, rows.num_classes, bias=True).to(head.weight)
    rest.weight.copy_(torch.where(~forget.unsqueeze(-1), head.weight, 0))
    bias = torch.zeros_like(rest.bias) if head.bias is None else head.bias
    rest.bias.copy_(torch.where(forget, ERASED, bias))
    rest.requires_grad_(head.weight.requires_grad).train(head.training)
    detected = detectors(rows)
    if detected is None:
        return rest
    moves = _moves(rows.means, forget).double()
    edit = nn.Linear(rows.width, rows.width).to(head.weight).requires_grad_(False)
    edit.weight.copy_(torch.eye(rows.width).to(moves) + moves.T @ detected[0])
    edit.bias.copy_(-detected[1] @ moves)
    return nn.Sequential(edit, rest).train(head.training)


def detectors(rows: FeatureRows) -> tuple[Tensor, Tensor] | None:
    """For each class the weights and the offset of ``q_c``: 1 on its mean, 0 on all others.

    Of all such functions that of least variance within classes; float64, ``(num_classes, width)``
    and ``(num_classes,)``. ``None`` where the means of other classes explain that of a class, as
    with more classes than features, or the covariance is one of very few images.

    They lie in the span of ``within^-1`` times the differences of means. In coordinates where the
    covariance is 1 this is the shortest solution, which the pseudo-inverse of the centred means
    gives for all classes at once.
    """
    means = rows.means.double()
    centred = means - means.mean(0)
    if int(torch.linalg.matrix_rank(centred, rtol=1e-6)) < rows.num_classes - 1:
        return None
    root = torch.linalg.cholesky(_within(rows))
    white = torch.linalg.solve_triangular(root, centred.T, upper=False)  # (width, classes)
    dual = torch.linalg.pinv(white, rtol=1e-9)  # row c: 1 - 1/classes on c, -1/classes elsewhere
    weights = torch.linalg.solve_triangular(root.T, dual.T, upper=True).T
    inner = (weights @ means.T).fill_diagonal_(0)
    return weights, inner.sum(1) / (rows.num_classes - 1)


def _within(rows: FeatureRows) -> Tensor:
    """The covariance within classes, the mean of all of them, ``(width, width)``."""
    factors, rests = rows.factors.double(), rows.rests.double()
    within = torch.einsum("krw,krx->wx", factors, factors) / len(factors)
    within.diagonal().add_((rests**2).mean(0))
    within.diagonal().add_(SHRINKAGE * within.diagonal().mean().clamp_min(1e-12))
    return within


def _moves(means: Tensor, forget: Tensor) -> Tensor:
    """Where each forgotten class goes when it can only go to one place; 0 for all others."""
    nearest = torch.cdist(means, means).masked_fill(forget, math.inf).argmin(1)
    return (means[nearest] - means) * forget.unsqueeze(-1)
