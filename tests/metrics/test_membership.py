"""Membership inference against scikit-learn's own classifiers."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC

from helpers import random_pairs
from wfilter import metrics


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
