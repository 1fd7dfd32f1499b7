"""Metrics of forgetting: pure functions of tensors first, then helpers that run a model.

All accuracies and shares are fractions in 0..1.

Example:
    >>> import torch
    >>> from wfilter import metrics
    >>> logits, labels = torch.eye(3)[[1, 1, 2]], torch.tensor([0, 1, 2])
    >>> metrics.forget_accuracy(logits, labels, rows=0, expected=[0]).mean
    0.0
"""

from wfilter.data.running import collect_logits, select_class
from wfilter.metrics.accuracy import (
    RowScores,
    accuracy,
    aus,
    average_gap,
    confusion,
    confusion_by_row,
    forget_accuracy,
    retain_accuracy,
    routing,
    routing_distance,
    set_accuracies,
)
from wfilter.metrics.curves import (
    Curve,
    curve,
    deleted,
    inserted,
    normalised_auc,
    order_by_gate,
    random_order,
    relative_confidence,
)
from wfilter.metrics.membership import confidence_attack, entropy_attack
from wfilter.metrics.probe import (
    Probe,
    collect_features,
    find_head,
    linear_probe,
    nearest_class_mean,
    penultimate_features,
)
from wfilter.metrics.reinit import fresh_copy
from wfilter.metrics.relearn import (
    Relearned,
    RelearnSummary,
    few_shot_relearn,
    relearn_summary,
    relearn_time,
)
from wfilter.metrics.zrf import js_divergence, reference_logits, zrf

__all__ = [
    "Curve",
    "Probe",
    "RelearnSummary",
    "Relearned",
    "RowScores",
    "accuracy",
    "aus",
    "average_gap",
    "collect_features",
    "collect_logits",
    "confidence_attack",
    "confusion",
    "confusion_by_row",
    "curve",
    "deleted",
    "entropy_attack",
    "few_shot_relearn",
    "find_head",
    "forget_accuracy",
    "fresh_copy",
    "inserted",
    "js_divergence",
    "linear_probe",
    "nearest_class_mean",
    "normalised_auc",
    "order_by_gate",
    "penultimate_features",
    "random_order",
    "reference_logits",
    "relative_confidence",
    "relearn_summary",
    "relearn_time",
    "retain_accuracy",
    "routing",
    "routing_distance",
    "select_class",
    "set_accuracies",
    "zrf",
]
