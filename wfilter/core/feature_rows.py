"""Rows on the features: what the head sees of a forgotten class is drawn anew from another class.

Gates make a network's answer forget; its features still tell the class to whoever puts another
head on them. A feature row mends that at the head's input, one row per class, chosen by the same
``forget`` as the gates. `wfilter.untraining.fitting` makes the rows in closed form, and
`wfilter.core.folding` folds one into a plain model.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from wfilter.core.gates import full_precision, readable
from wfilter.core.head import Head

# How far below all others a forgotten logit ends: its softmax is 0 in every dtype, without the
# infinity that turns differences and losses into NaN.
BELOW = 100.0


class FeatureRows(nn.Module):
    """Replaces the features of forgotten classes by draws from the remaining ones.

    A sample forgets the set ``S``. By the head itself, class ``k`` is the best of all for its
    features ``h`` and class ``j`` the best outside ``S``. Where ``k`` is in ``S``, nothing of ``h``
    is kept but ``j``; all other features stay as they are, bit for bit::

        h' = mean_j + factors_j' u + rest_j * v        with (u, v) = mixing' cos(phases h)

    That is a draw from a normal distribution with the mean and the covariance of class ``j``.
    Its noise is a fixed function of ``h``, so that an image has the same features in every batch,
    graph and process. The phases turn several times within a class and twice as many cosines are
    mixed as there are features, so that ``h`` cannot be solved for; `docs/threat-model.md` says
    what an attacker who knows the rows still finds.

    A draw from class ``j`` would be answered as surely as ``j``'s own images, which a model that
    never saw the class is not. So the logits of a draw are multiplied by ``sureness[j]``, at most
    1: the answer is the same, as unsure as the base model's without the forgotten logit.

    Attributes:
        means: Class means, ``(num_classes, width)``.
        factors: Largest parts of the covariance within each class, ``(num_classes, rank, width)``,
            or ``(1, rank, width)`` shared by all classes.
        rests: Standard deviations that factors leave over, ``(num_classes, width)``.
        phases: ``(waves, width)``.
        mixing: ``(waves, rank + width)``.
        sureness: What multiplies the logits of a draw from each class, ``(num_classes,)``.
        head: Name of the head's weight in the base model, such as ``"fc.weight"``.

    Example:
        >>> eye, no_spread = torch.eye(2), torch.zeros(2, 2)
        >>> rows = FeatureRows(eye, torch.zeros(1, 1, 2), no_spread, eye, torch.zeros(2, 3))
        >>> rows.edited(eye, torch.tensor([[True, False], [False, False]]), logits=eye)
        tensor([[0., 1.],
                [0., 1.]])
    """

    means: Tensor
    factors: Tensor
    rests: Tensor
    phases: Tensor
    mixing: Tensor
    sureness: Tensor

    def __init__(
        self,
        means: Tensor,
        factors: Tensor,
        rests: Tensor,
        phases: Tensor,
        mixing: Tensor,
        sureness: Tensor | None = None,
        *,
        head: str = "",
    ):
        super().__init__()
        self.head = head
        tensors = {"means": means, "factors": factors, "rests": rests}
        tensors |= {"phases": phases, "mixing": mixing}
        tensors["sureness"] = means.new_ones(means.shape[:1]) if sureness is None else sureness
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

    @property
    def rank(self) -> int:
        """How many factors a covariance has."""
        return self.factors.shape[1]

    def forward(
        self, features: Tensor, forget: Tensor, head: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The edited features, and their logits ``(batch, num_classes)``, the forgotten lowest.

        Args:
            features: What the head would see, ``(batch, width)``.
            forget: bool, ``(batch, num_classes)`` or one set ``(num_classes,)`` for all.
            head: From features to logits.

        Example:
            >>> eye, no_spread = torch.eye(2), torch.zeros(2, 2)
            >>> rows = FeatureRows(eye, torch.zeros(1, 1, 2), no_spread, eye, torch.zeros(2, 3))
            >>> _, logits = rows(eye, torch.tensor([True, False]), torch.nn.Identity())
            >>> logits.argmax(1)
            tensor([1, 1])
        """
        if features.ndim != 2:
            raise ValueError(
                f"the head sees features of shape {tuple(features.shape)}; feature rows take "
                "(batch, width). Use gates alone for such inputs (wf.feature_rows = None)."
            )
        is_forgotten, route = self.chosen(head(features), forget)
        edited = self.moved(features, is_forgotten, route)
        logits = head(edited)
        unsure = logits * self.sureness.to(logits)[route].unsqueeze(-1)
        logits = torch.where(is_forgotten, unsure, logits)
        return edited, torch.where(forget, logits.amin(-1, keepdim=True) - BELOW, logits)

    def head_of(self, base: nn.Module) -> Head:
        """The head of ``base`` that these rows were made for."""
        try:
            weight = base.get_parameter(self.head)
        except AttributeError:
            weight = None
        if weight is None or tuple(weight.shape) != (self.num_classes, self.width):
            has = "no such parameter" if weight is None else f"shape {tuple(weight.shape)}"
            raise ValueError(
                f"the feature rows belong to a head with the weight {self.head!r} of shape "
                f"{(self.num_classes, self.width)};\nthis {type(base).__name__} has {has}. Fit "
                "them on this model, or set wf.feature_rows = None."
            )
        return Head((self.head,), (), self.width, True)

    def edited(self, features: Tensor, forget: Tensor, logits: Tensor) -> Tensor:
        """The features after the edit; ``logits`` are the head's, of the features as they came."""
        return self.moved(features, *self.chosen(logits, forget))

    def chosen(self, logits: Tensor, forget: Tensor) -> tuple[Tensor, Tensor]:
        """Which samples are taken for a forgotten class, ``(batch, 1)``, and the next best one."""
        answer = logits.argmax(-1, keepdim=True)
        route = logits.masked_fill(forget, -math.inf).argmax(-1)
        return forget.expand_as(logits).gather(-1, answer), route

    def moved(self, features: Tensor, is_forgotten: Tensor, route: Tensor) -> Tensor:
        """The features, with those of forgotten classes drawn anew from the classes ``route``."""
        if readable(is_forgotten):  # most samples of a batch need no draw: none is made for them
            index = is_forgotten.squeeze(-1).nonzero().squeeze(-1)
            return features.index_put((index,), self.drawn(features[index], route[index]))
        return torch.where(is_forgotten, self.drawn(features, route), features)

    def drawn(self, features: Tensor, route: Tensor) -> Tensor:
        """Draws from the classes ``route``, by a noise that is a function of the features."""
        # Half precision has too few digits for a phase of several turns.
        h = features if features.dtype == torch.float64 else features.float()
        factors = self.factors.to(h)
        chosen = factors if len(factors) == 1 else factors[route]
        with full_precision(h):
            noise = (h @ self.phases.to(h).T).cos() @ self.mixing.to(h)
            u, v = noise[..., : self.rank], noise[..., self.rank :]
            spread: Tensor = (u.unsqueeze(-2) @ chosen).squeeze(-2) + self.rests.to(h)[route] * v
        return (self.means.to(h)[route] + spread).to(features.dtype)

    def extra_repr(self) -> str:
        """Shown when printed."""
        shared = ", shared by all classes" if len(self.factors) == 1 else ""
        return f"num_classes={self.num_classes}, width={self.width}, factors={self.rank}{shared}"


def _check(tensors: dict[str, Tensor]) -> None:
    """Refuse rows whose shapes do not fit together or whose numbers would spoil every sample."""
    means, factors, phases = tensors["means"], tensors["factors"], tensors["phases"]
    if means.ndim != 2 or len(means) < 2:
        raise ValueError(
            f"means has shape {tuple(means.shape)}; expected (num_classes, width) with two classes "
            "or more: features of a forgotten class need another one to go to."
        )
    classes, width = means.shape
    owners = 1 if len(factors) == 1 else classes
    rank = factors.shape[1] if factors.ndim == 3 else 0
    expected = {"factors": (owners, rank, width), "rests": (classes, width)}
    expected |= {"phases": (len(phases), width), "mixing": (len(phases), rank + width)}
    expected["sureness"] = (classes,)
    for name, tensor in tensors.items():
        wanted = expected.get(name, (classes, width))
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {wanted}.")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} contains NaN or infinity.")
    if not bool((tensors["rests"] >= 0).all()):
        raise ValueError("rests must not be negative: they are standard deviations.")
    if not bool((tensors["sureness"] > 0).all()):
        raise ValueError("sureness must be positive: it multiplies logits, whose order must stay.")
