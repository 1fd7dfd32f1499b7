"""Keywords that have a new name: the old one works as before, with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed_keywords(**new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take keywords under their old names, too.

    Args:
        new_names: Old name -> new name.

    Example:
        >>> @renamed_keywords(rows="classes")
        ... def count(classes):
        ...     return len(classes)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     count(rows=[1, 2])
        2
        >>> print(caught[0].message)
        count(rows=...) is now count(classes=...).
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in [name for name in kwargs if name in new_names]:
                new, name = new_names[old], function.__name__
                if new in kwargs:
                    raise TypeError(f"{name} got both {new}= and its old name {old}=. Pass {new}=.")
                message = f"{name}({old}=...) is now {name}({new}=...)."
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate
