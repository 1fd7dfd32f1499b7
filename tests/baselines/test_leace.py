import pytest
import torch

import digits
from digits import FORGET, train
from wfilter import baselines, metrics
from wfilter.baselines.leace import taken


def features(model):
    images, labels = digits.data()[0]
    return metrics.penultimate_features(model, images).double(), labels


@pytest.mark.parametrize("forget", [[FORGET], [3, 5]])
def test_features_have_no_covariance_with_the_class_afterwards(forget):
    model = digits.trained_cnn()
    (before, labels), (after, _) = (
        features(m) for m in (model, baselines.leace(model, forget, train()))
    )
    concept = (labels[:, None] == torch.tensor(forget)).double()
    concept -= concept.mean(0)
    size = (before - before.mean(0)).T.matmul(concept).abs().max()
    assert (after - after.mean(0)).T.matmul(concept).abs().max() < 1e-4 * size
    torch.testing.assert_close(after.mean(0), before.mean(0), atol=1e-4, rtol=1e-4)
    assert torch.linalg.matrix_rank((after - before), atol=1e-2) == len(forget)


def test_no_eraser_of_the_covariance_changes_the_features_less():
    torch.manual_seed(0)
    x = torch.randn(200, 4).double() @ torch.randn(4, 4).double()
    z = (x[:, :1] + x[:, 1:2] > 0).double()
    matrix, mean = taken(x, z)
    change = (x - mean) @ matrix.T
    covariance = (x - mean).T @ (z - z.mean(0))
    orthogonal = covariance @ covariance.T / covariance.square().sum()
    other = (x - mean) @ orthogonal.T  # erases as well, by an orthogonal projection
    torch.testing.assert_close((x - other).T @ (z - z.mean(0)), torch.zeros(4, 1).double())
    assert change.square().sum() < other.square().sum()
    torch.testing.assert_close(matrix @ matrix, matrix)  # a projection


def test_directions_that_the_data_lack_are_left_alone():
    x = torch.randn(50, 3).double()
    x[:, 2] = 0
    matrix, _ = taken(x, (x[:, :1] > 0).double())
    assert matrix.isfinite().all()
    torch.testing.assert_close(matrix[2], torch.zeros(3).double())
