"""Statistics and closed forms of feature rows."""

import pytest
import torch
from torch import Tensor

from helpers import close
from wfilter.untraining.fitting import FeatureStatistics, fit_rows

CLASSES, WIDTH = 4, 6


def data(count: int = 400, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features of well separated classes, the logits of a head on them, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    means = 6 * torch.eye(CLASSES, WIDTH, dtype=torch.float64)
    noise = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    features = means[labels] + noise
    return features, features @ means.T, labels


def statistics(count: int = 400, size: int = 400, **options) -> FeatureStatistics:
    found = FeatureStatistics(CLASSES, WIDTH, **options)
    for part in zip(*(tensor.split(size) for tensor in data(count))):
        found.add(*part)
    return found


def test_statistics_of_many_batches_equal_those_of_one():
    whole, parts = statistics(), statistics(size=7)
    for name in ("counts", "sums", "squares", "products", "pair_counts", "pair_sums"):
        close(getattr(parts, name), getattr(whole, name))


def test_means_and_covariance_are_those_of_the_features():
    features, _, labels = data()
    found = statistics(size=50)
    means = torch.stack([features[labels == c].mean(0) for c in range(CLASSES)])
    residuals = features - means[labels]
    close(found.means, means)
    close(found.within, residuals.T @ residuals / len(features))


def test_exact_detectors_are_1_on_their_class_and_0_on_all_others():
    rows = fit_rows(statistics())
    found = rows.means @ rows.detectors.T - rows.offsets
    torch.testing.assert_close(found, torch.eye(CLASSES), atol=1e-4, rtol=0)


def test_exact_detectors_have_the_least_variance_of_all_that_are():
    found = statistics()
    within = found.within
    within.diagonal().add_(0.01 * within.diagonal().mean())
    rows, means = fit_rows(found), found.means
    for c in range(CLASSES):
        others = [k for k in range(CLASSES) if k != c]
        constraints = means[c] - means[others]  # (classes - 1, width)
        inverse = torch.linalg.solve(within, constraints.T)
        weights = torch.linalg.solve(constraints @ inverse, torch.ones(3, dtype=torch.float64))
        close(rows.detectors[c].double(), inverse @ weights, 1e-5)


def test_more_classes_than_features_have_no_exact_detectors_by_themselves():
    found = FeatureStatistics(5, 2)
    labels = torch.arange(100) % 5
    found.add(torch.randn(100, 2), torch.randn(100, 5), labels)
    assert fit_rows(found).detectors is None
    ridge = fit_rows(found, detectors="ridge")
    rise = (ridge.detectors * (ridge.means - ridge.means.mean(0))).sum(1)
    torch.testing.assert_close(rise, torch.ones(5), atol=1e-4, rtol=0)


def test_few_images_lean_on_those_of_all_classes():
    few = fit_rows(statistics(8))
    assert few.detectors is None  # two images of each class: no covariance to speak of
    assert float((few.spreads / few.spreads.mean(0)).std()) < float(
        (fit_rows(statistics(8), prior=0.01).spreads / few.spreads.mean(0)).std()
    )


def test_shifts_between_pairs_are_left_out_where_memory_would_not_do(monkeypatch):
    monkeypatch.setattr("wfilter.untraining.fitting.PAIR_LIMIT", 10)
    assert fit_rows(statistics()).shifts is None


def test_no_shift_leads_from_a_class_to_itself():
    rows = fit_rows(statistics())
    assert not rows.shifts[range(CLASSES), range(CLASSES)].any()


def test_rerouted_features_no_longer_tell_the_class():
    features, logits, labels = data()
    rows = fit_rows(statistics())
    forget = torch.tensor([True, False, False, False])
    edited = rows.edited(features.float(), forget, logits.float())
    means = torch.stack([edited[labels == c].mean(0) for c in range(CLASSES)])
    right = torch.cdist(edited, means).argmin(1) == labels
    assert float(right[labels == 0].float().mean()) < 0.5
    assert float(right[labels != 0].float().mean()) > 0.7


def test_a_class_without_images_is_refused():
    found = FeatureStatistics(CLASSES + 1, WIDTH)
    features, _, labels = data()
    found.add(features, torch.randn(400, CLASSES + 1), labels)
    with pytest.raises(ValueError, match="1 of 5 classes have no image, the first is 4"):
        fit_rows(found)


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="only one class"):
        fit_rows(FeatureStatistics(1, WIDTH))


def test_bad_features_are_refused_and_not_counted():
    found = statistics()
    before = found.sums.clone()
    bad, logits, labels = data(8)
    bad[3, 2] = torch.nan
    with pytest.raises(ValueError, match="features of 1 of 8 images contain NaN"):
        found.add(bad, logits, labels)
    assert torch.equal(found.sums, before)
