"""What the alphas start from: which targets take part, and how close to closing their gates are."""

from __future__ import annotations

import math

import torch

from wfilter.core.model import FilteredModel
from wfilter.untraining.objectives import Linear, Stepwise


def prepare_alphas(wf: FilteredModel, recipe: Stepwise | Linear) -> None:
    """In place: pin shallow targets open, and start fresh gates where the recipe says.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="weight")
        >>> prepare_alphas(wf, wfilter.RECIPES["distill"])
        >>> float(wf.alphas.detach()[0, 0])
        1.0
    """
    start = recipe.start if isinstance(recipe, Stepwise) else None
    wf.hard = isinstance(recipe, Stepwise) and recipe.gates == "hard"
    wf.alphas.requires_grad_(True)
    names = [target.name for target in wf.targets]
    count = max(1, math.ceil(recipe.depth * len(names)))
    if recipe.depth < 1:
        wf.pin_open(names[: len(names) - count])
    if start is not None:
        with torch.no_grad():
            for name in names[len(names) - count :]:
                alpha = wf.alpha[name]
                if bool((alpha == alpha.flatten()[0]).all()):
                    alpha.fill_(start)
