"""Run only the part of a network that gates can change; the rest is computed once per image.

Everything a forward computes depends on the image, on the gates, or on both. What depends on the
image alone is the same in every step: it is kept, in half precision, where what depends on gates
reads it. A later forward calls the model as ever, but every function that reads the image alone
returns what was kept, or an empty tensor of its shape where nothing reads its values.

That this gives the model's own logits is not assumed: `record` compares them under random gates,
and nothing is kept for a model where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

Place = tuple[int, int]  # the number of a function's call, and which of the tensors it returned
THE_IMAGE: Place = (-1, 0)


@dataclass(frozen=True)
class Call:
    """What one function of the image alone returned: shapes and types, not values."""

    shapes: tuple[tuple[torch.Size, torch.dtype] | None, ...]
    spec: TreeSpec

    def empty(self, device: torch.device) -> list[Tensor | None]:
        """Tensors of these shapes that take no memory."""
        return [
            None
            if known is None
            else torch.zeros(1, dtype=known[1], device=device).expand(known[0])
            for known in self.shapes
        ]


class _Colours(TorchFunctionMode):
    """Tells the calls of a forward apart: those that read the image, and those that read gates."""

    def __init__(self, images: Tensor, gates: Iterable[Tensor]):
        super().__init__()
        self.of_image: Any = WeakIdKeyDictionary()
        self.of_gates: Any = WeakIdKeyDictionary()
        self.of_image[images] = THE_IMAGE
        for tensor in gates:
            self.of_gates[tensor] = True
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(t in self.of_gates for t in tensors):
            for t in tensors:
                if t in self.of_image:
                    self.read(self.of_image[t])
            result = func(*args, **kwargs)
            for t in tree_leaves(result):
                if isinstance(t, Tensor):
                    self.of_gates[t] = True
                    self.of_image.pop(t, None)  # changed in place
            return result
        # Attributes such as a shape get no number: how often the gated part reads them differs with
        # and without gradients, and would shift the numbers of later calls.
        is_attribute = getattr(func, "__name__", "") == "__get__"
        if is_attribute or not any(t in self.of_image for t in tensors):
            return func(*args, **kwargs)
        number = self.calls
        self.calls += 1
        result = self.image_call(number, lambda: func(*args, **kwargs))
        for leaf, t in enumerate(tree_leaves(result)):
            if isinstance(t, Tensor):
                self.of_image[t] = number, leaf
        return result

    def read(self, place: Place) -> None:
        """A function of gates reads this value of the image's part."""

    def image_call(self, number: int, call: Callable[[], Any]) -> Any:
        """The result of a function that reads the image and no gates."""
        raise NotImplementedError


class _Recording(_Colours):
    """Runs every function, and notes what was called, read and, of ``wanted``, returned."""

    def __init__(self, images: Tensor, gates: Iterable[Tensor], wanted: Iterable[Place] = ()):
        super().__init__(images, gates)
        self.script: list[Call] = []
        self.needed: set[Place] = set()
        self.wanted = set(wanted)
        self.values: dict[Place, Tensor] = {THE_IMAGE: images}

    def read(self, place: Place) -> None:
        self.needed.add(place)

    def image_call(self, number: int, call: Callable[[], Any]) -> Any:
        result = call()
        leaves, spec = tree_flatten(result)
        shapes = tuple((t.shape, t.dtype) if isinstance(t, Tensor) else None for t in leaves)
        self.script.append(Call(shapes, spec))
        for leaf, t in enumerate(leaves):
            if (number, leaf) in self.wanted:
                self.values[number, leaf] = t.detach().clone()  # before anything changes it
        return result


class _Replaying(_Colours):
    """Runs functions of gates; functions of the image alone return what was kept of it."""

    def __init__(
        self,
        images: Tensor,
        gates: Iterable[Tensor],
        script: list[Call],
        values: dict[Place, Tensor],
    ):
        super().__init__(images, gates)
        self.script, self.values = script, values
        self.device = images.device

    def image_call(self, number: int, call: Callable[[], Any]) -> Any:
        if number >= len(self.script):
            raise RuntimeError("the model runs other functions than it did when it was recorded.")
        known = self.script[number]
        if not any(known.shapes):
            return call()  # a shape or another plain value
        leaves: list[Any] = known.empty(self.device)
        for leaf, kind in enumerate(known.shapes):
            if kind is not None and (number, leaf) in self.values:
                leaves[leaf] = self.values[number, leaf].to(kind[1])
        return tree_unflatten(leaves, known.spec)


