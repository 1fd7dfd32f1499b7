"""Membership inference: can an attacker tell that the forgotten images were trained on?

The first two attacks learn to tell retained training images (members) from test images
(non-members) by one number for each image, then judge the forgotten class's *training* images. The
third tells the forgotten class's training images from its test images. The bar is the retrained
model's number.
"""

from typing import Any

import torch
from torch import Tensor

from wfilter.data.checks import check_labels, check_logits
from wfilter.metrics.cells import Column
from wfilter.metrics.method import Method
from wfilter.metrics.problem import Problem
from wfilter.metrics.registry import Measured, by_class, metric


def confidence_attack(
    retain: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    forget: tuple[Tensor, Tensor],
    *,
    seed: int = 0,
) -> float:
    """Share of forgotten images judged *non*-members from the confidence in their label.

    Source: the confidence column of SalUn (arXiv 2310.12508, its "MIA"; after arXiv 2304.04934):
    an RBF support vector classifier with C = 3. Higher is better.

    Args:
        retain: logits and labels of retained training images; drawn down to the size of ``test``.
        test: logits and labels of images never trained on.
        forget: logits and labels of the forgotten class's training images.
        seed: of the draw.

    Example:
        >>> sure, unsure = torch.tensor([[9.0, 0.0]] * 4), torch.tensor([[0.1, 0.0]] * 4)
        >>> zeros = torch.zeros(4, dtype=torch.long)
        >>> confidence_attack((sure, zeros), (unsure, zeros), (unsure, zeros))
        1.0
    """
    from sklearn.svm import SVC

    members, others, asked = (_confidence(*pair) for pair in (retain, test, forget))
    attack = SVC(C=3, gamma="auto", kernel="rbf")  # type: ignore[no-untyped-call]
    return 1 - _attack(attack, _draw(members, len(others), seed), others, asked)


def entropy_attack(retain: Tensor, test: Tensor, forget: Tensor) -> float:
    """Share of forgotten images judged members from the entropy of their prediction.

    Source: the MIA of SSD (arXiv 2308.07707): class-balanced logistic regression. Lower is
    better, down to the retrained model's number.

    Args:
        retain: logits of retained training images (samples, classes).
        test: logits of images never trained on.
        forget: logits of the forgotten class's training images.

    Example:
        >>> sure, unsure = torch.tensor([[9.0, 0.0]] * 4), torch.tensor([[0.1, 0.0]] * 4)
        >>> entropy_attack(sure, unsure, forget=sure)
        1.0
    """
    from sklearn.linear_model import LogisticRegression

    members, others, asked = (_entropy(logits) for logits in (retain, test, forget))
    attack = LogisticRegression(class_weight="balanced")  # type: ignore[no-untyped-call]
    return _attack(attack, members, others, asked)


def likelihood_attack(
    members: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], *, seed: int = 0
) -> float:
    """AUC with which a likelihood ratio tells a class's training images from its test images.

    The offline test of Carlini et al., LiRA, arXiv 2112.03570, without shadow models: the two
    Gaussians are those of the class's own training and test images, fitted on one half of each and
    tried on the other. It is 0.5 where the model treats both
    alike, as a model that never saw the class does.

    Args:
        members: logits and labels of the class's training images.
        others: logits and labels of its test images.
        seed: of the halves.

    Example:
        >>> torch.manual_seed(0).initial_seed()
        0
        >>> sure, unsure = 9 + torch.randn(40, 1), torch.randn(40, 1)
        >>> pairs = [(torch.cat([x, 0 * x], 1), torch.zeros(40).long()) for x in (sure, unsure)]
        >>> likelihood_attack(*pairs) > 0.95
        True
    """
    from sklearn.metrics import roc_auc_score

    inside, outside = (_halves(_signs(*pair), seed) for pair in (members, others))
    if min(map(len, (*inside, *outside))) < 2:
        return 0.5  # too few images to fit Gaussians on: the attack can only guess
    scores, truth = [], []
    for fit, tried in ((0, 1), (1, 0)):
        for is_member, halves in enumerate((outside, inside)):
            ratio = _density(halves[tried], inside[fit]) - _density(halves[tried], outside[fit])
            scores.append(ratio)
            truth += [is_member] * len(ratio)
    return float(roc_auc_score(truth, torch.cat(scores).numpy()))


