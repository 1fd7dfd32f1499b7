"""Per-class weight filters for image classifiers."""

from wfilter.checkpoint import load
from wfilter.model import FilteredModel
from wfilter.recipes import RECIPES, Recipe
from wfilter.rules import register
from wfilter.surgery import apply_weight_filtering, find_targets, remove_weight_filtering
from wfilter.untrain import InMemory, untrain

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "FilteredModel",
    "InMemory",
    "Recipe",
    "apply_weight_filtering",
    "find_targets",
    "load",
    "register",
    "remove_weight_filtering",
    "untrain",
]
