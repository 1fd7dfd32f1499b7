"""Rows on the features: what the head sees of a forgotten class is moved onto other classes.

Gates make a network's answer forget; its features still tell the class to whoever puts another
head on them. A feature row mends that at the head's input, one row per class, chosen by the same
``forget`` as the gates. `wfilter.untraining.fitting` makes the rows in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wfilter.core.head import Head

# How far below all others a forgotten logit ends: its softmax is 0 in every dtype, without the
# infinity that turns differences and losses into NaN.
BELOW = 100.0
# The bias that stands for a forgotten class in a folded head, whose weights are 0.
ERASED = -1e4


class FeatureRows(nn.Module):
    """Moves features of forgotten classes onto those of the remaining ones.

    A sample forgets the set ``S``. By the head itself, class ``k`` is the best of all for its
    features ``h`` and class ``j`` the best outside ``S``. First what the head would answer::

        h1 = mean_j + spread_j / spread_k * (h - origin_kj)      (h itself where k is outside S)

    and then what is left of forgotten classes in other images::

        h2 = h1 + sum over c in S of q_c(h1) * (mean_j - origin_cj)

    ``origin_cj`` is the mean of those images of class ``c`` whose next best class is ``j``, and
    ``q_c(h) = detectors[c] . h - offsets[c]`` is about 1 on class ``c`` and 0 on all others: no
    linear function of the features along ``detectors[c]`` tells the class any more. A sample that
    forgets nothing keeps its features bit for bit.

    Attributes:
        means: Class means, ``(num_classes, width)``.
        spreads: Standard deviations within each class, positive, ``(num_classes, width)``.
        shifts: ``origin_cj - mean_c``, ``(num_classes, num_classes, width)``, or ``None``: then
            ``origin_cj`` is ``mean_c``. Left out for very many classes.
        detectors: ``(num_classes, width)``, or ``None``: then only answers are moved.
        offsets: ``(num_classes,)``, with the detectors.
        head: Name of the head's weight in the base model, such as ``"fc.weight"``.

    Example:
        >>> eye = torch.eye(2)
        >>> rows = FeatureRows(eye, torch.ones(2, 2))
        >>> rows.edited(eye, torch.tensor([[True, False], [False, False]]), logits=eye)
        tensor([[0., 1.],
                [0., 1.]])
    """

    means: Tensor
    spreads: Tensor
    shifts: Tensor | None
    detectors: Tensor | None
    offsets: Tensor | None

    def __init__(
        self,
        means: Tensor,
        spreads: Tensor,
        shifts: Tensor | None = None,
        detectors: Tensor | None = None,
        offsets: Tensor | None = None,
        *,
        head: str = "",
    ):
        super().__init__()
        self.head = head
        tensors = {
            "means": means,
            "spreads": spreads,
            "shifts": shifts,
            "detectors": detectors,
            "offsets": offsets,
        }
        _check(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @property
    def num_classes(self) -> int:
        """How many rows there are."""
        return self.means.shape[0]

    @property
    def width(self) -> int:
        """How many features the head sees."""
        return self.means.shape[1]

    def forward(
        self, features: Tensor, forget: Tensor, head: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The edited features, and their logits ``(batch, num_classes)``, the forgotten lowest.

        Args:
            features: What the head would see, ``(batch, width)``.
            forget: bool, ``(batch, num_classes)`` or one set ``(num_classes,)`` for all.
            head: From features to logits.

        Example:
            >>> eye = torch.eye(2)
            >>> rows = FeatureRows(eye, torch.ones(2, 2))
            >>> _, logits = rows(eye, torch.tensor([True, False]), torch.nn.Identity())
            >>> logits.argmax(1)
            tensor([1, 1])
        """
        if features.ndim != 2:
            raise ValueError(
                f"the head sees features of shape {tuple(features.shape)}; feature rows take "
                "(batch, width). Use gates alone for such inputs (wf.feature_rows = None)."
            )
        edited = self.edited(features, forget, head(features))
        logits = head(edited)
        return edited, torch.where(forget, logits.amin(-1, keepdim=True) - BELOW, logits)

    def head_of(self, base: nn.Module) -> Head:
        """The head of ``base`` that these rows were made for."""
        weight = dict(base.named_parameters()).get(self.head)
        if weight is None or tuple(weight.shape) != (self.num_classes, self.width):
            found = "no such parameter" if weight is None else f"shape {tuple(weight.shape)}"
            raise ValueError(
                f"the feature rows belong to a head with the weight {self.head!r} of shape "
                f"{(self.num_classes, self.width)};\nthis {type(base).__name__} has {found}. Fit "
                "them on this model, or set wf.feature_rows = None."
            )
        return Head((self.head,), (), self.width, True)

    def edited(self, features: Tensor, forget: Tensor, logits: Tensor) -> Tensor:
        """The features after the edit; ``logits`` are the head's, of the features as they came."""
        answer = logits.argmax(-1)
        route = logits.masked_fill(forget, -math.inf).argmax(-1)
        means, spreads = self.means.to(features), self.spreads.to(features)
        origin = means[answer]
        if self.shifts is not None:
            origin = origin + self.shifts.to(features)[answer, route]
        # Both terms are exactly 0 where the answer is not forgotten: it is its own route.
        move, stretch = means[route] - origin, spreads[route] / spreads[answer] - 1
        features = features + move + stretch * (features - origin)
        if self.detectors is None or self.offsets is None:
            return features
        found = F.linear(features, self.detectors.to(features)) - self.offsets.to(features)
        return features + self._moved(found * forget, route)

    def _moved(self, amounts: Tensor, route: Tensor) -> Tensor:
        """The sum over classes of ``amounts * (mean_route - origin)``, ``(batch, width)``."""
        means = self.means.to(amounts)
        moved = amounts.sum(-1, keepdim=True) * means[route] - amounts @ means
        if self.shifts is None:
            return moved
        routes = F.one_hot(route, self.num_classes).to(amounts)
        by_pair = (amounts.unsqueeze(-1) * routes.unsqueeze(-2)).flatten(-2)
        return moved - by_pair @ self.shifts.to(amounts).flatten(0, 1)

    def folded(self, head: nn.Linear, forget: Tensor) -> nn.Sequential | nn.Linear:
        """A linear edit and the head without its forgotten rows, as two plain layers.

        A linear layer cannot choose by the image: each class of the set is moved to one place, its
        nearest class outside, and keeps its own spread. The head's weights of the forgotten classes
        are 0 and their biases so low that they are never the answer. Without detectors there is
        nothing linear to move by: the head alone is left, and features stay as they are.

        Args:
            head: The layer that makes the logits.
            forget: One set, bool ``(num_classes,)``, not all classes.

        Example:
            >>> eye, head = torch.eye(2), torch.nn.Linear(2, 2)
            >>> rows = FeatureRows(eye, torch.ones(2, 2), None, eye, torch.zeros(2))
            >>> rows.folded(head, torch.tensor([True, False]))[0](eye[:1])
            tensor([[0., 1.]])
        """
        if bool(forget.all()):
            raise ValueError("a set of all classes leaves no class to move features to.")
        rest = nn.Linear(self.width, self.num_classes, bias=True).to(head.weight)
        with torch.no_grad():
            rest.weight.copy_(torch.where(~forget.unsqueeze(-1), head.weight, 0))
            bias = torch.zeros_like(rest.bias) if head.bias is None else head.bias
            rest.bias.copy_(torch.where(forget, ERASED, bias))
        rest.requires_grad_(head.weight.requires_grad).train(head.training)
        if self.detectors is None or self.offsets is None:
            return rest
        edit = nn.Linear(self.width, self.width).to(head.weight).requires_grad_(False)
        with torch.no_grad():
            moves = self._moves(forget)
            edit.weight.copy_(torch.eye(self.width).to(moves) + moves.T @ self.detectors)
            edit.bias.copy_(-self.offsets @ moves)
        return nn.Sequential(edit, rest).train(head.training)

    def _moves(self, forget: Tensor) -> Tensor:
        """Where each forgotten class goes when it can only go to one place; 0 for all others."""
        distances = torch.cdist(self.means, self.means).masked_fill(forget, math.inf)
        nearest = distances.argmin(1)
        moves = self.means[nearest] - self.means
        if self.shifts is not None:
            moves = (
                moves - self.shifts[torch.arange(self.num_classes, device=nearest.device), nearest]
            )
        return moves * forget.unsqueeze(-1)

    def extra_repr(self) -> str:
        """Shown when printed."""
        extras = {"pair shifts": self.shifts, "detectors": self.detectors}
        kept = "".join(f", {name}" for name, tensor in extras.items() if tensor is not None)
        return f"num_classes={self.num_classes}, width={self.width}{kept}"