def _signs(logits: Tensor, labels: Tensor) -> Tensor:
    """What betrays an image, ``(samples, 2)``: log p / (1 - p) of its label, and the entropy.

    A masked class has p = 0 for all images; the entropy over the other classes may still tell.
    """
    odds = torch.logit(_confidence(logits.double(), labels), eps=1e-9)
    return torch.stack([odds, _entropy(logits.double())], 1).cpu()


def _halves(values: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    half = len(values) // 2
    return values[order[:half]], values[order[half:]]


def _density(values: Tensor, fitted: Tensor) -> Tensor:
    """Log density of ``values`` under Gaussians fitted to ``fitted``, up to a constant."""
    mean, std = fitted.mean(0), fitted.std(0).clamp_min(1e-3)
    return -(((values - mean) / std) ** 2 / 2 + std.log()).sum(1)


def _confidence(logits: Tensor, labels: Tensor) -> Tensor:
    probabilities = check_logits(logits, "logits").softmax(-1)
    labels = check_labels(labels, len(logits), logits.shape[1])
    return probabilities.gather(1, labels[:, None]).squeeze(1)


def _entropy(logits: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(check_logits(logits, "logits").softmax(-1)).sum(-1)
    return entropy


def _draw(values: Tensor, size: int, seed: int) -> Tensor:
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    return values[order[:size].to(values.device)]


def _attack(classifier: Any, members: Tensor, others: Tensor, asked: Tensor) -> float:
    """Share of ``asked`` that a classifier fitted on members and others judges members."""
    truth = [1] * len(members) + [0] * len(others)
    known = torch.cat([members, others])[:, None].detach().cpu().double().numpy()
    fitted = classifier.fit(known, truth)
    return float(fitted.predict(asked[:, None].detach().cpu().double().numpy()).mean())


def _columns(problem: Problem) -> list[Column]:
    """Columns of the three attacks."""
    group, fitted = "membership inference", "fitted on the retained classes"
    confidence = (
        "Share of the forgotten class's training images that an SVC on the confidence in their "
        f"label takes for unseen (SalUn); {fitted}."
    )
    entropy = f"Share that logistic regression on the entropy takes for seen (SSD); {fitted}."
    likelihood = (
        "AUC of a likelihood-ratio test that tells the forgotten class's training images from its "
        "test images by log p / (1 - p) of their label and by the entropy; two Gaussians, fitted "
        "on one half and tried on the other, no shadow models; 50 is chance."
    )
    return [
        Column("MIA confidence", group, "retrained", confidence, over="forget train"),
        Column("MIA entropy", group, "retrained", entropy, over="forget train"),
        Column("MIA likelihood", group, "retrained", likelihood),
    ]


@metric("membership", _columns, order=50, needs_train=True)
def measure_membership(method: Method, problem: Problem) -> Measured:
    """All attacks on the forgotten class's training images."""

    def number(row: int) -> dict[str, float | None]:
        train, test = problem.seen(method, row)
        forgotten, other = problem.train[1] == row, problem.test[1] != row
        retain = train.logits[~forgotten], problem.train[1][~forgotten]
        outside = test.logits[other], problem.test[1][other]
        asked = train.logits[forgotten], problem.train[1][forgotten]
        unseen = test.logits[~other], problem.test[1][~other]
        return {
            "MIA confidence": confidence_attack(retain, outside, asked, seed=problem.seed),
            "MIA entropy": entropy_attack(retain[0], outside[0], asked[0]),
            "MIA likelihood": likelihood_attack(asked, unseen, seed=problem.seed),
        }

    return by_class(method, number)
