"""Recipes as files have them: settings of a recipe, also as earlier versions wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from wfilter.untraining.objectives import Auto, Distill, Linear, Paper, Recipe, Reroute

OBJECTIVES: dict[str, type[Recipe]] = {
    kind.objective: kind for kind in (Paper, Distill, Linear, Reroute, Auto)
}

# Files of earlier versions list the settings of all objectives. Those of another objective do
# nothing as long as they have one of these values.
_IDLE: dict[str, tuple[object, ...]] = {
    "optimiser": ("solver",),
    "learning_rate": (0.0,),
    "schedule": ("constant",),
    "expansion": (3,),
    "lambda_retain": (1.0,),
    "lambda_forget": (1.0,),
    "lambda_deep": (0.0,),
    "shrinkage": (0.01,),
    "detectors": ("auto",),
    "lambda_fisher": (0.0,),
    "fisher_images": (1500,),
    "alike": (0,),
    "regulariser": ("global",),
    "epsilon": (1e-6,),
    "margin": (5.0,),
    "pairs": ("mixed",),
    "forget_share": (0.5,),
    "set_share": (0.0,),
    "max_set": (5,),
    "blend": (0.0,),
    "gates": ("soft",),
    "start": (None,),
    "evaluations": (5,),
    "patience": (0, 10),
}


def own_settings(kind: type[Recipe], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those of other objectives that do nothing, as old files have them.

    Example:
        >>> own_settings(Paper, {"expansion": 2, "blend": 0.0, "objective": "paper"})
        {'expansion': 2}
    """
    known = {field.name for field in fields(kind)}
    kept = {k: v for k, v in values.items() if k in known or v not in _IDLE.get(k, ())}
    if kept.pop("objective", kind.objective) != kind.objective:
        raise ValueError(
            f"objective={values['objective']!r} is not that of this recipe, {kind.objective!r}. "
            "Choose the recipe by its name."
        )
    return kept


def recipe_from(values: Mapping[str, Any]) -> Recipe:
    """The recipe that ``to_dict`` gave these values, also by an earlier version.

    Raises:
        ValueError: They are no recipe's.

    Example:
        >>> recipe_from(Linear("mine").to_dict()) == Linear("mine")
        True
    """
    kind = OBJECTIVES.get(str(values.get("objective")))
    if kind is None:
        raise ValueError(
            f"objective={values.get('objective')!r} is unknown. Use one of {', '.join(OBJECTIVES)}."
        )
    kept = own_settings(kind, values)
    if "lambda_deep" in kept:
        raise ValueError(
            f"lambda_deep={kept['lambda_deep']!r} put a term on the features, which is gone: "
            "feature rows hide more and cost less. Leave it out, and see recipe 'reroute'."
        )
    strange = sorted(set(kept) - {field.name for field in fields(kind)})
    if strange:
        raise ValueError(
            f"{strange[0]}={kept[strange[0]]!r} is no setting of the objective {kind.objective!r}."
        )
    return kind(**kept)
