"""Recipes by name, every constant with its source.

Derive your own in one line: ``dataclasses.replace(RECIPES["paper"], lambda_forget=100)``.
"""

from __future__ import annotations

from wfilter.untraining.objectives import Auto, Distill, Linear, Paper, Recipe, Reroute

# Sections "Training" and "Implementation details" of the paper: SGD with learning rate 100, chi 3,
# lambda 1 / 10 / 1 (100 for ViT), validation five times an epoch, patience 10. The paper tells no
# epsilon. At 1e-6 the first step on digits sends alphas to -40,000 and nothing is kept (Acc_r 11);
# at 0.1 Acc_r is 75 after 200 steps and at 1 it is 91, each with Acc_f 0.
PAPER = Paper("paper", lambda_forget=10.0, epsilon=1.0)
PAPER_VIT = Paper("paper-vit", lambda_forget=100.0, epsilon=1.0)
# Ours; `benchmarks/untraining.py --ablations` shows what each choice is worth.
DISTILL = Distill(
    "distill",
    optimiser="row_adam",
    learning_rate=0.1,
    set_share=0.75,
    blend=0.6,
    gates="hard",
    start=1.0,
    depth=0.25,
)
# For small or narrow models, where exact gates on the deepest quarter leave too few units to choose
# from: soft gates on every target, one class at a time.
DISTILL_SOFT = Distill("distill-soft", margin=4.0, blend=0.5)
# For very many classes with a few images of each: what a row's images and those most like them ask
# for, at the least cost to all others, solved instead of learned. Measured by
# `benchmarks/imagenet.py` on 10,368 units.
LINEAR = Linear("linear")
# No gates: features of a forgotten class are drawn anew from others. Measured by
# `benchmarks/feature_rows.py`; its constants were chosen on training images.
REROUTE = Reroute("reroute")
# The default: what the others leave to choose, it chooses by looking at the model and the images.
AUTO = Auto("auto")

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (PAPER, PAPER_VIT, DISTILL, DISTILL_SOFT, LINEAR, REROUTE, AUTO)
}


def get_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe by name, or the recipe itself.

    Example:
        >>> get_recipe("paper").name
        'paper'
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is unknown. Use one of {', '.join(RECIPES)}.")
    return RECIPES[recipe]
