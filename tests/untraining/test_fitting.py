"""Statistics and closed forms of feature rows."""

import pytest
import torch
from torch import Tensor

from helpers import close
from wfilter.untraining.fitting import FeatureStatistics, fit_rows

CLASSES, WIDTH = 4, 6


def data(count: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features of well separated classes with covariances of their own, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    means = 9 * torch.eye(CLASSES, WIDTH, dtype=torch.float64)
    shapes = torch.randn(CLASSES, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return means[labels] + torch.einsum("nw,nwx->nx", noise, shapes[labels]) / 2, labels


def statistics(count: int = 400, size: int = 400) -> FeatureStatistics:
    found = FeatureStatistics(CLASSES, WIDTH)
    for part in zip(*(tensor.split(size) for tensor in data(count))):
        found.add(*part)
    return found


def test_statistics_of_many_batches_equal_those_of_one():
    whole, parts = statistics(), statistics(size=7)
    for name in ("counts", "sums", "squares", "products"):
        close(getattr(parts, name), getattr(whole, name))


def test_means_variances_and_covariance_are_those_of_the_features():
    features, labels = data()
    found = statistics(size=50)
    means = torch.stack([features[labels == c].mean(0) for c in range(CLASSES)])
    residuals = features - means[labels]
    close(found.means, means)
    close(found.within, residuals.T @ residuals / len(features))
    own = torch.stack([features[labels == c].var(0, correction=0) for c in range(CLASSES)])
    close(found.variances, own)


def test_many_classes_share_one_covariance_where_memory_would_not_do(monkeypatch):
    whole = statistics()
    monkeypatch.setattr("wfilter.untraining.fitting.BY_CLASS_LIMIT", 10)
    shared = statistics(size=30)
    assert shared.products.shape == (1, WIDTH, WIDTH)
    close(shared.within, whole.within)
    assert len(fit_rows(shared).factors) == 1


def test_factors_and_rests_together_have_the_variance_of_the_class():
    found = statistics(4000)
    for rank in (2, WIDTH):
        rows = fit_rows(found, rank=rank, prior=1e-9)
        variances = (rows.factors**2).sum(1) + rows.rests**2
        torch.testing.assert_close(variances, found.variances.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shift", [0.0, 40.0])
def test_draws_have_the_mean_and_covariance_of_the_class_they_are_drawn_from(shift):
    found = statistics(40_000)
    rows = fit_rows(found)
    for route in range(2):
        h = data(20_000, seed=0)[0].float()[3::4] + shift  # features of class 3, or of nowhere
        drawn = rows.drawn(h, torch.full((len(h),), route)).double()
        own = found.products[route] / found.counts[route]
        wanted = own - torch.outer(found.means[route], found.means[route])
        scale = wanted.diagonal().sqrt()
        assert float(((drawn.mean(0) - found.means[route]) / scale).abs().max()) < 0.1
        assert float(((torch.cov(drawn.T) - wanted) / torch.outer(scale, scale)).abs().max()) < 0.2


def test_draws_do_not_tell_what_they_were_made_of():
    rows = fit_rows(statistics(40_000))
    h = data(20_000)[0].float()[3::4]
    drawn = rows.drawn(h, torch.zeros(len(h), dtype=torch.long))
    correlations = torch.corrcoef(torch.cat([h, drawn], 1).T)[:WIDTH, WIDTH:]
    assert float(correlations.abs().max()) < 0.1


def test_few_images_lean_on_those_of_all_classes():
    few = statistics(8)
    assert fit_rows(few).factors.shape == (1, WIDTH, WIDTH)
    leaning, alone = (fit_rows(few, rank=1, prior=prior).rests for prior in (100.0, 0.01))
    assert float(leaning.std(0).mean()) < 0.5 * float(alone.std(0).mean())


def test_features_of_rank_below_the_classes_get_rows_all_the_same():
    labels = torch.arange(400) % 8
    features = torch.randn(400, 1) * torch.ones(1, 3) + labels[:, None]
    found = FeatureStatistics(8, 3)
    found.add(features, labels)
    rows = fit_rows(found)
    drawn = rows.drawn(features, labels)
    assert bool(drawn.isfinite().all())
    close(drawn[:, 0], drawn[:, 2], 1e-2)  # no spread where the features have none


def test_features_without_any_spread_are_drawn_at_the_mean():
    found = FeatureStatistics(2, 3)
    labels = torch.arange(100) % 2
    found.add(torch.eye(2, 3)[labels], labels)
    rows = fit_rows(found)
    close(rows.drawn(torch.eye(2, 3)[labels], 1 - labels), torch.eye(2, 3)[1 - labels], 1e-3)


def test_rows_of_the_same_statistics_and_seed_are_the_same():
    one, two, other = (fit_rows(statistics(), seed=seed) for seed in (0, 0, 1))
    for name, tensor in one.named_buffers():
        assert torch.equal(tensor, getattr(two, name))
    assert not torch.equal(one.phases, other.phases)


def test_rerouted_features_no_longer_tell_the_class():
    features, labels = data(4000)
    rows = fit_rows(statistics(4000))
    forget = torch.tensor([True, False, False, False])
    edited = rows.edited(features.float(), forget, features.float() @ rows.means.T)
    means = torch.stack([edited[labels == c].mean(0) for c in range(CLASSES)])
    right = torch.cdist(edited, means).argmin(1) == labels
    assert float(right[labels == 0].float().mean()) < 0.5
    assert float(right[labels != 0].float().mean()) > 0.7


def test_a_class_without_images_is_refused():
    found = FeatureStatistics(CLASSES + 1, WIDTH)
    found.add(*data())
    with pytest.raises(ValueError, match="1 of 5 classes have no image, the first is 4"):
        fit_rows(found)


def test_one_image_of_each_class_is_refused():
    found = FeatureStatistics(CLASSES, WIDTH)
    found.add(*data(CLASSES))
    with pytest.raises(ValueError, match="one image of each class"):
        fit_rows(found)
    found.add(*data(1))
    assert bool(fit_rows(found).means.isfinite().all())


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="only one class"):
        fit_rows(FeatureStatistics(1, WIDTH))


def test_bad_features_are_refused_and_not_counted():
    found = statistics()
    before = found.sums.clone()
    bad, labels = data(8)
    bad[3, 2] = torch.nan
    with pytest.raises(ValueError, match="features of 1 of 8 images contain NaN"):
        found.add(bad, labels)
    assert torch.equal(found.sums, before)


def unsure(logits: Tensor) -> Tensor:
    return torch.special.entr(logits.softmax(1)).sum(1)


def fitted_with_head(scale: float):
    """Rows with the head that knows the classes' means, and features they were not made from."""
    layer = torch.nn.Linear(WIDTH, CLASSES, bias=False).requires_grad_(False)
    layer.weight.copy_(scale * torch.eye(CLASSES, WIDTH))
    features, labels = (
        tensor.float() if tensor.is_floating_point() else tensor for tensor in data(4000)
    )
    found = FeatureStatistics(CLASSES, WIDTH)
    for h, y in zip(features.split(100), labels.split(100)):
        found.add(h, y, layer(h))
    fresh, own = data(4000, seed=1)
    return fit_rows(found, logits_of=layer), layer, fresh.float(), own


def test_draws_are_answered_as_unsurely_as_images_without_their_class():
    rows, layer, features, labels = fitted_with_head(0.5)
    own = torch.nn.functional.one_hot(labels, CLASSES).bool()
    known = layer(features).argmax(1) == labels
    without = layer(features).masked_fill(own, -torch.inf)
    _, logits = rows(features, own, layer)
    _, as_sure = fit_rows(statistics(4000))(features, own, layer)
    wanted, now, before = (unsure(x[known]).mean() for x in (without, logits, as_sure))
    assert before < 0.6 * wanted
    assert abs(now - wanted) < 0.1 * wanted


def test_sureness_changes_no_answer_and_no_logit_of_other_images():
    rows, layer, features, labels = fitted_with_head(0.5)
    shown = torch.where(labels < 2, labels, (labels + 1) % CLASSES)
    sets = torch.nn.functional.one_hot(shown, CLASSES).bool()
    _, logits = rows(features, sets, layer)
    plain = rows.sureness.clone()
    rows.sureness.fill_(1)
    _, as_sure = rows(features, sets, layer)
    assert torch.equal(logits.argmax(1), as_sure.argmax(1))
    kept = ~rows.chosen(layer(features), sets)[0].squeeze(1)
    assert 0 < int(kept.sum()) < len(kept)
    assert torch.equal(logits[kept], as_sure[kept])
    assert bool((plain < 1).all())


def test_without_logits_draws_are_as_sure_as_their_class():
    assert bool((fit_rows(statistics()).sureness == 1).all())


def test_of_two_classes_a_draw_is_as_sure_as_its_class():
    found, (h, labels) = FeatureStatistics(2, WIDTH), data()
    layer = torch.nn.Linear(WIDTH, 2).requires_grad_(False)
    found.add(h, labels % 2, layer(h.float()))
    assert bool((fit_rows(found, logits_of=layer).sureness == 1).all())


def test_sureness_of_batches_equals_that_of_one_pass(monkeypatch):
    whole = fitted_with_head(0.5)[0]
    monkeypatch.setattr("wfilter.untraining.fitting.AT_ONCE", 1)
    parts = fitted_with_head(0.5)[0]
    assert bool(((whole.sureness - parts.sureness).abs() < 0.1).all())  # other draws
