"""Feature rows as a recipe: one pass over the images."""

import pytest
import torch
from torch import Tensor, nn

import wfilter
from helpers import assert_same_state, linear, samples, snapshot
from wfilter.untraining.objectives import Auto, Reroute
from wfilter.untraining.stored import recipe_from


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"prior": 0.0}, r"prior=0\.0 must be positive"),
        ({"rank": 0}, "rank=0 and prior=5.0 must be positive"),
    ],
)
def test_settings_without_meaning_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Reroute("mine", **setting)


def trained(classes: int = 4) -> tuple[wfilter.FilteredModel, Tensor, Tensor]:
    """A small network that tells its classes apart, filtered, and its images."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % classes
    images = 2 * torch.eye(classes, 6)[labels] + 0.4 * torch.randn(400, 6, generator=generator)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, classes))
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return wfilter.apply_weight_filtering(model, targets="0.*"), images, labels


def test_one_pass_makes_all_rows_and_leaves_the_base_model_as_it_is():
    wf, images, labels = trained()
    before = snapshot(wf.base)
    base = wf(images)
    history = wfilter.untrain(wf, wfilter.InMemory(images, labels), recipe="reroute")
    assert history.stopped == "solved"
    assert history.records[0].forget_accuracy == 0.0
    assert history.records[0].retain_accuracy > 0.9
    assert_same_state(wf.base, before)
    assert torch.equal(wf(images), base)
    right = wf(images, forget=labels).argmax(1) == labels
    kept = wf(images, forget=(labels + 1) % 4).argmax(1) == labels
    assert not bool(right.any())
    assert float(kept.float().mean()) > 0.9


def test_a_nearest_mean_no_longer_finds_the_class_in_the_features():
    wf, images, labels = trained()
    wfilter.untrain(wf, [(images, labels)], recipe="reroute")
    found = {}
    for forget in (None, 1):
        features = wf.features(images, forget=forget)
        means = torch.stack([features[labels == c].mean(0) for c in range(4)])
        right = torch.cdist(features, means).argmin(1) == labels
        found[forget] = float(right[labels == 1].float().mean())
    assert found[None] > 0.9
    assert found[1] < 0.5


def test_without_labels_the_answers_of_the_base_model_stand_for_them():
    wf, images, _ = trained()
    answers = wf.base(images).argmax(1)
    wfilter.untrain(wf, [images], recipe="reroute")
    rows = wf.feature_rows
    wf.feature_rows = None
    wfilter.untrain(wf, [(images, answers)], recipe="reroute")
    assert torch.equal(rows.means, wf.feature_rows.means)


def test_any_iterable_passes_once():
    wf, images, labels = trained()
    parts = zip(images.split(50), labels.split(50))
    wfilter.untrain(wf, (part for part in parts), recipe="reroute")
    assert wf.feature_rows is not None


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x, y: (x, torch.zeros_like(y)), "3 of 4 classes have no image"),
        (lambda x, y: (x.fill_(torch.nan), y), "contain NaN"),
        (lambda x, y: (x, y + 1), "label 4 is outside 0..3"),
        (lambda x, y: (x, nn.functional.one_hot(y).bool()), "several labels"),
    ],
)
def test_bad_data_are_refused_and_nothing_is_stored(spoil, message):
    wf, images, labels = trained()
    before = wf.alphas.detach().clone()
    with pytest.raises(ValueError, match=message):
        wfilter.untrain(wf, [spoil(images.clone(), labels)], recipe="reroute")
    assert wf.feature_rows is None
    assert torch.equal(wf.alphas, before)
    assert not wf.pinned


def test_bad_data_of_a_late_batch_leave_nothing_behind():
    wf, images, labels = trained()
    bad = images[200:].clone()
    bad[7, 2] = torch.nan
    for recipe in ("reroute", "auto"):
        with pytest.raises(ValueError, match=r"1 of [0-9]+ images contain NaN"):
            wfilter.untrain(wf, [(images[:200], labels[:200]), (bad, labels[200:])], recipe=recipe)
        assert wf.feature_rows is None
        assert not wf.pinned
        assert bool((wf.alphas == wf.alphas[0, 0]).all())


def test_more_classes_than_features_get_rows_that_answer_with_none_of_the_forgotten():
    torch.manual_seed(0)
    labels, images = torch.arange(200) % 5, torch.randn(200, 6)
    model = nn.Sequential(nn.Linear(6, 2), nn.ReLU(), nn.Linear(2, 5))
    wf = wfilter.apply_weight_filtering(model, targets="0.*")
    wfilter.untrain(wf, [(images, labels)], recipe="reroute")
    logits = wf(images, forget=labels)
    assert bool(logits.isfinite().all())
    assert not bool((logits.argmax(1) == labels).any())
    assert max(wf.verify(images[:8], labels[:8]).values()) < 1e-4


def test_the_default_takes_gates_where_each_class_has_one_image():
    wf, images, labels = trained()
    recipe = Auto("mine", steps=10)
    history = wfilter.untrain(wf, [(images[:4], labels[:4])], recipe=recipe, progress=False)
    assert wf.feature_rows is None
    assert any("one image of each class" in choice for choice in history.choices)


def test_no_data_at_all_are_refused():
    wf, _, _ = trained()
    with pytest.raises(ValueError, match="train has no batches"):
        wfilter.untrain(wf, [], recipe="reroute")


def test_a_model_without_a_linear_head_is_refused():
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    x = torch.randn(8, 1, 5, 5)
    wf = wfilter.apply_weight_filtering(model, targets="0.*", example_input=x)
    with pytest.raises(ValueError, match="feature rows have no place in it"):
        wfilter.untrain(wf, [(x, torch.arange(8) % 4)], recipe="reroute")
    assert wf.feature_rows is None


def test_trained_gates_are_not_combined_with_rows_made_without_them():
    wf, images, labels = trained()
    with torch.no_grad():
        wf.alphas[0] = -1.0
    with pytest.raises(ValueError, match="trained gates"):
        wfilter.untrain(wf, [(images, labels)], recipe="reroute")


def test_gates_are_not_trained_under_feature_rows():
    wf, images, labels = trained()
    wfilter.untrain(wf, [(images, labels)], recipe="reroute")
    with pytest.raises(ValueError, match=r"wf\.feature_rows = None"):
        wfilter.untrain(wf, [(images, labels)], recipe="distill", steps=1)


def test_settings_that_steer_steps_are_refused():
    wf = linear()
    with pytest.raises(ValueError, match="steps has no meaning for recipe 'reroute'"):
        wfilter.untrain(wf, [samples()], recipe="reroute", steps=3)


def test_the_recipe_comes_back_from_its_settings():
    recipe = Reroute("mine", prior=2.0)
    assert recipe_from(recipe.to_dict()) == recipe


def test_settings_of_the_rows_that_moved_features_are_read_or_refused_in_words():
    old = {"name": "reroute", "objective": "reroute", "shrinkage": 0.01, "prior": 5.0}
    assert recipe_from({**old, "detectors": "auto"}) == Reroute("reroute")
    with pytest.raises(ValueError, match="detectors='ridge' is no setting of the objective"):
        recipe_from({**old, "detectors": "ridge"})


def test_evaluate_looks_at_the_rerouted_features_not_at_those_of_a_baked_copy():
    wf, images, labels = trained()
    data = [(images, labels)]
    before = wfilter.evaluate(wf, data, train=data, metrics=["probe"])
    wfilter.untrain(wf, data, recipe="reroute")
    after = wfilter.evaluate(wf, data, train=data, metrics=["probe"])
    assert before.value("wfilter", "probe f") > 0.9
    assert after.value("wfilter", "probe f") < 0.5
