"""ESC: project the forgotten images' strongest directions out of the features."""

from collections.abc import Sequence

import torch
from torch import nn

from wfilter.baselines.batches import Task
from wfilter.baselines.edits import edited, linear_head
from wfilter.baselines.projection import Projection
from wfilter.data.batches import Batches
from wfilter.metrics.features import collect_features


def esc(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    percent: float = 1.5,
) -> nn.Module:
    """A copy whose features lack the first singular vectors of the forget half's features.

    Source: Lee et al., arXiv 2504.02199, without the trained variant ESC-T. Their features are not
    centred, and ``percent`` of the width (rounded down, here at least one) is removed.

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes; only the forget half is used.
        percent: of the features' dimensions to remove.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> batch = (torch.eye(2), torch.arange(2))
        >>> esc(model, 0, [batch])(torch.eye(2))[0].abs().max() < 1e-6
        tensor(True)
    """
    if not 0 < percent < 100:
        raise ValueError(f"percent={percent} is outside 0 < percent < 100.")
    task = Task.of(model, forget, train)
    width = linear_head(model, task).in_features
    features, _ = collect_features(model, list(task.forget()))
    _, _, directions = torch.linalg.svd(features.double(), full_matrices=False)
    removed = directions[: max(1, int(width * percent / 100))]
    return edited(model, task, Projection(removed), mask=False)
