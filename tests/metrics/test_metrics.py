"""Every metric against something independent, and its refusal of bad input."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, confusion_matrix, recall_score
from sklearn.neighbors import NearestCentroid
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

import digits
from helpers import random_rows
from wfilter import baselines, metrics
from wfilter.core.folding import folded
from wfilter.data.running import evaluating, seeded
from wfilter.metrics.training import unmasked


def random_pairs(samples=300, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(classes, (samples,), generator=generator) for _ in range(2)]
    logits = torch.randn(samples, classes, generator=generator)
    return logits, *draw


# accuracy


def test_accuracies_by_row_equal_scikit_learn():
    logits, labels, rows = random_pairs()
    predictions = logits.argmax(1)
    forget = metrics.forget_accuracy(logits, labels, rows)
    retain = metrics.retain_accuracy(predictions, labels, rows)
    for row in range(5):
        own = (rows == row) & (labels == row)
        others = (rows == row) & (labels != row)
        assert forget.by_row[row] == pytest.approx(accuracy_score(labels[own], predictions[own]))
        assert retain.by_row[row] == pytest.approx(
            accuracy_score(labels[others], predictions[others])
        )
    assert forget.mean == pytest.approx(np.mean(list(forget.by_row.values())))
    assert forget.worst == max(forget.by_row.values())
    assert retain.worst == min(retain.by_row.values()) == retain.by_row[retain.worst_row]


def test_each_image_under_its_own_row_gives_recall_by_class():
    logits, labels, _ = random_pairs()
    scores = metrics.forget_accuracy(logits, labels, forget=labels)
    assert list(scores.by_row.values()) == pytest.approx(
        recall_score(labels, logits.argmax(1), average=None)
    )


def test_confusion_equals_scikit_learn_in_all_and_by_row():
    logits, labels, rows = random_pairs()
    predictions = logits.argmax(1)
    assert np.array_equal(
        metrics.confusion(logits, labels, 5), confusion_matrix(labels, predictions)
    )
    for row, counts in metrics.confusion_by_row(logits, labels, rows, 5).items():
        kept = rows == row
        expected = confusion_matrix(labels[kept], predictions[kept], labels=range(5))
        assert np.array_equal(counts, expected)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000))
def test_the_order_of_samples_does_not_matter(seed):
    logits, labels, rows = random_pairs(seed=seed)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    before = metrics.retain_accuracy(logits, labels, rows).by_row
    after = metrics.retain_accuracy(logits[order], labels[order], rows[order]).by_row
    assert before == pytest.approx(after)


def test_sets_given_as_classes_and_as_booleans_agree():
    logits, labels, _ = random_pairs()
    sets = torch.zeros(300, 5, dtype=torch.bool)
    sets[:, [1, 4]] = True
    assert metrics.set_accuracies(logits, labels, [1, 4]) == metrics.set_accuracies(
        logits, labels, sets
    )


def test_routing_is_the_normalised_confusion_row_and_its_distance_is_total_variation():
    logits, labels, _ = random_pairs()
    expected = confusion_matrix(labels, logits.argmax(1), normalize="true")[2]
    ours = metrics.routing(logits, labels, 2, 5)
    assert ours.tolist() == pytest.approx(expected.tolist())
    assert metrics.routing_distance(ours, ours) == 0
    elsewhere = torch.eye(5)
    assert metrics.routing_distance(elsewhere[0], elsewhere[1]) == 1


def test_aus_is_one_for_perfect_forgetting_and_halves_when_nothing_is_forgotten():
    assert metrics.aus(retain=0.9, forget=0.0, original=0.9) == 1
    assert metrics.aus(retain=0.9, forget=1.0, original=0.9) == 0.5
    with pytest.raises(ValueError, match=r"retain=94.0 is not a fraction"):
        metrics.aus(retain=94.0, forget=0.0, original=0.9)


def test_a_row_without_samples_is_an_error_that_names_it():
    predictions = labels = torch.tensor([0, 0, 1])
    rows = torch.tensor([0, 2, 1])
    with pytest.raises(ValueError, match=r"no forget pair for class\(es\) \[2\]"):
        metrics.forget_accuracy(predictions, labels, rows)
    assert metrics.forget_accuracy(predictions, labels, rows, classes=[0, 1]).mean == 1
    with pytest.raises(ValueError, match=r"no forget pair for class\(es\) \[7\]"):
        metrics.forget_accuracy(predictions, labels, labels, classes=[7])
    with pytest.raises(ValueError, match="class 2 has no samples"):
        metrics.routing(predictions, labels, 2, 3)


@pytest.mark.parametrize(
    ("outputs", "labels", "rows", "message"),
    [
        (torch.full((2, 3), torch.nan), torch.zeros(2).long(), 0, "contains NaN in 2 of 2"),
        (torch.zeros(2, 3), torch.zeros(2), 0, "one integer class per sample"),
        (torch.zeros(2, 3), torch.zeros(3).long(), 0, "labels has 3 entries"),
        (torch.zeros(2, 3), torch.tensor([0, -1]), 0, "labels lie in -1..0"),
        (torch.zeros(2, 3), torch.zeros(2).long(), torch.tensor([0, -1]), "forget nothing"),
        (torch.zeros(2, 3), torch.zeros(2).long(), torch.tensor([0]), "forget has shape"),
        (torch.zeros(0, 3), torch.zeros(0).long(), 0, "has no samples"),
        (torch.zeros(2, 3).bool(), torch.zeros(2).long(), 0, "neither float logits"),
    ],
)
def test_bad_pairs_are_refused(outputs, labels, rows, message):
    with pytest.raises(ValueError, match=message):
        metrics.forget_accuracy(outputs, labels, rows)


def test_data_without_labels_or_batches_is_refused():
    with pytest.raises(TypeError, match="expected a pair of tensors"):
        metrics.collect_logits(nn.Identity(), [torch.zeros(2, 3)])
    with pytest.raises(TypeError, match="data has no labels"):
        metrics.collect_logits(nn.Identity(), [(torch.zeros(2, 3),)])
    with pytest.raises(ValueError, match="no batches"):
        metrics.collect_logits(nn.Identity(), iter([]))


def test_average_gap_needs_the_same_metrics():
    with pytest.raises(ValueError, match="the metrics differ"):
        metrics.average_gap({"Acc_r": 1.0}, {"Acc_f": 0.0})


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


# relearning


def forgetful_cnn(label=3):
    """The trained network with the head vector of one class gone."""
    model = copy.deepcopy(digits.trained_cnn())
    with torch.no_grad():
        model[-1].weight[label] = 0
        model[-1].bias[label] = -20
    return model


def test_relearning_counts_epochs_and_puts_everything_back():
    train, test = digits.data()
    model = forgetful_cnn().train()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    result = metrics.relearn_time(
        model, 3, train, digits.batches(test), target=0.9, lr=0.05, samples=200, max_epochs=20
    )
    assert not result.failed
    assert result.accuracies[0] == 0
    assert result.accuracies[-1] >= 0.9 > result.accuracies[-2]
    assert result.epochs == len(result.accuracies) - 1 >= 1
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert [parameter.requires_grad for parameter in model.parameters()][:2] == [False, True]


def test_only_the_parameters_given_are_trained():
    train, test = digits.data()
    model, seen = forgetful_cnn(), []

    def forward(images):
        seen.append((model[0].weight.clone(), model[-1].bias.detach().clone()))
        return model(images)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train), 32)
    metrics.relearn_time(
        model, 3, loader, digits.batches(test), target=2.0, forward=forward,
        parameters=[model[-1].bias], samples=64, max_epochs=2, lr=1.0,
    )  # fmt: skip
    assert torch.equal(seen[0][0], seen[-1][0])
    assert not torch.equal(seen[0][1], seen[-1][1])


def test_a_class_that_never_comes_back_is_a_failure_and_one_never_lost_takes_no_epoch():
    train, test = digits.data()
    masked = baselines.logit_mask(digits.trained_cnn(), 3, digits.batches(train))
    settings = {"target": 0.9, "samples": 64, "max_epochs": 2}
    never = metrics.relearn_time(masked, 3, train, digits.batches(test), **settings)
    assert never.failed
    assert len(never.accuracies) == 3
    at_once = metrics.relearn_time(digits.trained_cnn(), 3, train, digits.batches(test), **settings)
    assert at_once.epochs == 0
    assert str(metrics.relearn_summary([never, at_once])) == "50 (1)"
    assert str(metrics.relearn_summary([never, never])) == "> 100 (2)"


def test_relearning_is_the_same_for_the_same_seed():
    train, test = digits.data()

    def last_logits(seed):
        model, seen = forgetful_cnn(), []

        def forward(images):
            seen.append(model(images))
            return seen[-1]

        metrics.relearn_time(
            model, 3, train, digits.batches(test), forward=forward,
            target=2.0, samples=200, max_epochs=3, lr=0.05, seed=seed,
        )  # fmt: skip
        return seen[-1].detach()

    first, again, other = map(last_logits, (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_more_shots_bring_more_back():
    train, test = digits.data()
    result = metrics.few_shot_relearn(
        forgetful_cnn(), 3, train, digits.batches(test), shots=(1, 10), steps=30, lr=0.02
    )
    assert result[10][1] > 0.5
    assert result[10][1] >= result[1][1]
    assert result[10][0] > 0.8


def test_relearning_refuses_what_it_cannot_use():
    (images, labels), test = digits.data()
    model, rest = digits.trained_cnn(), labels != 3
    with pytest.raises(ValueError, match="class 3 has no samples"):
        metrics.relearn_time(model, 3, (images, labels), [(images[rest], labels[rest])], target=0.9)
    with pytest.raises(TypeError, match="without length or items"):
        metrics.relearn_time(model, 3, iter([]), digits.batches(test), target=0.9)
    with pytest.raises(ValueError, match="nothing to train"):
        metrics.relearn_time(
            model, 3, (images, labels), digits.batches(test), target=0.9, parameters=[]
        )
    with pytest.raises(ValueError, match="for 999 shots"):
        metrics.few_shot_relearn(model, 3, (images, labels), digits.batches(test), shots=[999])


# insertion and deletion


def test_relearning_takes_off_the_bias_by_which_a_folded_row_rules_a_class_out():
    images, labels = torch.eye(3).repeat(5, 1), torch.arange(3).repeat(5)
    head = nn.Linear(3, 3)
    head.weight.data.copy_(5 * torch.eye(3))
    rows = random_rows(3, 3).float()
    rows.means.copy_(torch.eye(3))
    baked = nn.Sequential(*folded(rows, head, torch.tensor([False, True, False])))
    assert baked(images).argmax(1).ne(1).all()
    again = metrics.few_shot_relearn(
        unmasked(baked), 1, (images, labels), [(images, labels)], shots=(5,), lr=0.5
    )
    assert again[5] == (1.0, 1.0)


def test_relearning_from_few_images_takes_the_rate_that_serves_the_attacker():
    images, labels = torch.eye(2).repeat(5, 1), torch.arange(2).repeat(5)
    blank = nn.Linear(2, 2, bias=False)
    nn.init.constant_(blank.weight, 0.5)
    blank.weight.data[1] -= 0.3
    weak, strong, both = (
        metrics.few_shot_relearn(blank, 1, (images, labels), [(images, labels)], shots=(1,), lr=lr)
        for lr in (1e-6, 0.1, (1e-6, 0.1, 1e-5))
    )
    assert weak[1][1] < strong[1][1]
    assert both == strong


def test_insertion_and_deletion_equal_a_curve_computed_by_hand():
    gates = {"a": torch.tensor([0.0, 0.8, 0.2, 0.9]), "b": torch.tensor([0.5, 0.1])}
    given = {name: gate.clone() for name, gate in gates.items()}

    def mean_gate(gates):
        return float((gates["a"].sum() + gates["b"].sum()) / 6)

    # steps of a half open a[0], a[2] and b[1], then the rest
    insertion = metrics.curve(mean_gate, gates, steps=2)
    assert insertion.shares == (0.0, 0.5, 1.0)
    assert insertion.values == pytest.approx([2.5 / 6, (1 + 0.8 + 1 + 0.9 + 0.5 + 1) / 6, 1.0])
    assert insertion.auc == pytest.approx((2.5 / 6 / 2 + 5.2 / 6 + 0.5) / 2)
    deletion = metrics.curve(mean_gate, gates, kind="deletion", steps=2)
    assert deletion.values == pytest.approx([1.0, 0.5, 0.0])
    assert all(torch.equal(gates[name], given[name]) for name in gates)


def test_the_area_equals_numpys_trapezoid():
    values = np.random.default_rng(0).random(21).tolist()
    assert metrics.normalised_auc(values) == pytest.approx(np.trapezoid(values, dx=1 / 20))


def test_gate_order_beats_the_random_control_when_the_gates_are_right():
    gates = {"a": torch.ones(100)}
    gates["a"][torch.randperm(100, generator=torch.Generator().manual_seed(99))[:10]] = 0.0
    important = gates["a"] == 0

    def confidence(gates):
        return float(gates["a"][important].mean())

    by_gate, by_chance = (
        metrics.curve(confidence, gates, order=order).auc for order in ("gate", "random")
    )
    assert by_gate > 0.9 > 0.7 > by_chance > 0.3
    orders = [metrics.random_order(gates["a"], seed) for seed in (0, 0, 1)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


def test_relative_confidence_is_a_ratio_of_means():
    now, before = torch.randn(2, 8, 3)
    expected = now.softmax(1)[:, 1].mean() / before.softmax(1)[:, 1].mean()
    assert metrics.relative_confidence(now, before, 1) == pytest.approx(float(expected), rel=1e-5)


def test_curves_refuse_nan_and_nothing():
    with pytest.raises(ValueError, match="the curve contains NaN"):
        metrics.normalised_auc([0.0, math.nan])
    with pytest.raises(ValueError, match="has no area"):
        metrics.normalised_auc([0.0])
    with pytest.raises(ValueError, match="gates contain NaN"):
        metrics.curve(lambda gates: 0.0, {"a": torch.tensor([math.nan])})
    with pytest.raises(ValueError, match="steps=0 over 1 targets"):
        metrics.curve(lambda gates: 0.0, {"a": torch.ones(1)}, steps=0)
    with pytest.raises(ValueError, match="kind='insert'"):
        metrics.curve(lambda gates: 0.0, {"a": torch.ones(1)}, kind="insert")


# probes


def digit_features(model):
    return [
        part for split in digits.data() for part in metrics.collect_features(
            model, digits.batches(split)
        )
    ]  # fmt: skip


def test_probes_equal_scikit_learn():
    features, labels, test_features, test_labels = digit_features(digits.trained_cnn())
    scaler = StandardScaler().fit(features)
    expected = LogisticRegression(max_iter=1000).fit(scaler.transform(features), labels)
    predictions = expected.predict(scaler.transform(test_features))
    linear = metrics.linear_probe(features, labels, test_features, test_labels)
    assert linear.accuracy == pytest.approx(accuracy_score(test_labels, predictions))
    recalls = recall_score(test_labels, predictions, average=None)
    assert list(linear.by_class.values()) == pytest.approx(recalls)

    centroids = NearestCentroid().fit(features, labels)
    nearest = metrics.nearest_class_mean(features, labels, test_features, test_labels)
    assert nearest.accuracy == pytest.approx(centroids.score(test_features, test_labels))
    cosine = metrics.nearest_class_mean(
        features, labels, test_features, test_labels, distance="cosine"
    )
    assert cosine.accuracy > 0.9


def test_a_masked_logit_gives_no_accuracy_and_the_originals_probe():
    train, test = digits.data()
    model = digits.trained_cnn()
    masked = baselines.logit_mask(model, 3, digits.batches(train))
    logits, labels = metrics.collect_logits(masked, digits.batches(test))
    assert metrics.set_accuracies(logits, labels, 3)[1] == 0
    before, after = digit_features(model), digit_features(masked)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert metrics.linear_probe(*after) == metrics.linear_probe(*before)


def test_random_features_of_other_labels_give_a_probe_at_chance():
    features, labels = torch.randn(400, 8), torch.randint(4, (400,))
    probe = metrics.linear_probe(features[:200], labels[:200], features[200:], labels[200:])
    assert probe.accuracy < 0.45


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_features_of_a_timm_model_are_its_pre_logits(name):
    timm = pytest.importorskip("timm")
    size = {"img_size": 32} if "vit" in name else {}
    model = timm.create_model(name, num_classes=7, **size).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(images), pre_logits=True)
        torch.testing.assert_close(metrics.penultimate_features(model, images), expected)
        head = metrics.find_head(model)
        torch.testing.assert_close(head(expected), model(images))


def test_features_of_a_model_with_two_heads_lie_side_by_side():
    timm = pytest.importorskip("timm")
    model = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, num_classes=7).eval()
    assert metrics.penultimate_features(model, torch.randn(2, 3, 32, 32)).shape == (2, 384)


@pytest.mark.parametrize(
    ("name", "width"), [("resnet18", 512), ("squeezenet1_1", 512), ("mobilenet_v3_small", 1024)]
)
def test_features_of_a_torchvision_model_are_the_input_of_its_head(name, width):
    models = pytest.importorskip("torchvision.models")
    model = getattr(models, name)(num_classes=7).eval()
    features = metrics.penultimate_features(model, torch.randn(2, 3, 64, 64))
    assert features.shape == (2, width)


def test_features_can_be_taken_through_another_forward():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    images = torch.randn(5, 4)
    doubled = metrics.penultimate_features(model, images, forward=lambda x: model(2 * x))
    torch.testing.assert_close(doubled, 2 * images)
    assert not model[1]._forward_pre_hooks


def test_a_head_that_is_never_called_is_refused():
    with pytest.raises(ValueError, match="it is not the head"):
        metrics.penultimate_features(nn.Linear(2, 2), torch.zeros(1, 2), head=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="could not guess an input that ReLU takes"):
        metrics.find_head(nn.ReLU())


def test_probes_refuse_unseen_classes_and_nan():
    x, y = torch.randn(4, 2), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"class\(es\) \[2\] of test_labels"):
        metrics.linear_probe(x, y, x, y + 1)
    with pytest.raises(ValueError, match="test_features contains NaN"):
        metrics.nearest_class_mean(x, y, x * math.nan, y)
    with pytest.raises(ValueError, match="distance='manhattan' is unknown"):
        metrics.nearest_class_mean(x, y, x, y, distance="manhattan")


# membership


def test_the_confidence_attack_is_a_support_vector_classifier():
    logits, labels, _ = random_pairs(samples=90)
    retain, test, forget = (
        (logits[part] * scale, labels[part])
        for part, scale in ((slice(0, 30), 3), (slice(30, 60), 1), (slice(60, 90), 2))
    )
    confidence = [x.softmax(1)[range(30), y].numpy()[:, None] for x, y in (retain, test, forget)]
    attack = SVC(C=3, gamma="auto", kernel="rbf")
    attack.fit(np.concatenate(confidence[:2]), [1] * 30 + [0] * 30)
    expected = 1 - attack.predict(confidence[2]).mean()
    assert metrics.confidence_attack(retain, test, forget) == pytest.approx(expected)


def test_attacks_know_members_from_others():
    sure, unsure = torch.randn(200, 4) * 8, torch.randn(100, 4)
    labels = sure.argmax(1), unsure.argmax(1)
    members, others = (sure, labels[0]), (unsure, labels[1])
    assert metrics.confidence_attack(members, others, members) < 0.3
    assert metrics.confidence_attack(members, others, others) > 0.7
    assert metrics.entropy_attack(sure, unsure, sure) > 0.8
    assert metrics.entropy_attack(sure, unsure, unsure) < 0.2


def test_the_entropy_attack_is_a_balanced_logistic_regression():
    logits, _, _ = random_pairs(samples=90)
    retain, test, forget = logits[:50] * 3, logits[50:70], logits[70:] * 2
    entropy = [
        -(x.softmax(1) * x.log_softmax(1)).sum(1).double().numpy()[:, None]
        for x in (retain, test, forget)
    ]
    attack = LogisticRegression(class_weight="balanced")
    attack.fit(np.concatenate(entropy[:2]), [1] * 50 + [0] * 20)
    assert metrics.entropy_attack(retain, test, forget) == pytest.approx(
        attack.predict(entropy[2]).mean()
    )


def test_attacks_refuse_an_empty_or_broken_half():
    good = torch.randn(4, 3)
    with pytest.raises(ValueError, match="logits has no samples"):
        metrics.entropy_attack(good, good, good[:0])
    with pytest.raises(ValueError, match="contains NaN"):
        metrics.entropy_attack(good, good * math.nan, good)


# running


def test_each_modules_mode_and_the_random_state_come_back():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)).train()
    model[1].eval()
    state = torch.random.get_rng_state()
    with evaluating(model), seeded(3):
        assert not model[0].training
        torch.rand(1)
    assert model.training
    assert model[0].training
    assert not model[1].training
    assert torch.equal(state, torch.random.get_rng_state())
