"""A bounded sample of the training images, so many of each class, some of them held out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wfilter.core.model import FilteredModel
from wfilter.core.outputs import logits_of
from wfilter.data.batches import Batches, InMemory, read_batches, split_batch
from wfilter.data.images import Augment, ImageBatches
from wfilter.untraining.reading import Read, all_images, rows_of

MOST_BYTES = 2**30  # of images in memory, where batches have to be copied


@dataclass(frozen=True)
class Sample:
    """Images by index, and which of them are only for judging.

    Attributes:
        read: Gives the images of some indices; those to learn from augmented, if the data are.
        rows: The class of each, int64 ``(count,)``.
        labels: All classes of each, bool ``(count, num_classes)``, where they may have several.
        held: Bool ``(count,)``: no step sees these.
    """

    read: Read
    rows: Tensor
    labels: Tensor | None
    held: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def judged(self) -> Tensor:
        """Bool ``(count,)``: held-out images, and all of the classes of which none is held out."""
        return self.held | ~torch.isin(self.rows, self.rows[self.held])


def take_sample(
    wf: FilteredModel,
    train: Batches | InMemory,
    val: Batches | InMemory | None,
    per_class: int,
    held_out: float,
    seed: int,
) -> Sample:
    """So many images of each class; ``val``, where given, instead of held-out ones of ``train``."""
    generator = torch.Generator().manual_seed(seed)
    pick, rows, labels, augment = _some(wf, train, per_class, seed, generator)
    device = wf.alphas.device
    if val is None:
        held = _held(rows, held_out, generator)
        return Sample(_reader(pick, augment, held, seed, device), rows, labels, held)
    pick_val, rows_val, labels_val, _ = _some(wf, val, per_class, seed, generator)
    count = len(rows)

    def either(index: Tensor) -> Tensor:
        first, second = index[index < count], index[index >= count] - count
        parts = [f(i) for f, i in ((pick, first), (pick_val, second)) if len(i)]
        place = torch.cat([(index < count).nonzero()[:, 0], (index >= count).nonzero()[:, 0]])
        return torch.cat(parts)[place.argsort()]

    both = None if labels is None or labels_val is None else torch.cat([labels, labels_val])
    held = torch.arange(count + len(rows_val)) >= count
    return Sample(
        _reader(either, augment, held, seed, device), torch.cat([rows, rows_val]), both, held
    )


def _reader(
    pick: Read, augment: Augment | None, held: Tensor, seed: int, device: torch.device
) -> Read:
    """Images on the device: held ones as they are, others augmented, each time in the same way."""

    def moved(number: int, image: Tensor) -> Tensor:
        if augment is None or bool(held[number]):
            return image
        # One image at a time: its own generator, whatever else is read with it.
        return augment(image, torch.Generator().manual_seed(seed * 1_000_003 + number))

    def read(index: Tensor) -> Tensor:
        images = pick(index)
        if augment is not None:
            images = torch.cat([moved(*one) for one in zip(index.tolist(), torch.split(images, 1))])
        return images.to(device)

    return read


def _some(
    wf: FilteredModel,
    data: Batches | InMemory,
    per_class: int,
    seed: int,
    generator: torch.Generator,
) -> tuple[Read, Tensor, Tensor | None, Augment | None]:
    if isinstance(data, InMemory | ImageBatches):
        pick, count, labels, augment = all_images(data, seed)
        rows = _rows(wf, pick, count, labels, generator)
        chosen = _first_of_each(torch.randperm(count, generator=generator), rows, per_class)
    else:
        pick, rows, labels = _from_batches(wf, data, per_class, seed, generator)
        chosen, augment = torch.arange(len(rows)), None
    many = labels if labels is not None and labels.ndim == 2 else None
    several = None if many is None else many[chosen].cpu() > 0
    return lambda index: pick(chosen[index]), rows[chosen], several, augment


@torch.no_grad()
def _rows(
    wf: FilteredModel, pick: Read, count: int, labels: Tensor | None, generator: torch.Generator
) -> Tensor:
    """The class of all images; where they have no labels, the base model's answer."""
    base = torch.empty(0)
    if labels is None:
        parts = torch.split(torch.arange(count), 100)
        base = torch.cat([logits_of(wf(pick(part).to(wf.alphas.device))).cpu() for part in parts])
    return rows_of(labels, base, wf.num_classes, generator)


def _first_of_each(order: Tensor, rows: Tensor, per_class: int) -> Tensor:
    """The first images of each class in this order."""
    kept = [order[rows[order] == row][:per_class] for row in torch.unique(rows).tolist()]
    return torch.cat(kept).sort().values


@torch.no_grad()
def _from_batches(
    wf: FilteredModel, data: Batches, per_class: int, seed: int, generator: torch.Generator
) -> tuple[Read, Tensor, Tensor | None]:
    """The first images of each class that come by; stops reading once all classes are full."""
    torch.manual_seed(seed * 1_000_003)  # loaders shuffle by the global RNG
    room = torch.full((wf.num_classes,), per_class)
    parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for batch in read_batches(data):
        images, labels = split_batch(batch)
        base = (
            logits_of(wf(images.to(wf.alphas.device))).cpu() if labels is None else torch.empty(0)
        )
        rows = rows_of(labels, base, wf.num_classes, generator)
        earlier = (rows[:, None] == rows[None]).tril(-1).sum(1)  # of the same class in this batch
        new = earlier < room[rows]
        room = (room - torch.bincount(rows[new], minlength=len(room))).clamp(min=0)
        parts.append((images[new], rows[new], None if labels is None else labels[new]))
        if not bool(room.any()) or sum(part[0].nbytes for part in parts) > MOST_BYTES:
            break
    if not sum(len(part[1]) for part in parts):
        raise ValueError("train has no batches. Check the data and drop_last.")
    known = [labels for _, _, labels in parts if labels is not None]
    if known and len(known) < len(parts):
        raise ValueError("some batches have labels and some have none. Give all or none.")
    images = torch.cat([part[0] for part in parts])
    return (
        images.__getitem__,
        torch.cat([part[1] for part in parts]),
        torch.cat(known) if known else None,
    )


def _held(rows: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Which images are held out: of classes with five or more a share, at least one of them."""
    held = torch.zeros(len(rows), dtype=torch.bool)
    for row in torch.unique(rows).tolist():
        here = (rows == row).nonzero()[:, 0]
        if len(here) >= 5 and share:
            count = max(1, round(share * len(here)))
            held[here[torch.randperm(len(here), generator=generator)[:count]]] = True
    return held
