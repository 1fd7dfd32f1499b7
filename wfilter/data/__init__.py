"""Images, batches and models by name."""

import warnings
from typing import Any

from wfilter.data.batches import InMemory
from wfilter.data.images import (
    Augment,
    ImageBatches,
    ImageSet,
    batches,
    hold_out,
    load,
    shift_and_flip,
)

__all__ = [
    "Augment",
    "ImageBatches",
    "ImageSet",
    "InMemory",
    "batches",
    "hold_out",
    "load",
    "shift_and_flip",
]


def __getattr__(name: str) -> Any:
    """`ImageBatches` by its old name, ``Batches``, with a warning."""
    if name == "Batches":
        warnings.warn("data.Batches is now data.ImageBatches.", DeprecationWarning, stacklevel=2)
        return ImageBatches
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
