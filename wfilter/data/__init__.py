"""Images, batches and models by name."""

from wfilter.data.batches import InMemory
from wfilter.data.images import (
    Augment,
    Batches,
    ImageSet,
    batches,
    hold_out,
    load,
    shift_and_flip,
)

__all__ = [
    "Augment",
    "Batches",
    "ImageSet",
    "InMemory",
    "batches",
    "hold_out",
    "load",
    "shift_and_flip",
]
