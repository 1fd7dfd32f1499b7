"""Per-class weight filters for image classifiers."""

from wfilter.checkpoint import load
from wfilter.columns import Budget
from wfilter.evaluate import compare, evaluate
from wfilter.export import export
from wfilter.model import FilteredModel
from wfilter.recipes import RECIPES, Recipe
from wfilter.report import Report
from wfilter.rules import register
from wfilter.surgery import apply_weight_filtering, find_targets, remove_weight_filtering
from wfilter.untrain import InMemory, untrain

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "Budget",
    "FilteredModel",
    "InMemory",
    "Recipe",
    "Report",
    "apply_weight_filtering",
    "compare",
    "evaluate",
    "export",
    "find_targets",
    "load",
    "register",
    "remove_weight_filtering",
    "untrain",
]
