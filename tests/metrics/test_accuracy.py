"""Accuracies, confusion, routing and AUS against scikit-learn and their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, recall_score
from torch import nn

from helpers import random_pairs
from wfilter import metrics


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
