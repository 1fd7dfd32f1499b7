import torch
import torch.nn.functional as F

from wfilter.untraining import losses


def test_distillation_is_the_kl_to_the_renormalised_rest():
    base, logits = torch.randn(5, 4), torch.randn(5, 4)
    forget = torch.tensor([0, 3, -1, 2, 1])
    total = 0.0
    for b, out, c in zip(base, logits, forget.tolist()):
        target = b.softmax(0)
        if c >= 0:
            target[c] = 0
            target = target / target.sum()
        seen = target > 0
        total += (target[seen] * (target[seen].log() - out.log_softmax(0)[seen])).sum()
    torch.testing.assert_close(losses.distillation(logits, base, forget), total / 5)


def test_labels_and_singleton_sets_give_the_same_losses():
    base, logits, labels = torch.randn(6, 4), torch.randn(6, 4), torch.arange(6) % 4
    sets = F.one_hot(labels, 4).bool()
    for loss in (losses.distillation, losses.binary_distillation):
        torch.testing.assert_close(loss(logits, base, labels), loss(logits, base, sets))
    torch.testing.assert_close(losses.margin(logits, labels, 2.0), losses.margin(logits, sets, 2.0))


def test_margin_is_zero_once_the_forgotten_logit_is_far_below():
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    assert losses.margin(logits, torch.tensor([0]), 5.0) == 0
    assert losses.margin(logits, torch.tensor([1]), 5.0) == 9 - 1 + 5


def test_margin_ignores_samples_that_forget_nothing():
    assert losses.margin(torch.randn(3, 4), torch.full((3,), -1), 5.0) == 0


def test_gradients_of_distillation_are_finite_at_extreme_logits():
    logits = torch.tensor([[100.0, -100.0, 0.0]], requires_grad=True)
    losses.distillation(logits, torch.tensor([[100.0, 0.0, -100.0]]), torch.tensor([0])).backward()
    assert logits.grad.isfinite().all()


def test_reciprocal_stays_finite_for_a_certain_model():
    logits = torch.tensor([[1000.0, 0.0]])
    assert losses.reciprocal(logits, torch.tensor([0]), 1e-6).isfinite()


def test_closedness_per_layer_sums_the_layers_means():
    alphas = [torch.zeros(2, 3), torch.full((2, 5), 1000.0)]
    assert losses.closedness(alphas, per_layer=True) == 0.5
    torch.testing.assert_close(losses.closedness(alphas), torch.tensor(0.5 * 6 / 16))


def two_sides(width=3, seed=0):
    """Features of 20 forgotten and 40 other samples, which differ a little."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.arange(60) < 20
    features = torch.randn(60, width, generator=generator, dtype=torch.float64)
    return features + 0.5 * own[:, None], own, torch.rand(60, generator=generator) * ~own


def test_ridge_probe_is_the_variance_that_weighted_least_squares_explain():
    features, own, others = two_sides()
    weight = torch.where(own, 0.5 / own.sum(), 0.5 * others / others.sum()).double()
    inputs = torch.cat([features, torch.ones(60, 1, dtype=torch.float64)], 1)
    root = weight.sqrt()[:, None]
    fit = torch.linalg.lstsq(root * inputs, root * own[:, None].double()).solution
    rest = (weight * (own.double() - (inputs @ fit)[:, 0]).square()).sum()
    found = losses.ridge_probe(features, own, others, ridge=1e-9)
    torch.testing.assert_close(found, 1 - rest / 0.25, rtol=0, atol=2e-3)


def test_ridge_probe_does_not_mind_shifted_or_scaled_features():
    features, own, others = two_sides()
    moved = losses.ridge_probe(7 * features - 3, own, others)
    torch.testing.assert_close(moved, losses.ridge_probe(features, own, others))


def test_ridge_probe_gives_finite_gradients_also_to_dead_features():
    features, own, others = two_sides()
    features = (features * torch.tensor([1.0, 0.0, 1.0])).requires_grad_()
    losses.ridge_probe(features, own, others).backward()
    assert features.grad.isfinite().all()
    assert features.grad.abs().sum() > 0


def test_ridge_probe_has_nothing_to_say_without_two_sides():
    features, own, others = two_sides()
    assert losses.ridge_probe(features, own, 0 * others) == 0
    assert losses.ridge_probe(features, own & False, others) == 0
    assert losses.ridge_probe(features, torch.arange(60) < 1, others) == 0


def test_look_alikes_count_by_the_base_models_answer_and_sets_as_labels():
    base = torch.tensor([[9.0, 7, 0], [9, 0, 7], [0, 9, 0], [0, 9, 0], [0, 0, 9]])
    own = torch.tensor([True, True, False, False, False])
    weight = losses.look_alikes(base, torch.zeros(5).long(), own)
    assert weight[own].sum() == 0
    torch.testing.assert_close(weight.sum(), torch.tensor(2.0))  # one for each forgotten sample
    assert weight[4] > 1.9 * weight[2]  # the one two stands for what two ones stand for
    sets = F.one_hot(torch.zeros(5).long(), 3).bool()
    torch.testing.assert_close(losses.look_alikes(base, sets, own), weight)
    assert (losses.look_alikes(base, sets, ~own | own) == 0).all()
