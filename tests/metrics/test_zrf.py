"""Zero retrain forgetting against SciPy and the papers' code; fresh copies of models."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from torch import nn

import digits
from wfilter import metrics

# zrf


def test_js_divergence_equals_scipy():
    p, q = torch.randn(2, 50, 7, dtype=torch.float64).mul(3).softmax(-1)
    p[0, 0] = 0
    p[0] /= p[0].sum()
    expected = [jensenshannon(a, b) ** 2 for a, b in zip(p, q, strict=True)]
    assert metrics.js_divergence(p, q).tolist() == pytest.approx(expected)


def test_a_confident_model_against_a_uniform_one_has_the_papers_zrf():
    confident = torch.full((4, 10), -100.0).fill_diagonal_(100.0)
    value = metrics.zrf(confident, torch.zeros(4, 10))
    own, uniform = math.log(1 / 0.55), 0.1 * math.log(0.1 / 0.55) + 0.9 * math.log(0.1 / 0.05)
    assert value == pytest.approx(1 - (own + uniform) / 2)
    assert round(value, 3) == 0.474  # the paper prints 47 to 48 for its original models


def test_zrf_lies_between_one_minus_ln_two_and_one():
    apart = torch.tensor([[1e4, 0.0]])
    assert metrics.zrf(apart, apart.flip(1)) == pytest.approx(1 - math.log(2))
    assert metrics.zrf(apart, apart) == 1
    masked = torch.tensor([[-torch.inf, 0.0]])
    assert metrics.zrf(masked, torch.zeros(1, 2)) > 0.7


def test_several_references_are_averaged():
    logits, draws = torch.randn(6, 4), torch.randn(3, 6, 4)
    each = [metrics.zrf(logits, draw) for draw in draws]
    assert metrics.zrf(logits, draws) == pytest.approx(np.mean(each))


def test_the_bad_teaching_variant_is_what_its_code_computes():
    logits, reference = torch.randn(2, 6, 4, dtype=torch.float64)
    p, q = logits.softmax(1), reference.softmax(1)
    middle = (p + q) / 2
    terms = middle * (middle.log() - p.log()), middle * (middle.log() - q.log())
    expected = 1 - (0.5 * terms[0].mean() + 0.5 * terms[1].mean())
    ours = metrics.zrf(logits, reference, variant="bad-teaching")
    assert ours == pytest.approx(float(expected))
    assert ours > metrics.zrf(logits, reference)
    with pytest.raises(ValueError, match="variant='bits' is unknown"):
        metrics.zrf(logits, reference, variant="bits")


def test_a_model_with_everything_closed_has_zrf_near_one():
    model = digits.trained_cnn()
    _, (images, labels) = digits.data()
    shown = images[labels == 3]
    references = [metrics.fresh_copy(model, seed=seed) for seed in range(3)]
    against = metrics.reference_logits(references, shown)
    closed = copy.deepcopy(model)
    for parameter in closed.parameters():
        nn.init.zeros_(parameter)
    with torch.no_grad():
        assert metrics.zrf(closed(shown), torch.zeros(len(shown), 10)) == 1
        assert metrics.zrf(closed(shown), against) > 0.95
        assert 0.45 < metrics.zrf(model(shown), against) < 0.6


def test_zrf_refuses_other_shapes_and_nan():
    with pytest.raises(ValueError, match="Run both models on the same images"):
        metrics.zrf(torch.zeros(2, 3), torch.zeros(4, 3))
    with pytest.raises(ValueError, match="reference_logits contains NaN"):
        metrics.zrf(torch.zeros(2, 3), torch.full((2, 3), torch.nan))


# fresh copies


def test_a_fresh_copy_resets_every_parameter_and_running_statistic():
    model = digits.trained_cnn()
    before = copy.deepcopy(model.state_dict())
    fresh, again = metrics.fresh_copy(model), metrics.fresh_copy(model)
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert torch.equal(model.state_dict()[name], before[name])
        assert not torch.equal(tensor, before[name]), name
    assert torch.equal(fresh[1].running_mean, torch.zeros(16))


def test_a_parameter_that_nothing_resets_is_refused_by_name():
    class WithToken(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.head = nn.Parameter(torch.zeros(3)), nn.Linear(3, 2)

    with pytest.raises(ValueError, match=r"resets token \(1 tensors\). Pass factory="):
        metrics.fresh_copy(WithToken())
    assert torch.equal(metrics.fresh_copy(WithToken(), factory=WithToken).token, torch.zeros(3))
    with pytest.raises(ValueError, match="Make the same architecture"):
        metrics.fresh_copy(nn.Linear(3, 2), factory=lambda: nn.Linear(3, 4))


def test_fresh_copies_leave_the_random_state_alone():
    layer, state = nn.Linear(2, 2), torch.random.get_rng_state()
    metrics.fresh_copy(layer)
    assert torch.equal(state, torch.random.get_rng_state())
