import numpy as np
import pytest
import scipy.linalg
import torch

import digits
from digits import FORGET, accuracies, train
from wfilter import baselines, metrics
from wfilter.baselines.cse import salience


def by_hand(target, background):
    joint = torch.cat([target, background])
    mean, std = joint.mean(0), (joint.var(0, unbiased=False) + 1e-6).sqrt()
    s, b = (((x - mean) / std).T @ ((x - mean) / std) / len(x) for x in (target, background))
    b += 0.01 * b.trace() / len(b) * torch.eye(len(b)).double()
    ratios, vectors = scipy.linalg.eigh(s.numpy(), b.numpy())
    scores = 0
    for r, v in list(zip(ratios, vectors.T))[::-1][: int(0.3 * len(b))]:
        scores = scores + r * torch.from_numpy(v / np.linalg.norm(v)) ** 2
    return scores


def test_scores_are_those_of_the_generalised_eigenvectors():
    torch.manual_seed(0)
    target = torch.randn(60, 10).double() * torch.linspace(1, 3, 10) + 1
    background = torch.randn(300, 10).double()
    torch.testing.assert_close(salience(target, background), by_hand(target, background))


def test_gates_follow_the_papers_formula_and_move_channels_to_the_mean():
    model = digits.trained_cnn()
    images, labels = digits.data()[0]
    changed = baselines.cse(model, FORGET, train())
    before = metrics.penultimate_features(model, images).detach().double()
    scores = by_hand(before[labels == FORGET], before[labels != FORGET])
    ranked, total, gates = scores.sort(descending=True), 0, torch.ones(128)
    for score, channel in zip(*ranked):
        gates[channel] = 1 - min(max((score - 0.1) / (score + 0.5), 0), 1)
        total += score
        if total >= 0.85 * scores.sum():
            break
    assert 0 < (gates < 1).sum() < 128
    expected = gates * before + (1 - gates) * before.mean(0)
    after = metrics.penultimate_features(changed, images).detach().double()
    torch.testing.assert_close(after, expected, atol=1e-3, rtol=1e-3)


def test_masked_it_forgets_and_a_coverage_of_nothing_is_refused():
    retain, forget = accuracies(baselines.cse(digits.trained_cnn(), FORGET, train(), mask=True))
    assert forget == 0
    assert retain > 0.9
    with pytest.raises(ValueError, match="coverage=0 is outside"):
        baselines.cse(digits.trained_cnn(), FORGET, train(), coverage=0)
