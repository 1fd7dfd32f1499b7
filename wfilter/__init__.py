"""Per-class weight filters for image classifiers.

`wfilter.explain`, `plots`, `page`, `baselines`, `metrics`, `data` and `zoo` are read on first use,
so that importing wfilter stays light.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from wfilter.checkpoint import load
from wfilter.columns import Budget
from wfilter.evaluate import compare, evaluate
from wfilter.export import export
from wfilter.model import FilteredModel
from wfilter.reading import InMemory
from wfilter.recipes import RECIPES, Recipe
from wfilter.report import Report
from wfilter.rules import register
from wfilter.surgery import apply_weight_filtering, find_targets, remove_weight_filtering
from wfilter.untrain import untrain

if TYPE_CHECKING:
    from wfilter import baselines, bench, data, explain, metrics, page, plots, zoo  # noqa: F401

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

_ON_FIRST_USE = ("baselines", "bench", "data", "explain", "metrics", "page", "plots", "zoo")


def __getattr__(name: str) -> ModuleType:
    """A submodule, without an import of its own."""
    if name in _ON_FIRST_USE:
        return importlib.import_module(f"wfilter.{name}")
    raise AttributeError(f"module 'wfilter' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
