"""Models and datasets of the user's own, given as ``package.module:function``."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any


def find_function(module: str, name: str, others: str) -> Callable[..., Any]:
    """The function ``name`` of a module; the working directory is searched too.

    Args:
        module: Its dotted name.
        name: Of the function.
        others: What else could have stood before the colon, for the error.

    Raises:
        ValueError: There is no such module, or no such function in it.

    Example:
        >>> find_function("math", "sqrt", "")(9)
        3.0
    """
    function = getattr(_import(module, others), name, None)
    if not callable(function):
        known = [key for key, value in vars(sys.modules[module]).items() if callable(value)]
        raise ValueError(unknown_name(f"function of {module}", name, known))
    checked: Callable[..., Any] = function
    return checked


def unknown_name(argument: str, value: str, known: Iterable[str]) -> str:
    """The error text for an unknown name, with the closest known names.

    Example:
        >>> unknown_name("model", "resnet81", ["resnet18", "vgg16"])
        "model 'resnet81' is not known. Closest names: resnet18."
    """
    known = list(known)
    closest = difflib.get_close_matches(value, known, 3, cutoff=0.4) or known[:3]
    return f"{argument} {value!r} is not known. Closest names: {', '.join(closest)}."


def _import(module: str, others: str) -> Any:
    sys.path.insert(0, os.getcwd())  # a console script's path lacks the working directory
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{module!r} is neither {others} nor a module that can be imported. Write SOURCE:NAME, "
            "or package.module:function."
        ) from error
    finally:
        sys.path.remove(os.getcwd())
