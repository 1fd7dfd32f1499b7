"""The rivals, one function each, all called alike: ``(model, forget, train, ...) -> model``.

``forget`` is a class or a list of classes, ``train`` batches of (images, labels) of *all* classes
that can be read repeatedly. A new model in eval mode comes back; the given one is left untouched.
Defaults are those of the method's paper where it gives them.

Example:
    >>> from wfilter import baselines
    >>> list(baselines.METHODS)
    ['original', 'retrained', 'random_labels', 'negative_gradients', 'logit_mask', 'projection',
     'ssd', 'scrub', 'salun', 'bad_teaching']
"""

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from wfilter.baselines.bad_teaching import bad_teaching
from wfilter.baselines.logit_mask import logit_mask
from wfilter.baselines.negative_gradients import negative_gradients
from wfilter.baselines.original import original
from wfilter.baselines.projection import projection
from wfilter.baselines.random_labels import random_labels
from wfilter.baselines.retrained import retrained
from wfilter.baselines.salun import salun
from wfilter.baselines.scrub import scrub
from wfilter.baselines.ssd import ssd
from wfilter.data.running import Batches

METHODS: Mapping[str, Callable[..., nn.Module]] = {
    "original": original,
    "retrained": retrained,
    "random_labels": random_labels,
    "negative_gradients": negative_gradients,
    "logit_mask": logit_mask,
    "projection": projection,
    "ssd": ssd,
    "scrub": scrub,
    "salun": salun,
    "bad_teaching": bad_teaching,
}
"""Every rival by name, in the order of a table."""


@dataclass(frozen=True)
class Rival:
    """The model a method made and the seconds it took.

    Example:
        >>> Rival(nn.Identity(), seconds=0.5).seconds
        0.5
    """

    model: nn.Module
    seconds: float


def run(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    methods: Iterable[str] = tuple(METHODS),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
) -> dict[str, Rival]:
    """The model of each method, by name, timed.

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes.
        methods: names from `METHODS`.
        options: keyword arguments for a method, by its name.
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
        start = time.perf_counter()
        draws = "seed" in inspect.signature(METHODS[name]).parameters
        chosen = {**({"seed": seed} if draws else {}), **options.get(name, {})}
        changed = METHODS[name](model, forget, train, **chosen)
        rivals[name] = Rival(changed, time.perf_counter() - start)
    return rivals


__all__ = [
    "METHODS",
    "Rival",
    "bad_teaching",
    "logit_mask",
    "negative_gradients",
    "original",
    "projection",
    "random_labels",
    "retrained",
    "run",
    "salun",
    "scrub",
    "ssd",
]
