import pytest
import torch

import digits
from digits import FORGET, train
from wfilter import baselines, metrics


def test_the_strongest_directions_of_the_forgotten_features_are_gone():
    model = digits.trained_cnn()
    changed = baselines.esc(model, FORGET, train(), percent=3)  # of 128: three directions
    images, labels = digits.data()[0]
    before = metrics.penultimate_features(model, images)
    after = metrics.penultimate_features(changed, images)
    basis = torch.linalg.svd(before[labels == FORGET], full_matrices=False)[2][:3]
    torch.testing.assert_close(after, before - before @ basis.T @ basis, atol=1e-4, rtol=1e-4)


def test_a_share_that_removes_nothing_or_everything_is_refused():
    for percent in (0, 100):
        with pytest.raises(ValueError, match="outside 0 < percent < 100"):
            baselines.esc(digits.trained_cnn(), FORGET, train(), percent=percent)
