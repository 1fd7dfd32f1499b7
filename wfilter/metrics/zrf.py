"""Zero retrain forgetting: how close the outputs are to those of a model that knows nothing."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from wfilter.data.checks import check_logits
from wfilter.metrics.cells import Column
from wfilter.metrics.method import Method
from wfilter.metrics.problem import Problem
from wfilter.metrics.registry import Measured, by_class, metric

FLOOR = 1 - math.log(2)
"""The lowest possible ZRF with true JS: that of two distributions with no class in common."""


def js_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of each row of p and q in nats, (..., classes) -> (...).

    Between 0 and ln 2; the square of `scipy.spatial.distance.jensenshannon`.

    Example:
        >>> js_divergence(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
        tensor([0.6931])
    """
    middle = (p + q) / 2
    own = torch.special.xlogy(p, p) + torch.special.xlogy(q, q)
    divergence: Tensor = (own / 2 - torch.special.xlogy(middle, middle)).sum(-1)
    return divergence


def zrf(
    logits: Tensor,
    reference_logits: Tensor,
    *,
    variant: Literal["js", "bad-teaching"] = "js",
) -> float:
    """ZRF = 1 - mean_i JS(M(x_i), M*(x_i)) over the forget class's samples under its row.

    Higher means closer to a freshly initialised model. The range of ``"js"`` is [1 - ln 2, 1].

    Args:
        logits: of the model after forgetting, (samples, classes).
        reference_logits: of M*, (samples, classes), or several draws (draws, samples, classes),
            over which the result is averaged.
        variant: ``"js"``: true JS, natural logarithm, summed over classes, the reading that fits
            the paper's numbers. ``"bad-teaching"``: as the code of Chundawat et al.
            (arXiv 2205.08096) computes it, with the arguments of KL swapped, KL(m || p), and a
            mean over samples *and* classes; it is near 1 for many classes whatever the model, and
            minus infinity for a masked logit.

    Example:
        >>> confident = torch.tensor([[50.0, 0.0], [0.0, 50.0]])
        >>> round(zrf(confident, torch.zeros(2, 2)), 4)
        0.7842
        >>> zrf(torch.zeros(2, 2), torch.zeros(3, 2, 2))
        1.0
    """
    check_logits(logits, "logits")
    draws = reference_logits if reference_logits.ndim == 3 else reference_logits[None]
    for draw in draws:
        check_logits(draw, "reference_logits")
    if draws.shape[1:] != logits.shape or not len(draws):
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}\nand reference_logits "
            f"{tuple(reference_logits.shape)}. Run both models on the same images."
        )
    p, q = (x.double().log_softmax(-1) for x in (logits.expand_as(draws), draws))
    if variant == "js":
        return float(1 - js_divergence(p.exp(), q.exp()).mean())
    if variant == "bad-teaching":
        return float(1 - _swapped_divergence(p, q).mean())
    raise ValueError(f"variant={variant!r} is unknown; expected 'js' or 'bad-teaching'.")


def _swapped_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Elementwise 0.5 * (m log(m/p) + m log(m/q)), not summed over classes."""
    middle = (log_p.exp() + log_q.exp()) / 2
    terms = torch.special.xlogy(middle, middle) - middle * (log_p + log_q) / 2
    return torch.where(middle > 0, terms, torch.zeros_like(terms))


@torch.no_grad()
def reference_logits(references: list[nn.Module], images: Tensor) -> Tensor:
    """Logits of each reference model in eval mode, (draws, samples, classes).

    `wfilter.metrics.fresh_copy` makes the references; three to five draws are enough.

    Example:
        >>> from wfilter.metrics import fresh_copy
        >>> references = [fresh_copy(nn.Linear(4, 3), seed=seed) for seed in range(5)]
        >>> reference_logits(references, torch.zeros(2, 4)).shape
        torch.Size([5, 2, 3])
    """
    return torch.stack([reference.eval()(images) for reference in references])


def _columns(problem: Problem) -> list[Column]:
    text = (
        "1 - mean JS divergence (nats) between the outputs on the forgotten class's images and "
        f"those of a random network, {problem.budget.zrf_draws} draws; from 30.7 to 100."
    )
    return [Column("ZRF", "likeness to a random network", "higher", text)]


@metric("zrf", _columns, order=30)
def measure_zrf(method: Method, problem: Problem) -> Measured:
    """ZRF on the test sample of each class while it is forgotten."""
    images, labels = problem.own_test
    kept = torch.isin(labels, torch.tensor(method.classes))
    images, labels, references = images[kept], labels[kept], problem.reference_logits[:, kept]
    logits = method.own_logits(images, labels)

    def number(row: int) -> dict[str, float | None]:
        own = labels == row
        return {"ZRF": zrf(logits[own], references[:, own])}

    return by_class(method, number)
