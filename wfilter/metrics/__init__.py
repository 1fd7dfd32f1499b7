"""Metrics of forgetting, a file for each: its formula, its columns, and how it is measured.

All accuracies and shares are fractions in 0..1. Every module of this folder is imported here,
and registers its metric when imported (see `wfilter.metrics.registry`).

Example:
    >>> import torch
    >>> from wfilter import metrics
    >>> logits, labels = torch.eye(3)[[1, 1, 2]], torch.tensor([0, 1, 2])
    >>> metrics.forget_accuracy(logits, labels, forget=0).mean
    0.0
"""

import importlib
import pkgutil

from wfilter.data.running import collect_logits, select_class
from wfilter.metrics.accuracy import (
    Answers,
    accuracy,
    answers,
    aus,
    average_gap,
    both_accuracies,
    confusion,
    confusion_by_row,
    forget_accuracy,
    retain_accuracy,
    routing,
    routing_distance,
)
from wfilter.metrics.cells import Cell, Column, RowScores
from wfilter.metrics.curves import (
    ClassCurves,
    Curve,
    class_curves,
    curve,
    deleted,
    inserted,
    normalised_auc,
    order_by_gate,
    random_order,
    relative_confidence,
)
from wfilter.metrics.features import collect_features, find_head, penultimate_features
from wfilter.metrics.few_shot import few_shot_relearn
from wfilter.metrics.membership import confidence_attack, entropy_attack
from wfilter.metrics.method import Method
from wfilter.metrics.probe import Probe, linear_probe, nearest_class_mean
from wfilter.metrics.problem import Budget, Problem
from wfilter.metrics.registry import METRICS, Measured, measure, metric
from wfilter.metrics.reinit import fresh_copy
from wfilter.metrics.relearn import (
    Relearned,
    RelearnSummary,
    relearn_summary,
    relearn_time,
)
from wfilter.metrics.sets import set_accuracies
from wfilter.metrics.zrf import js_divergence, reference_logits, zrf

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "METRICS",
    "Answers",
    "Budget",
    "Cell",
    "ClassCurves",
    "Column",
    "Curve",
    "Measured",
    "Method",
    "Probe",
    "Problem",
    "RelearnSummary",
    "Relearned",
    "RowScores",
    "accuracy",
    "answers",
    "aus",
    "average_gap",
    "both_accuracies",
    "class_curves",
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
    "measure",
    "metric",
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
