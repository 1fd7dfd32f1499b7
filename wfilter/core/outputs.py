"""What a model takes and returns: the one place that knows where images and logits are.

A classifier may return a tensor, a tuple, a dict, a dataclass or a Hugging Face ``ModelOutput``.
Everything that needs logits asks ``logits_of``; everything that changes or joins outputs takes them
apart into tensors first, so that whatever comes along with the logits is carried along.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# The size of an image, and of each other input its name and what can change a model's way.
Key = tuple[tuple[int, ...], tuple[tuple[str, str], ...]]

# Names under which models keep their logits, likeliest first.
_NAMES = ("logits", "output", "out", "pred", "predictions", "scores")


class Inputs(NamedTuple):
    """What a forward was given: the images, and all else by keyword.

    ``keyword`` is the name the images came under, ``None`` where they are the first argument.
    """

    images: Tensor
    keyword: str | None
    others: dict[str, Any]

    def run(self, model: Callable[..., Any]) -> Any:
        """The model's output for these inputs."""
        if self.keyword is None:
            return model(self.images, **self.others)
        return model(**{self.keyword: self.images}, **self.others)

    @property
    def key(self) -> Key:
        """Equal for inputs that take the same way through a model: sizes, and other inputs."""
        return tuple(self.images.shape[1:]), self._other_keys() if self.others else ()

    def _other_keys(self) -> tuple[tuple[str, str], ...]:
        own = self.per_sample()
        keys = ((k, _key_of(v, k in own)) for k, v in self.others.items())
        return tuple(sorted(keys))

    def per_sample(self) -> dict[str, Tensor]:
        """The other inputs that have one entry per image: tensors as long as the batch."""
        named = self.others.items()
        return {k: v for k, v in named if isinstance(v, Tensor) and v.shape[:1] == self.shape}

    @property
    def need_gradients(self) -> bool:
        """Whether a gradient of any of them is wanted."""
        others = (v for v in self.others.values() if isinstance(v, Tensor))
        return self.images.requires_grad or any(v.requires_grad for v in others)

    @property
    def shape(self) -> torch.Size:
        """``(batch,)``."""
        return self.images.shape[:1]

    def with_images(self, images: Tensor, own: Mapping[str, Tensor] | None = None) -> Inputs:
        """The same call with other images, and with other inputs that belong to them."""
        return Inputs(images, self.keyword, {**self.others, **(own or {})})

    def of_samples(self, index: Tensor) -> Inputs:
        """The samples at ``index``, of the images and of what belongs to them."""
        own = {name: value[index.to(value.device)] for name, value in self.per_sample().items()}
        return self.with_images(self.images[index.to(self.images.device)], own)

    def drawn(self, count: int) -> Inputs:
        """So many samples with random images, the same in every call; what belongs to them repeats.

        An empty batch has nothing to repeat, and gives images alone.
        """
        some = self.of_samples(torch.arange(count) % len(self.images)) if len(self.images) else self
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(count, *self.images.shape[1:], generator=generator)
        return some.with_images(images.to(self.images))

    def singly(self) -> Iterator[Inputs]:
        """One sample after the other."""
        for sample in range(len(self.images)):
            yield self.of_samples(torch.tensor([sample]))


def _key_of(value: object, own: bool) -> str:
    """What of an input can change a model's way: sizes of tensors, values of anything else."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {'batch' if own else ''}{tuple(value.shape[own:])}"
    return repr(value)


def read_inputs(x: object, others: dict[str, Any]) -> Inputs:
    """The inputs of a call: ``x`` are the images, or the first floating-point keyword is.

    Example:
        >>> read_inputs(None, {"pixel_values": torch.zeros(2, 3)}).keyword
        'pixel_values'
    """
    if isinstance(x, Tensor):
        return Inputs(x, None, others)
    if x is None:
        for name, value in others.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                rest = {key: other for key, other in others.items() if key != name}
                return Inputs(value, name, rest)
    raise TypeError(
        f"the images are a {type(x).__name__}, not a tensor. Pass a batch of images as a tensor, "
        "as the first argument or by keyword (pixel_values=...)."
    )


def read_example(example: object) -> Inputs:
    """An example given by the user: a batch of images, or a dict of keyword inputs."""
    if isinstance(example, Mapping):
        return read_inputs(None, dict(example))
    return read_inputs(example, {})


def logits_of(output: object) -> Tensor:
    """The logits in whatever a classifier returns.

    Example:
        >>> logits_of({"logits": torch.zeros(2, 3), "features": torch.zeros(2, 8)}).shape
        torch.Size([2, 3])
        >>> logits_of((torch.zeros(2, 3), None)).shape
        torch.Size([2, 3])
    """
    if isinstance(output, Tensor):
        return output
    for name in _NAMES:
        named = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(named, Tensor):
            return named
    tensors = [t for t in take_apart(output)[0] if t.is_floating_point()]
    several = [t for t in tensors if t.ndim > 1]  # a loss may come first
    if isinstance(output, (tuple, list)) and tensors:
        return (several or tensors)[0]
    if len(several) == 1 or len(tensors) == 1:
        return (several or tensors)[0]
    raise TypeError(
        f"cannot tell where the logits are in a {type(output).__name__} with {len(tensors)} "
        "tensors. Let the model return them as a tensor, first in a tuple, or named 'logits'."
    )


class Logits(nn.Module):
    """A model that returns the logits alone; ``inner`` may return anything that holds them."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The logits in what ``inner`` returns."""
        return logits_of(self.inner(*args, **kwargs))