Forward = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Prefix:
    """What a network computes of an image before gates take part, for batches of one size.

    Attributes:
        forward: From images and what they forget to logits.
        alphas: What the gates are made of.
        shape: Of a batch of images.
        dtype: Of images.
        script: All calls of functions that read the image alone.
        needed: Whose results are read by functions of gates.
        exact: Keep values as they are, not in half precision.
    """

    forward: Forward
    alphas: Tensor
    shape: torch.Size
    dtype: torch.dtype
    script: list[Call] = field(default_factory=list)
    needed: tuple[Place, ...] = ()
    exact: bool = False

    @property
    def batch(self) -> int:
        """Images in a batch: always the same number."""
        return self.shape[0]

    def values(self, images: Tensor, forget: Tensor) -> tuple[Tensor, dict[Place, Tensor]]:
        """The logits, and what is to be kept of these images."""
        with _Recording(images, (self.alphas, forget), self.needed) as mode:
            logits = self.forward(images, forget)
        kept = {place: mode.values[place] for place in self.needed}
        return logits, {k: v if self.exact else _halved(v) for k, v in kept.items()}

    def logits(self, values: dict[Place, Tensor], forget: Tensor) -> Tensor:
        """The logits, from what was kept of the images."""
        images = values.get(THE_IMAGE)
        if images is None:
            images = torch.zeros(1, dtype=self.dtype, device=self.alphas.device).expand(self.shape)
        images = images.to(self.dtype)
        with _Replaying(images, (self.alphas, forget), self.script, values) as mode:
            logits = self.forward(images, forget)
        if mode.calls != len(self.script):
            raise RuntimeError("the model runs other functions than it did when it was recorded.")
        return logits


@torch.no_grad()
def record(forward: Forward, alphas: Tensor, images: Tensor, forget: Tensor) -> Prefix | None:
    """How to run only what gates can change; ``None`` where that gives other logits.

    Args:
        forward: From images and what they forget to logits.
        alphas: All alphas; pinned targets must be pinned already.
        images: A batch; all later ones have as many images.
        forget: Labels ``(batch,)``, some of them classes.

    Example:
        >>> import wfilter
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> model = Sequential(Linear(4, 5), ReLU(), Linear(5, 3))
        >>> wf = wfilter.apply_weight_filtering(model, targets="0.weight")
        >>> x, forget = torch.randn(6, 4), torch.arange(6) % 3
        >>> prefix = record(wf, wf.alphas, x, forget)
        >>> _, kept = prefix.values(x, forget)
        >>> torch.allclose(prefix.logits(kept, forget), wf(x, forget), atol=0.01)
        True
    """
    plain = forward(images, forget)  # also inspects a shape that is new
    if not isinstance(plain, Tensor):
        return None
    with _Recording(images, (alphas, forget)) as mode:
        forward(images, forget)
    needed = tuple(sorted(mode.needed))
    prefix = Prefix(forward, alphas, images.shape, images.dtype, mode.script, needed)
    for exact in (False, True):
        prefix.exact = exact
        if _is_same(prefix, images, forget):
            return prefix
    return None


def _is_same(prefix: Prefix, images: Tensor, forget: Tensor) -> bool:
    """Whether a replay gives the logits of other images than those that were recorded."""
    others = images.flip(0).contiguous()
    try:
        plain, kept = prefix.values(others, forget)
        if any(len(value) != prefix.batch for value in kept.values()):
            return False  # no axis of images to tell them apart by
        again = prefix.logits(kept, forget)
    except (RuntimeError, KeyError, TypeError, IndexError):
        return False
    scale = float(plain.float().std())  # NaN for images with NaN, which nothing equals
    close = scale >= 0 and torch.allclose(again.float(), plain.float(), 0.02, 0.02 * scale)
    return close and again.shape == plain.shape


def _halved(value: Tensor) -> Tensor:
    return value.half() if value.dtype == torch.float32 else value
