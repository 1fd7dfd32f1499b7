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
