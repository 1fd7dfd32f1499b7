"""Which units make a class: numbers read off the alphas, and curves that put them to the test.

A gate that closes when a class is forgotten marks a unit the class needs. Units are ranked by
alpha, which orders them as their gates do and still tells them apart where gates are exactly 0.

Example:
    >>> import torch, wfilter
    >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="weight")
    >>> wf.alpha["weight"].data[2, 1] = -1000.0
    >>> top_units(wf, 2, k=1)
    [Unit(layer='weight', index=1, gate=0.0)]
"""

from wfilter.explain.images import Predictions, exciting_images, predictions, unit_responses
from wfilter.explain.similarity import (
    class_order,
    clusters,
    confusion_similarity,
    head_similarity,
    rank_correlation,
    similarity,
)
from wfilter.explain.units import (
    Graph,
    Unit,
    class_unit_graph,
    closed_by_class,
    closed_by_layer,
    default_layers,
    distance_from_exact,
    head_usage,
    shared_units,
    top_units,
)
from wfilter.metrics.curves import ClassCurves, class_curves, deletion, insertion, mean_curve
from wfilter.metrics.layers import CLOSED, find_layer, live_layers

__all__ = [
    "CLOSED",
    "ClassCurves",
    "Graph",
    "Predictions",
    "Unit",
    "class_curves",
    "class_order",
    "class_unit_graph",
    "closed_by_class",
    "closed_by_layer",
    "clusters",
    "confusion_similarity",
    "default_layers",
    "deletion",
    "distance_from_exact",
    "exciting_images",
    "find_layer",
    "head_similarity",
    "head_usage",
    "insertion",
    "live_layers",
    "mean_curve",
    "predictions",
    "rank_correlation",
    "shared_units",
    "similarity",
    "top_units",
    "unit_responses",
]
