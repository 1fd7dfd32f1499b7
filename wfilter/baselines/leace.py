"""LEACE: the smallest change of the features after which no linear probe sees the class."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wfilter.baselines.batches import Task
from wfilter.baselines.edits import edited
from wfilter.data.batches import Batches
from wfilter.metrics.features import collect_features


class Eraser(nn.Module):
    """x - R (x - mean), for a matrix R that takes the erased part.

    Example:
        >>> Eraser(torch.diag(torch.tensor([1.0, 0.0])), torch.ones(2))(torch.tensor([[3.0, 4.0]]))
        tensor([[1., 4.]])
    """

    taken: Tensor
    mean: Tensor

    def __init__(self, taken: Tensor, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("taken", taken)
        self.register_buffer("mean", mean)

    def forward(self, features: Tensor) -> Tensor:
        """Features (samples, width), erased."""
        return features - (features - self.mean) @ self.taken.T


def leace(
    model: nn.Module, forget: int | Sequence[int], train: Batches, *, mask: bool = True
) -> nn.Module:
    """A copy whose features have no covariance with "is of a forgotten class".

    Source: Belrose et al., arXiv 2306.03819. With W the whitening of the features and P the
    projection onto the column space of W Cov(x, z), x becomes x - W^+ P W (x - mean). z has a
    column for each forgotten class. Linear predictors of z then find nothing; a probe that tells
    all classes apart at once still may. The head stays as it was, so the logits are masked as well.

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes.
        mask: mask the forgotten classes' logits too.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> batch = (torch.randn(8, 2), torch.arange(2).repeat(4))
        >>> leace(model, 0, [batch])(torch.ones(1, 2)).isinf()
        tensor([[ True, False]])
    """
    task = Task.of(model, forget, train)
    features, labels = collect_features(model, task.train)
    task.check_seen(set(labels.tolist()))
    concept = (labels[:, None] == torch.tensor(task.classes)).double()
    return edited(model, task, Eraser(*taken(features, concept)), mask=mask)


def taken(features: Tensor, concept: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix W^+ P W, (width, width), and the mean (width,) of LEACE.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> taken(x, x[:, :1])[0]  # the first coordinate is the concept
        tensor([[1., 0.],
                [0., 0.]])
    """
    x, mean = features.double(), features.double().mean(0)
    centred = x - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(x))
    known = values > values.max() * 1e-10  # directions that the data have
    root = values.clamp(min=0).sqrt()
    whitening = vectors[:, known] / root[known] @ vectors[:, known].T
    unwhitening = vectors[:, known] * root[known] @ vectors[:, known].T
    shared = whitening @ centred.T @ (concept.double() - concept.double().mean(0)) / len(x)
    basis, sizes, _ = torch.linalg.svd(shared, full_matrices=False)
    basis = basis[:, sizes > sizes.max() * 1e-10]
    return (unwhitening @ basis @ basis.T @ whitening).to(features), mean.to(features)
