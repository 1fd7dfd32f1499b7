"""Keywords and fields that have a new name: the old one works as before, with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


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
                new, name = new_names[old], function.__qualname__.removesuffix(".__init__")
                if new in kwargs:
                    raise TypeError(f"{name} got both {new}= and its old name {old}=. Pass {new}=.")
                message = f"{name}({old}=...) is now {name}({new}=...)."
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate


def renamed_fields(**new_names: str) -> Callable[[C], C]:
    """Let a dataclass be made and read with the old names of fields, too.

    Args:
        new_names: Old name -> new name.

    Example:
        >>> from dataclasses import dataclass
        >>> @renamed_fields(rows="classes")
        ... @dataclass
        ... class Asked:
        ...     classes: int
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     Asked(rows=2).rows
        2
        >>> print(*(w.message for w in caught))
        Asked(rows=...) is now Asked(classes=...). Asked.rows is now Asked.classes.
    """

    def decorate(cls: C) -> C:
        for old, new in new_names.items():
            setattr(cls, old, _old_field(cls.__name__, old, new))
        init = cls.__init__  # type: ignore[misc]
        cls.__init__ = renamed_keywords(**new_names)(init)  # type: ignore[misc]
        return cls

    return decorate


def _old_field(owner: str, old: str, new: str) -> property:
    def read(self: Any) -> Any:
        warnings.warn(f"{owner}.{old} is now {owner}.{new}.", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(read, doc=f"The old name of ``{new}``.")
