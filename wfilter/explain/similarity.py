"""Which classes are alike: by the gates they close, by confusion, by the head's vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wfilter import metrics
from wfilter.core.gates import slices
from wfilter.core.model import FilteredModel
from wfilter.metrics.layers import all_gates, find_layer, refuse_open_gates


def similarity(wf: FilteredModel, layer: str | None = None) -> Tensor:
    """How much two classes close the same gates, ``(num_classes, num_classes)`` in 0..1.

    The overlap of closedness (1 - gate): sum of minima over sum of maxima, which for exact gates is
    the Jaccard index of the closed sets. 0 between classes that close nothing.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="weight")
        >>> _ = wf.alphas.data.copy_(torch.tensor([[-1., -1, 1], [-1, 1, -1], [1, 1, 1]]) * 1000)
        >>> similarity(wf)[0]
        tensor([1.0000, 0.3333, 0.0000], dtype=torch.float64)
    """
    refuse_open_gates(wf)
    closed = 1 - all_gates(wf).double()
    if layer is not None:
        closed = closed[:, slices(wf.targets)[find_layer(wf, layer)]]
    return torch.stack(
        [
            torch.minimum(row, closed).sum(1) / torch.maximum(row, closed).sum(1).clamp_min(1e-12)
            for row in closed
        ]
    )


def class_order(similarity: Tensor) -> list[int]:
    """Classes ordered so that similar ones lie together: leaves of an average-linkage tree.

    Example:
        >>> class_order(torch.tensor([[1.0, 0.1, 0.9], [0.1, 1.0, 0.2], [0.9, 0.2, 1.0]]))
        [1, 2, 0]
    """
    from scipy.cluster.hierarchy import leaves_list

    if len(similarity) < 3:
        return list(range(len(similarity)))
    return [int(leaf) for leaf in leaves_list(_tree(similarity))]


def clusters(similarity: Tensor, count: int) -> list[int]:
    """The cluster of each class, 0 to at most ``count`` - 1, from the tree of `class_order`.

    Example:
        >>> clusters(torch.tensor([[1.0, 0.1, 0.9], [0.1, 1.0, 0.2], [0.9, 0.2, 1.0]]), 2)
        [0, 1, 0]
    """
    from scipy.cluster.hierarchy import fcluster

    if len(similarity) < 3:
        return list(range(len(similarity)))
    return [int(label) - 1 for label in fcluster(_tree(similarity), count, "maxclust")]


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's rank correlation of two symmetric class-by-class matrices, above the diagonal.

    Not a number (``nan``) where one of them is constant.

    Example:
        >>> a = torch.tensor([[0.0, 1, 2], [1, 0, 3], [2, 3, 0]])
        >>> rank_correlation(a, a.exp()), rank_correlation(a, -a)
        (1.0, -1.0)
    """
    if one.shape != other.shape or len(one) < 3:
        raise ValueError(
            f"the matrices have shapes {tuple(one.shape)}\nand {tuple(other.shape)}; expected the "
            "same square matrix of 3 or more classes."
        )
    from scipy.stats import rankdata

    above = torch.ones_like(one, dtype=torch.bool).triu(1).cpu()
    ranks = [torch.from_numpy(rankdata(m.double().cpu()[above].numpy())) for m in (one, other)]
    return round(float(torch.corrcoef(torch.stack(ranks))[0, 1]), 12)


def confusion_similarity(confusion: Tensor) -> Tensor:
    """How often two classes are taken for each other: mean of the two shares, diagonal 1.

    Args:
        confusion: Counts or summed probabilities ``(num_classes, num_classes)``, as
            `metrics.confusion` gives them; rows are labels.

    Example:
        >>> confusion_similarity(torch.tensor([[8, 2], [0, 10]]))
        tensor([[1.0000, 0.1000],
                [0.1000, 1.0000]], dtype=torch.float64)
    """
    shares = confusion.double() / confusion.sum(1, keepdim=True).clamp_min(1)
    return ((shares + shares.T) / 2).fill_diagonal_(1)


def head_similarity(model: nn.Module) -> Tensor:
    """Cosine similarity of the head's vectors, one per class.

    Example:
        >>> head_similarity(nn.Linear(4, 3)).shape
        torch.Size([3, 3])
    """
    weight = metrics.find_head(model).weight
    assert isinstance(weight, Tensor)
    vectors = nn.functional.normalize(weight.detach().double().flatten(1))
    return (vectors @ vectors.T).cpu()


def _tree(similarity: Tensor) -> Any:
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    distance = (1 - similarity.double().cpu()).clamp_min(0)
    distance = ((distance + distance.T) / 2).fill_diagonal_(0)
    return linkage(squareform(distance.numpy(), checks=False), "average", optimal_ordering=True)
