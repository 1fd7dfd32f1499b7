"""An engine serves only after it answered as the eager model does."""

import pytest
import torch

from wfilter.data.backbones import InputFormat
from wfilter.serve import engine

FORMAT = InputFormat(size=2, channels=3)


def eager(images, sets):
    """Logits of a model with feature rows: forgotten ones far below all others."""
    logits = images.sum((2, 3))
    return torch.where(sets, logits.amin(1, keepdim=True) - 100, logits)


@pytest.mark.parametrize(
    "other",
    [
        lambda images, sets: eager(images, sets) + 0.05,
        lambda images, sets: eager(images, sets) * torch.nan,
        lambda images, sets: torch.where(sets, torch.nan, eager(images, sets)),
        lambda images, sets: eager(images, sets)[:, :2],
    ],
)
def test_an_engine_that_answers_otherwise_is_refused(other):
    engine._compare(eager, lambda images, sets: eager(images, sets) + 1e-5, 3, FORMAT, 4)
    with pytest.raises(ValueError, match="the engine answers differently"):
        engine._compare(eager, other, 3, FORMAT, 4)
