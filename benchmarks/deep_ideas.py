"""The ideas that ``deep.py`` tries: terms on the features, each a function of one step.

A term gets the features under gates ``f`` (one line per pair), the base model's features ``h`` and
logits (one line per image), the image of each pair and what it forgets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from wfilter.untraining import losses


def _parts(base_logits: Tensor, sample: Tensor, forget: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which pairs forget themselves, which samples are kept by each, and how alike they are."""
    gone = losses.forgotten(forget, base_logits.shape[1])
    answer = base_logits.argmax(1)
    keep = ~gone[:, answer]
    rest = base_logits[sample].masked_fill(gone, -torch.inf).softmax(1)
    weight = (rest @ base_logits.softmax(1).T + 1e-6) * keep
    return gone.gather(1, answer[sample, None])[:, 0], keep, weight / weight.sum(1, keepdim=True)


def _spread(h: Tensor) -> Tensor:
    return (h - h.mean(0)).square().sum(1).mean()


def alike(f: Tensor, h: Tensor, logits: Tensor, sample: Tensor, forget: Tensor) -> Tensor:
    """Towards look-alikes of other classes; retained pairs towards their own base features."""
    own, _, weight = _parts(logits, sample, forget)
    target = torch.where(own[:, None], weight @ h, h[sample])
    return (f - target).square().sum(1).mean() / _spread(h)


def alike_free(f: Tensor, h: Tensor, logits: Tensor, sample: Tensor, forget: Tensor) -> Tensor:
    """Towards look-alikes of other classes; retained pairs are left free."""
    own, _, weight = _parts(logits, sample, forget)
    return (f - weight @ h).square().sum(1)[own].mean() / _spread(h)


def mean(f: Tensor, h: Tensor, logits: Tensor, sample: Tensor, forget: Tensor) -> Tensor:
    """Towards the mean of all other classes."""
    own, keep, _ = _parts(logits, sample, forget)
    centre = keep.to(h) @ h / keep.sum(1, keepdim=True)
    return (f - centre).square().sum(1)[own].mean() / _spread(h)


def nearest(f: Tensor, h: Tensor, logits: Tensor, sample: Tensor, forget: Tensor) -> Tensor:
    """Towards the nearest base features of a sample of another class."""
    own, keep, _ = _parts(logits, sample, forget)
    distance = (f[:, None] - h).square().sum(2).masked_fill(~keep, torch.inf)
    return distance.amin(1)[own].mean() / _spread(h)


def mmd(f: Tensor, h: Tensor, logits: Tensor, sample: Tensor, forget: Tensor) -> Tensor:
    """Maximum mean discrepancy of each class's forgotten pairs to the retained ones of others."""
    own, _, _ = _parts(logits, sample, forget)
    label = logits.argmax(1)[sample]
    ours, others = f[own], f[~own]
    same = (label[own][:, None] == label[own]).to(f)
    other = (label[own][:, None] != label[~own]).to(f)
    near = (_kernel(ours, ours, h) * same).sum(1) / same.sum(1)
    far = (_kernel(ours, others, h) * other).sum(1) / other.sum(1)
    return (near - 2 * far).mean()


def _kernel(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    distance = (x[:, None] - y).square().sum(2) / _spread(h)
    return sum((torch.exp(-width * distance) for width in (0.25, 1.0, 4.0)), torch.zeros(()))


def fisher(f: Tensor, h: Tensor, logits: Tensor, sample: Tensor, forget: Tensor) -> Tensor:
    """Towards the means of look-alike classes, in units of the scatter within classes."""
    own, _, _ = _parts(logits, sample, forget)
    answer, retained = logits.argmax(1)[sample], f[~own]
    member = F.one_hot(answer[~own], logits.shape[1]).to(f)
    means = member.T @ retained / member.sum(0).clamp(min=1)[:, None]
    rest = retained - means[answer[~own]]
    scatter = (rest.T @ rest / len(rest)).detach()
    ridged = scatter + (0.05 * scatter.diagonal().mean() + 1e-6) * torch.eye(len(scatter))
    factor = torch.linalg.cholesky(ridged)
    x, m = (torch.linalg.solve_triangular(factor, y.T, upper=False).T for y in (f[own], means))
    gone = losses.forgotten(forget, logits.shape[1]) | (member.sum(0) == 0)
    weight = logits[sample].masked_fill(gone, -torch.inf).softmax(1)[own]
    return ((x[:, None] - m).square().sum(2) * weight).sum(1).mean() / f.shape[1]


def ridge(f: Tensor, h: Tensor, logits: Tensor, sample: Tensor, forget: Tensor) -> Tensor:
    """Explained variance of a ridge regression, one row per step: the class against the rest."""
    own, _, _ = _parts(logits, sample, forget)
    return losses.ridge_probe(f, own, (~own).to(f))


class Adversary:
    """A linear probe for each row, trained along; forgotten pairs are to fool it."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None

    def __call__(
        self, f: Tensor, h: Tensor, logits: Tensor, sample: Tensor, forget: Tensor
    ) -> Tensor:
        own, _, _ = _parts(logits, sample, forget)
        classes, answer = logits.shape[1], logits.argmax(1)[sample]
        gone = losses.forgotten(forget, classes)
        row = torch.where(own, answer, gone.float().multinomial(1)[:, 0])  # of a set, one class
        if self.weight is None:
            self.weight = torch.zeros(classes, h.shape[1] + 1, classes, requires_grad=True)
            self.optimiser = torch.optim.Adam([self.weight], 0.03)
        z = F.pad((f - h.mean(0)) / (h.std(0) + 1e-3), (0, 1), value=1.0)
        for _ in range(3):
            guess = torch.einsum("pw,pwc->pc", z.detach(), self.weight[row])
            loss = F.cross_entropy(guess, answer) + 1e-4 * self.weight.square().sum()
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
        guess = torch.einsum("pw,pwc->pc", z, self.weight.detach()[row])
        target = logits[sample].masked_fill(gone, -torch.inf).softmax(1)
        return F.cross_entropy(guess[own], target[own])


Term = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
IDEAS: dict[str, tuple[str, Callable[[], Term] | None]] = {
    "none": ("no term: only the logits are untrained", None),
    "alike": (
        "to look-alikes of other classes; retained ones to their base features",
        lambda: alike,
    ),
    "alike-free": ("to look-alikes of other classes; retained ones left free", lambda: alike_free),
    "mean": ("to the mean of the other classes", lambda: mean),
    "nearest": ("to the nearest sample of another class", lambda: nearest),
    "mmd": ("small discrepancy (MMD) between forgotten and retained features", lambda: mmd),
    "fisher": (
        "to the means of look-alike classes, in units of the scatter within",
        lambda: fisher,
    ),
    "adversary": ("fool a linear probe for each row that is trained along", Adversary),
    "closed": ("no term, but closed gates are rewarded (`lambda_alpha` -5)", None),
    "rows": ("no term; each step has one row, for 256 images, instead of mixed pairs", None),
    "rows-ridge": (
        "as `rows`; small explained variance of a ridge probe on the batch",
        lambda: ridge,
    ),
    "rows-alike": ("the same, the rest weighted by how alike it is: `lambda_deep`", None),
}