def take_apart(output: object) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors in an output, and a function that puts others in their places.

    What is no tensor (``None``, numbers, names) stays as it is.

    Example:
        >>> tensors, rebuild = take_apart({"logits": torch.ones(2), "step": 3})
        >>> rebuild([torch.zeros(2)])
        {'logits': tensor([0., 0.]), 'step': 3}
    """
    tensors: list[Tensor] = []
    structure = _walk(output, tensors)

    def rebuild(others: Sequence[Tensor]) -> Any:
        return structure(iter(others))

    return tensors, rebuild


_Builder = Callable[[Iterator[Tensor]], Any]


def _walk(value: Any, tensors: list[Tensor]) -> _Builder:
    """Append the tensors of ``value`` in order; gives what builds it again from others."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return next
    if isinstance(value, Mapping):
        return _walk_mapping(value, tensors)
    if isinstance(value, (tuple, list)):
        parts = [_walk(item, tensors) for item in value]
        kind: Any = type(value)
        if hasattr(value, "_fields"):  # a named tuple takes its entries one by one
            return lambda new: kind(*[part(new) for part in parts])
        return lambda new: kind(part(new) for part in parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        fields = {name: _walk(getattr(value, name), tensors) for name in names}
        return lambda new: dataclasses.replace(
            value, **{k: part(new) for k, part in fields.items()}
        )
    return lambda new: value


def _walk_mapping(value: Mapping[str, Any], tensors: list[Tensor]) -> _Builder:
    items = {key: _walk(item, tensors) for key, item in value.items()}
    kind: Any = type(value)
    if dataclasses.is_dataclass(value):  # a ModelOutput is both, and made by keywords
        return lambda new: kind(**{key: part(new) for key, part in items.items()})
    if kind in (dict, Mapping):
        return lambda new: {key: part(new) for key, part in items.items()}
    return lambda new: kind((key, part(new)) for key, part in items.items())


def batch_axes(many: Sequence[Tensor], one: Sequence[Tensor]) -> tuple[int | None, ...]:
    """Along which axis each tensor of an output holds the samples; ``None``: it has no such axis.

    Read off the sizes: ``many`` are the tensors for several samples, ``one`` those for one.

    Example:
        >>> batch_axes([torch.zeros(7, 5), torch.zeros(2)], [torch.zeros(7, 1), torch.zeros(2)])
        (1, None)
    """
    if len(many) != len(one):
        raise ValueError(
            f"the model returns {len(many)} tensors for several samples and {len(one)} for one: "
            "outputs of single samples cannot be put together. A detection model is one such: it "
            "lists boxes, image by image, where filters need one row of logits for each."
        )
    return tuple(_batch_axis(a.shape, b.shape) for a, b in zip(many, one))


def _batch_axis(many: torch.Size, one: torch.Size) -> int | None:
    longer = [axis for axis, (a, b) in enumerate(zip(many, one)) if a != b]
    if len(many) != len(one) or len(longer) > 1:
        raise ValueError(
            f"an output of the model has shape {tuple(many)} for several samples and {tuple(one)} "
            "for one: no single axis holds the samples."
        )
    return longer[0] if longer else None


def join(outputs: Sequence[object], axes: Sequence[int | None]) -> Any:
    """One output for a batch from those of single samples.

    Example:
        >>> join([{"logits": torch.ones(1, 3)}, {"logits": torch.zeros(1, 3)}], [0])["logits"].shape
        torch.Size([2, 3])
    """
    tensors, rebuild = zip(*map(take_apart, outputs))
    columns = zip(*tensors)
    joined = [p[0] if axis is None else torch.cat(p, axis) for p, axis in zip(columns, axes)]
    return rebuild[0](joined)
