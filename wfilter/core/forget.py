"""Read ``forget``: class, name, set, labels or sets become rows; others are refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Union

import numpy as np
import torch
from torch import Tensor

from wfilter.core.gates import class_index, ends, readable, set_vector

Forget = Union[
    None,
    int,
    str,
    "set[int]",
    "set[str]",
    "frozenset[int]",
    "frozenset[str]",
    Tensor,
    Sequence[int],
    Sequence[str],
    "np.ndarray[Any, Any]",
]

# One class or set for the whole batch: its rows, known to Python.
Rows = tuple[int, ...]


def read_forget(
    forget: object, batch: int | None, num_classes: int, class_names: Sequence[str] | None
) -> Rows | Tensor:
    """The rows of one class or set, or a checked tensor with an entry per sample.

    Args:
        forget: One class (int, name, NumPy integer, tensor without axes) or a Python set of them
            for all samples; per sample, labels ``(batch,)`` or a bool matrix ``(batch,
            num_classes)`` as tensor or NumPy array, or a list with one class for each sample.
        batch: Number of samples; ``None`` takes the length of ``forget`` itself.
        num_classes: Number of rows.
        class_names: Names of the rows, or ``None``.

    Example:
        >>> read_forget({2, 0}, 5, 3, None), read_forget([1, -1], 2, 3, None)
        ((0, 2), tensor([ 1, -1]))
    """
    if isinstance(forget, (list, tuple)):
        forget = _labels(forget, num_classes, class_names)
    elif isinstance(forget, np.ndarray):
        forget = _from_numpy(forget, num_classes, class_names)
    if isinstance(forget, Tensor) and forget.ndim:
        check_per_sample(forget, forget.shape[0] if batch is None else batch, num_classes)
        return forget
    members = forget if isinstance(forget, (set, frozenset)) else [forget]
    numbers: list[Any] = [_plain(member) for member in members]
    if any(isinstance(m, bool) or not isinstance(m, (int, str)) for m in numbers):
        raise TypeError(
            f"forget={forget!r} is not understood. Pass one class (int or name), a set of classes "
            "such as {1, 2}, int64 labels (batch,) or a bool matrix (batch, num_classes)."
        )
    return tuple(sorted({class_index(n, num_classes, class_names) for n in numbers}))


def one_for_all(
    forget: object, num_classes: int, class_names: Sequence[str] | None, where: str
) -> Rows:
    """The rows of one class or set; labels per sample are refused in the name of ``where``."""
    rows = None if forget is None else read_forget(forget, None, num_classes, class_names)
    if not isinstance(rows, tuple):
        raise TypeError(
            f"{where} takes one class or one set of classes for all samples. Pass labels per "
            "sample to the call: wf(x, forget=labels)."
        )
    return rows


def per_sample(wanted: Rows | Tensor, batch: int, num_classes: int, device: torch.device) -> Tensor:
    """Labels or sets on the right device; one class or set is repeated for the batch."""
    if isinstance(wanted, Tensor):
        return wanted.to(device, non_blocking=True)
    if len(wanted) == 1:
        return torch.full((batch,), wanted[0], device=device)
    return set_vector(wanted, num_classes, device).expand(batch, -1)


def check_per_sample(forget: Tensor, batch: int, num_classes: int) -> None:
    """Refuse labels or sets of the wrong dtype, length or range.

    Values are only looked at where they are ``readable``; elsewhere the gather itself stops at a
    label out of range.
    """
    if forget.dtype == torch.bool:
        if tuple(forget.shape) != (batch, num_classes):
            raise ValueError(
                f"forget is a bool tensor of shape {tuple(forget.shape)}.\n"
                f"A set of classes per sample needs shape ({batch}, {num_classes}); one class per "
                "sample needs int64 labels."
            )
        return
    if forget.dtype != torch.int64:
        raise TypeError(
            f"forget has dtype {str(forget.dtype).removeprefix('torch.')}. Labels must be int64 "
            "(use labels.long()) and sets bool: other dtypes would index as masks or be rounded."
        )
    if forget.ndim != 1 or forget.shape[0] != batch:
        raise ValueError(
            f"forget has {len(forget) if forget.ndim == 1 else tuple(forget.shape)} entries for a "
            f"batch of {batch}. Pass one label per sample, or one int for all (a set of classes "
            "for all: {1, 2})."
        )
    if readable(forget) and batch:
        low, high = ends(forget)
        if low < -1 or high >= num_classes:
            bad = low if low < -1 else high
            raise ValueError(
                f"forget={bad} is outside 0..{num_classes - 1}: these filters were made for "
                f"{num_classes} classes. Use -1 for a sample that forgets nothing."
            )


def refuse_other_classes(class_names: tuple[str, ...] | None, data: object) -> None:
    """Stop where data names its classes otherwise: a label would reach another class's row.

    Names are looked for in ``data.class_names`` and ``data.dataset.class_names``.
    """
    inner = getattr(data, "dataset", None)
    names = getattr(data, "class_names", None) or getattr(inner, "class_names", None)
    if names is None or class_names is None or tuple(names) == class_names:
        return
    pairs = zip_longest(class_names, names)
    row, (ours, theirs) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
    raise ValueError(
        f"class {row} is {ours!r} for these filters, but {theirs!r} in the data.\n"
        "Give the data the order of wf.class_names."
    )


def _labels(entries: Sequence[Any], num_classes: int, class_names: Sequence[str] | None) -> Tensor:
    """A list with one class for each sample, by index (-1: nothing) or name, as int64 labels."""
    plain = [_plain(entry) for entry in entries]
    if any(isinstance(p, bool) or not isinstance(p, (int, str)) for p in plain):
        raise TypeError(
            f"forget={list(entries)!r} is not understood. A list holds one class (int or name) for "
            "each sample; sets per sample are a bool matrix (batch, num_classes)."
        )
    return torch.tensor(
        [class_index(p, num_classes, class_names) if isinstance(p, str) else p for p in plain],
        dtype=torch.int64,
    )


def _from_numpy(
    forget: np.ndarray[Any, Any], num_classes: int, class_names: Sequence[str] | None
) -> Tensor:
    """The same entries as a tensor; names are those of classes."""
    if forget.dtype.kind in "OSU":
        return _labels(forget.tolist(), num_classes, class_names)
    return torch.from_numpy(np.ascontiguousarray(forget).reshape(forget.shape))


def _plain(member: object) -> object:
    """A Python int for a NumPy integer or an integer tensor without axes."""
    if isinstance(member, np.integer):
        return int(member)
    if isinstance(member, Tensor) and not member.ndim and not member.is_floating_point():
        return member.item()  # a bool stays one, and is refused
    return member


def as_sets(forget: Tensor, num_classes: int) -> Tensor:
    """Bool ``(batch, num_classes)`` for labels or sets.

    Example:
        >>> as_sets(torch.tensor([1, -1]), 2)
        tensor([[False,  True],
                [False, False]])
    """
    if forget.dtype == torch.bool:
        return forget
    return forget[:, None] == torch.arange(num_classes, device=forget.device)
