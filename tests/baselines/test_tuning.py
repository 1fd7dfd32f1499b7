import pytest
import torch

import digits
from digits import FORGET, train
from wfilter import baselines, metrics


def held_out():
    return digits.batches(tuple(part[:250] for part in digits.data()[1]))


def test_the_learning_rate_with_the_best_held_out_accuracies_is_taken_and_told():
    model = digits.trained_cnn()
    rivals = baselines.run(
        model, FORGET, train(), methods=["delete", "logit_mask"], held_out=held_out()
    )
    chosen = rivals["delete"]
    lrs = [tried.lr for tried in chosen.tried]
    assert lrs == [1e-3, 1e-4, 1e-2][: len(lrs)]
    best = max(chosen.tried, key=lambda tried: tried.score)
    assert chosen.lr == best.lr
    again = baselines.delete(model, FORGET, train(), lr=chosen.lr)
    for a, b in zip(chosen.model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    logits, labels = metrics.collect_logits(chosen.model, held_out())
    assert metrics.set_accuracies(logits, labels, FORGET) == (best.retain, best.forget)
    assert rivals["logit_mask"].tried == ()
    assert rivals["logit_mask"].lr is None


def test_no_other_rate_is_tried_after_one_that_serves():
    def masks(model, forget, train, lr=1.0):
        return baselines.logit_mask(model, forget, train)

    def ruins_unless_small(model, forget, train, lr=1.0):
        good = baselines.logit_mask(model, forget, train)
        return good if lr < 1 else baselines.original(model, forget, train)

    for method, lrs in ((masks, [1.0]), (ruins_unless_small, [1.0, 0.1])):
        model = digits.trained_cnn()
        rival = baselines.run_method(method, model, FORGET, train(), {}, held_out=held_out())
        assert [tried.lr for tried in rival.tried] == lrs
        assert rival.lr == lrs[-1]


def test_a_rate_that_diverges_is_told_and_not_taken():
    def diverges(model, forget, train, lr=1.0):
        made = baselines.logit_mask(model, forget, train)
        if lr >= 1:
            for parameter in made.parameters():
                parameter.data.fill_(float("nan"))
        return made

    rival = baselines.run_method(
        diverges, digits.trained_cnn(), FORGET, train(), {}, held_out=held_out()
    )
    assert rival.tried[0].score == -1
    assert rival.lr == 0.1


def test_a_rate_that_was_given_is_kept_and_retraining_keeps_its_own():
    rivals = baselines.run(
        digits.trained_cnn(), FORGET, train(), methods=["retrained", "delete"],
        options={"delete": {"lr": 0.002, "steps": 1}, "retrained": {"steps": 1}},
        held_out=held_out(),
    )  # fmt: skip
    assert all(rival.tried == () for rival in rivals.values())


def test_held_out_images_without_one_of_the_halves_are_refused():
    images, labels = digits.data()[1]
    for kept in (labels == FORGET, labels != FORGET):
        batches = digits.batches((images[kept], labels[kept]))
        with pytest.raises(ValueError, match="held_out has no images"):
            baselines.run(
                digits.trained_cnn(), FORGET, train(), methods=["delete"], held_out=batches
            )
