"""The rivals, one function each, all called alike: ``(model, forget, train, ...) -> model``.

``forget`` is a class or a list of classes, ``train`` batches of (images, labels) of *all* classes
that can be read repeatedly. A new model in eval mode comes back; the given one is left untouched.
Defaults are those of the method's paper where it gives them. The learning rate is the one setting
that papers choose anew for each network; given held-out images, `run` chooses it on them and tells
which rates it tried.

Example:
    >>> from wfilter import baselines
    >>> len(baselines.METHODS)
    18
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from wfilter.baselines.bad_teaching import bad_teaching
from wfilter.baselines.boundary_shrink import boundary_shrink
from wfilter.baselines.cse import cse
from wfilter.baselines.delete import delete
from wfilter.baselines.esc import esc
from wfilter.baselines.fine_tuning import fine_tuning
from wfilter.baselines.l1_sparse import l1_sparse
from wfilter.baselines.leace import leace
from wfilter.baselines.logit_mask import logit_mask
from wfilter.baselines.negative_gradients import negative_gradients
from wfilter.baselines.neggrad_plus import neggrad_plus
from wfilter.baselines.original import original
from wfilter.baselines.projection import projection
from wfilter.baselines.random_labels import random_labels
from wfilter.baselines.retrained import retrained
from wfilter.baselines.salun import salun
from wfilter.baselines.scrub import scrub
from wfilter.baselines.ssd import ssd
from wfilter.baselines.tuning import Rival, Tried, run_method
from wfilter.data.batches import Batches

METHODS: Mapping[str, Callable[..., nn.Module]] = {
    "original": original,
    "retrained": retrained,
    "fine_tuning": fine_tuning,
    "neggrad_plus": neggrad_plus,
    "random_labels": random_labels,
    "negative_gradients": negative_gradients,
    "salun": salun,
    "scrub": scrub,
    "ssd": ssd,
    "bad_teaching": bad_teaching,
    "l1_sparse": l1_sparse,
    "delete": delete,
    "boundary_shrink": boundary_shrink,
    "logit_mask": logit_mask,
    "projection": projection,
    "leace": leace,
    "esc": esc,
    "cse": cse,
}
"""Every rival by name, in the order of a table."""


def run(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    methods: Iterable[str] = tuple(METHODS),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    held_out: Batches | None = None,
    seed: int = 0,
) -> dict[str, Rival]:
    """For each method, by name, the model it makes and the seconds that took.

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes.
        methods: names from `METHODS`.
        options: keyword arguments for a method, by its name.
        held_out: batches of all classes on which each method's learning rate is chosen: its
            default where that is good enough, else the best of it, a tenth of it and ten times
            it, which is up to three times the work. Retraining keeps its own rate, and so does a
            method whose options name ``lr``.
        seed: of every method that draws anything, where its options do not say otherwise.

    Example:
        >>> import torch
        >>> batch = (torch.eye(2), torch.arange(2))
        >>> rivals = run(nn.Linear(2, 2), 0, [batch], methods=["logit_mask", "projection"])
        >>> list(rivals)
        ['logit_mask', 'projection']
    """
    methods, options = list(methods), options or {}
    unknown = sorted({*methods, *options} - set(METHODS))
    if unknown:
        raise ValueError(f"unknown method(s) {unknown}; expected some of {list(METHODS)}.")
    rivals = {}
    for name in methods:
        draws = "seed" in inspect.signature(METHODS[name]).parameters
        chosen = {**({"seed": seed} if draws else {}), **options.get(name, {})}
        images = None if name == "retrained" else held_out
        rivals[name] = run_method(METHODS[name], model, forget, train, chosen, held_out=images)
    return rivals


__all__ = [
    "METHODS",
    "Rival",
    "Tried",
    "bad_teaching",
    "boundary_shrink",
    "cse",
    "delete",
    "esc",
    "fine_tuning",
    "l1_sparse",
    "leace",
    "logit_mask",
    "negative_gradients",
    "neggrad_plus",
    "original",
    "projection",
    "random_labels",
    "retrained",
    "run",
    "run_method",
    "salun",
    "scrub",
    "ssd",
]