def fold_head(model: nn.Module, rows: FeatureRows, forget: Tensor) -> nn.Module:
    """In place: the head of a plain model becomes two linear layers, see ``FeatureRows.folded``."""
    path, _, _ = rows.head_of(model).weights[0].rpartition(".")  # type: ignore[union-attr]
    head = model.get_submodule(path)
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{path} is a {type(head).__name__}; only an nn.Linear can be folded.")
    layers = rows.folded(head, forget)
    if not path:
        return layers
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layers)
    return model


def _check(tensors: dict[str, Tensor | None]) -> None:
    """Refuse rows whose shapes do not fit together or whose numbers would spoil every sample."""
    means, spreads = tensors["means"], tensors["spreads"]
    assert means is not None
    assert spreads is not None
    if means.ndim != 2 or len(means) < 2:
        raise ValueError(
            f"means has shape {tuple(means.shape)}; expected (num_classes, width) with two classes "
            "or more: features of a forgotten class need another one to go to."
        )
    if (tensors["detectors"] is None) != (tensors["offsets"] is None):
        raise ValueError("detectors and offsets go together: pass both or neither.")
    classes, width = means.shape
    expected = {"offsets": (classes,), "shifts": (classes, classes, width)}
    for name, tensor in tensors.items():
        wanted = expected.get(name, (classes, width))
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {wanted}.")
        if tensor is not None and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} contains NaN or infinity.")
    if not bool((spreads > 0).all()):
        raise ValueError("spreads must be positive: features are divided by them.")
