"""Per-class weight filters for image classifiers.

Every name is read on first use, so that importing wfilter itself costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wfilter import baselines, data, explain, metrics, page, plots, serve
    from wfilter.core.attach import (
        apply_weight_filtering,
        find_targets,
        remove_weight_filtering,
    )
    from wfilter.core.model import FilteredModel
    from wfilter.core.prune import Pruned, prune
    from wfilter.core.rules import register
    from wfilter.data import zoo
    from wfilter.data.batches import InMemory
    from wfilter.evaluation import bench
    from wfilter.evaluation.audit import Audit, audit
    from wfilter.evaluation.report import Report
    from wfilter.evaluation.run import compare, evaluate
    from wfilter.files.checkpoint import load
    from wfilter.files.export import export
    from wfilter.files.exported import load_exported
    from wfilter.files.pruned import load_pruned, save_pruned
    from wfilter.metrics.problem import Budget
    from wfilter.untraining.loop import untrain
    from wfilter.untraining.objectives import Recipe
    from wfilter.untraining.recipes import RECIPES

__version__ = "0.2.0"

__all__ = [
    "RECIPES",
    "Audit",
    "Budget",
    "FilteredModel",
    "InMemory",
    "Pruned",
    "Recipe",
    "Report",
    "apply_weight_filtering",
    "audit",
    "baselines",
    "bench",
    "compare",
    "data",
    "evaluate",
    "explain",
    "export",
    "find_targets",
    "load",
    "load_exported",
    "load_pruned",
    "metrics",
    "page",
    "plots",
    "prune",
    "register",
    "remove_weight_filtering",
    "save_pruned",
    "serve",
    "untrain",
    "zoo",
]

# Public name -> the module that defines it; a module itself where the two end alike.
_HOMES = {
    "RECIPES": "untraining.recipes",
    "Audit": "evaluation.audit",
    "Budget": "metrics.problem",
    "FilteredModel": "core.model",
    "InMemory": "data.batches",
    "Pruned": "core.prune",
    "Recipe": "untraining.objectives",
    "Report": "evaluation.report",
    "apply_weight_filtering": "core.attach",
    "audit": "evaluation.audit",
    "compare": "evaluation.run",
    "evaluate": "evaluation.run",
    "export": "files.export",
    "find_targets": "core.attach",
    "load": "files.checkpoint",
    "load_exported": "files.exported",
    "load_pruned": "files.pruned",
    "prune": "core.prune",
    "register": "core.rules",
    "remove_weight_filtering": "core.attach",
    "save_pruned": "files.pruned",
    "untrain": "untraining.loop",
}
_MODULES = {
    "baselines": "baselines",
    "bench": "evaluation.bench",
    "data": "data",
    "explain": "explain",
    "metrics": "metrics",
    "page": "page",
    "plots": "plots",
    "serve": "serve",
    "zoo": "data.zoo",
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for."""
    if name in _MODULES:
        value: Any = importlib.import_module(f"wfilter.{_MODULES[name]}")
    elif name in _HOMES:
        value = getattr(importlib.import_module(f"wfilter.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'wfilter' has no attribute {name!r}")
    globals()[name] = value  # from now on an ordinary attribute
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
