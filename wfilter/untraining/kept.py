"""Activations before the first gate, kept for a sample of images in memory or on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wfilter.core.outputs import logits_of
from wfilter.untraining.prefix import Place, Prefix, record
from wfilter.untraining.reading import Read

IN_MEMORY = 2**30  # bytes of activations, of all images together
ON_DISK = 2**32  # where memory has too little room


@dataclass(frozen=True)
class Blend:
    """Images that are blended with others, by index, and their own weight."""

    other: Tensor
    weight: Tensor

    def part(self, index: Tensor) -> Blend:
        """The blends of some of the images."""
        return Blend(self.other[index], self.weight[index])


class Kept:
    """Logits of a sample's images under any gates, for the least that has to be computed.

    What the network computes before the first gate that moves is kept of every image, in half
    precision: in memory up to 1 GiB, on disk up to 4 GiB. Larger samples, and networks that cannot
    be run from there on (see `wfilter.untraining.prefix`), are read and run anew each time.
    """

    def __init__(
        self, forward: Callable[[Tensor, Tensor], object], alphas: Tensor, read: Read, count: int
    ):
        self.forward: Callable[[Tensor, Tensor], Tensor] = lambda x, f: logits_of(forward(x, f))
        self.alphas, self.read, self.count = alphas, read, count
        self.prefixes: dict[int, Prefix] = {}  # images in a batch -> how to run so many
        self.values: dict[Place, Tensor] = {}
        self.bytes = 0
        self.on_disk = False

    @property
    def where(self) -> str:
        """Where activations are kept, in words."""
        if not self.prefixes:
            return "nothing is kept: every step runs the whole network"
        place = "on disk" if self.on_disk else "in memory"
        return f"activations of {self.count} images are kept {place}, {self.bytes / 2**20:.0f} MiB"

    @torch.no_grad()
    def fill(
        self, sizes: Sequence[int], seen: Callable[[int], None] = lambda count: None
    ) -> Tensor:
        """Run all images once; their logits with open gates, ``(count, num_classes)``.

        Args:
            sizes: How many images later calls may have at once, the largest first.
            seen: Told after each forward how many of its images are new, in their order.
        """
        size = min(sizes[0], self.count)
        nothing = torch.full((size,), -1, device=self.alphas.device)
        first = self.read(torch.arange(size))
        self._record(first, [min(s, size) for s in sizes])
        logits = []
        for part in torch.split(torch.arange(self.count), size):
            padded = torch.cat([part, part[:1].expand(size - len(part))])
            images = self.read(padded)
            if not self.prefixes:
                answered = self.forward(images, nothing)
            else:
                answered, values = self.prefixes[size].values(images, nothing)
                for place, value in values.items():
                    self.values[place][part] = value[: len(part)].cpu()
            logits.append(answered[: len(part)].float().cpu())
            _refuse_no_numbers(logits[-1])
            seen(len(part))
        return torch.cat(logits)

    def _record(self, images: Tensor, sizes: Sequence[int]) -> None:
        """Find out how to run the network from its first gate that moves, and make room."""
        for size in sizes:
            forget = torch.arange(size, device=self.alphas.device) % len(self.alphas)
            prefix = record(self.forward, self.alphas, images[:size], forget)
            if prefix is None or (self.prefixes and prefix.needed != self._any.needed):
                self.prefixes.clear()
                return
            prefix.exact = prefix.exact or (bool(self.prefixes) and self._any.exact)
            self.prefixes[size] = prefix
        nothing = torch.full((sizes[0],), -1, device=self.alphas.device)
        _, values = self.prefixes[sizes[0]].values(images[: sizes[0]], nothing)
        self.bytes = sum(v.nbytes for v in values.values()) // sizes[0] * self.count
        if self.bytes > ON_DISK:
            self.prefixes.clear()
            return
        self.on_disk = self.bytes > IN_MEMORY
        self.values = {place: self._room(value) for place, value in values.items()}

    @property
    def _any(self) -> Prefix:
        return next(iter(self.prefixes.values()))

    def _room(self, like: Tensor) -> Tensor:
        shape = (self.count, *like.shape[1:])
        if not self.on_disk:
            return torch.empty(shape, dtype=like.dtype)
        # The file has no name once it is mapped, and goes when the tensor does.
        with tempfile.TemporaryDirectory(prefix="wfilter-", ignore_cleanup_errors=True) as folder:
            file, size = str(Path(folder, "kept")), self.count * like[0].numel()
            return torch.from_file(file, shared=True, size=size, dtype=like.dtype).view(shape)

    def logits(self, index: Tensor, forget: Tensor, blend: Blend | None = None) -> Tensor:
        """The logits of the images at ``index``, each forgetting what ``forget`` says for it."""
        if not self.prefixes:
            return self.forward(self._blended(self.read, index, blend), forget).float()
        size = min((s for s in self.prefixes if s >= len(index)), default=max(self.prefixes))
        answered = []
        for part in torch.split(torch.arange(len(index)), size):
            whole = torch.cat([part, part[:1].expand(size - len(part))])
            values = {
                place: self._blended(self._reader(place), index[whole], blend and blend.part(whole))
                for place in self.values
            }
            logits = self.prefixes[size].logits(values, forget[whole.to(forget.device)])
            answered.append(logits[: len(part)].float())
        return torch.cat(answered)

    def _reader(self, place: Place) -> Read:
        return lambda index: self.values[place][index].to(self.alphas.device)

    @staticmethod
    def _blended(read: Read, index: Tensor, blend: Blend | None) -> Tensor:
        images = read(index)
        if blend is None or not images.is_floating_point():
            return images
        images, others = images.float(), read(blend.other).float()
        weight = blend.weight.to(images).view(-1, *[1] * (images.ndim - 1))
        return weight * images + (1 - weight) * others


def _refuse_no_numbers(logits: Tensor) -> None:
    """Nothing can be learned from images for which the base model has no answer."""
    bad = int(logits.isnan().any(1).sum())
    if bad:
        raise ValueError(
            f"the base model's logits of {bad} of {len(logits)} images contain NaN. "
            "Look for bad images, or run the model in float32."
        )
