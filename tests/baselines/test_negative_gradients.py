import pytest

import digits
from digits import FORGET, accuracies, train
from wfilter import baselines


def test_negative_gradients_with_retain_weight_keep_more():
    plain, balanced = (
        baselines.negative_gradients(
            digits.trained_cnn(), FORGET, train(), retain_weight=weight, epochs=20
        )
        for weight in (0.0, 0.5)
    )
    assert accuracies(balanced)[0] > accuracies(plain)[0]
    assert accuracies(balanced)[1] < 0.1
    with pytest.raises(ValueError, match="retain_weight=1 is outside"):
        baselines.negative_gradients(digits.trained_cnn(), FORGET, train(), retain_weight=1)
