"""Remove channels that closed gates have silenced: smaller layers, the same logits.

Three steps: find which channels are constants (`wfilter.core.constants`), find which belong
together (`wfilter.core.coupling`), cut. What a removed constant gave to the next layer goes into
that layer's bias; where zero padding makes it smaller at the borders, one constant channel stays
and carries the others. Then the smaller model is compared with the whole one, and a part whose
removal changes anything stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from wfilter.core.cutting import Cutting, Refused, State, find_cuts, layer_numbers, layer_weights
from wfilter.core.guessing import guess_images
from wfilter.core.heads import ATTRIBUTES, Heads, cut_heads, find_heads
from wfilter.core.messages import first_line
from wfilter.core.nearness import gap, size
from wfilter.core.poison import going_with, going_with_heads, refuse_readers

# Largest difference of the logits allowed, of their own size, in float64.
TOLERANCE = 1e-10
# By how much a second image is larger; the first that the model takes. Two odd numbers come first:
# padding that depends on the size (TensorFlow's "same") may be none at all at even sizes.
LARGER = ((31, 17), (32, 32))
# The size of a third, smaller image, as a share: code may pad or pool small maps in another way.
SMALLER = (0.6, 0.45)


@dataclass(frozen=True)
class Cut:
    """One tensor that became smaller; an empty ``before`` is a bias that was added."""

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class Left:
    """Closed units of a weight that stayed, and why."""

    name: str
    units: int
    why: str


@dataclass(frozen=True)
class Pruned:
    """A smaller model and what was done to make it.

    Attributes:
        model: The plain, smaller model.
        cuts: The tensors that became smaller.
        left: Closed units that stayed.
        parameters: Their number before and after.
        largest_difference: Of the logits from the whole model's, in float64, of their own size.
        sizes: The image shapes that was measured on.
        attributes: Module path -> the attributes that changed, to rebuild the model.
    """

    model: nn.Module
    cuts: tuple[Cut, ...]
    left: tuple[Left, ...]
    parameters: tuple[int, int]
    largest_difference: float
    sizes: tuple[tuple[int, ...], ...]
    attributes: dict[str, dict[str, int]]

    def __str__(self) -> str:
        before, after = self.parameters
        lines = [
            f"{before:,} parameters became {after:,} ({after / before - 1:+.1%}); "
            f"largest difference of the logits {self.largest_difference:.1e} in float64"
        ]
        for cut in self.cuts:
            shapes = [" x ".join(map(str, shape)) or "none" for shape in (cut.before, cut.after)]
            lines.append(f"  {cut.name}: {shapes[0]} -> {shapes[1]}")
        lines += [f"  left: {left.units} units of {left.name}: {left.why}" for left in self.left]
        return "\n".join(lines)


@torch.no_grad()
def prune(model: nn.Module, example_input: Tensor | None = None) -> Pruned:
    """A smaller copy of ``model`` without the channels whose weights are exactly zero.

    Made for baked models with exact gates, of use for any model with zeros in it.

    Args:
        model: A plain model, in eval mode; it is not changed.
        example_input: Images it takes, where their size cannot be guessed.

    Returns:
        The model and what was cut, see `Pruned`. Its logits equal those of ``model``; a part for
        which that does not hold, or whose code does not allow it, stays and is listed.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> with torch.no_grad():
        ...     model[0].weight[:5] = 0
        >>> print(prune(model).model[0])
        Linear(in_features=4, out_features=3, bias=True)
    """
    whole = copy.deepcopy(model).double().eval()
    images = _images(whole, example_input)
    try:
        cutting = find_cuts(whole, images[0])
    except Exception as error:
        return _unchanged(model, images, f"the model could not be followed: {first_line(error)}")
    work, poisoned = copy.deepcopy(whole), copy.deepcopy(whole)
    expected = [_logits(whole, x) for x in images]
    refused: dict[int, str] = {}
    todo = [list(cutting.blocks())]
    while todo:  # where a cut fails, its halves are tried, down to single blocks
        blocks = todo.pop()
        going = going_with(cutting, blocks)
        cut = partial(cutting.cut_all, work, blocks)
        why = _cannot(cut, work, images, expected, partial(refuse_readers, poisoned, going))
        if why and len(blocks) > 1:
            todo += [blocks[len(blocks) // 2 :], blocks[: len(blocks) // 2]]
        elif why:
            refused |= dict.fromkeys(blocks[0], why)
    gone = []
    for heads in find_heads(whole, cutting):
        going = going_with_heads(whole, heads)
        cut = partial(cut_heads, work, cutting, heads)
        if not _cannot(cut, work, images, expected, partial(refuse_readers, poisoned, going)):
            gone.append(heads)
    return _finish(model, whole, work, cutting, refused, gone, images)


def _cannot(
    cut: Callable[[], None],
    work: nn.Module,
    images: list[Tensor],
    expected: list[list[Tensor]],
    refuse: Callable[[Tensor], None],
) -> str:
    """In place: cut and compare, and look for other readers; if that fails, undo it and say why."""
    undo = State(work)
    try:
        cut()
        _difference(work, images, expected)
        refuse(images[0][1:2])
    except Exception as error:
        undo.restore()
        return first_line(error)
    return ""


# ---- proving and reporting ----------------------------------------------------------------------


def _images(model: nn.Module, example: Tensor | None) -> list[Tensor]:
    """Random images of several magnitudes, of the model's size and, if it can, of two others."""
    first = next(model.parameters())
    if example is None:
        example = guess_images(model)
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.3, 1.0, 4.0], dtype=torch.float64)

    def draw(shape: Sequence[int]) -> Tensor:
        drawn = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
        return (drawn * scale.view(-1, *[1] * len(shape))).to(first.device)

    shape = tuple(example.shape[1:])
    drawn = [draw(shape)]
    if len(shape) != 3:
        return drawn
    channels, height, width = shape
    larger = [(height + up, width + across) for up, across in LARGER]
    smaller = (int(height * SMALLER[0]) | 1, int(width * SMALLER[1]) | 1)
    for sizes in (larger, [smaller]):
        drawn += _first_taken(model, [draw((channels, *size)) for size in sizes])
    return drawn


def _first_taken(model: nn.Module, images: list[Tensor]) -> list[Tensor]:
    """The first of these that the model takes, if any."""
    for x in images:
        with suppress(Exception):
            if all(bool(output.isfinite().all()) for output in _logits(model, x)):
                return [x]
    return []


def _logits(model: nn.Module, images: Tensor) -> list[Tensor]:
    leaves = tree_leaves(model(images))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _difference(model: nn.Module, images: list[Tensor], expected: list[list[Tensor]]) -> float:
    """Largest difference, of the logits' own size; too large a one is an error."""
    worst = 0.0
    for x, outputs in zip(images, expected):
        for now, before in zip(_logits(model, x), outputs, strict=True):
            if now.shape != before.shape:
                raise Refused(f"the output's shape becomes {tuple(now.shape)}")
            worst = max(worst, gap(now, before) / max(size(before), 1e-30))
            if worst > TOLERANCE:
                raise Refused(f"without it the logits move by {worst:.1e} of their size")
    return worst


def _finish(
    model: nn.Module,
    whole: nn.Module,
    work: nn.Module,
    cutting: Cutting,
    refused: dict[int, str],
    heads: list[Heads],
    images: list[Tensor],
) -> Pruned:
    worst = _difference(work, images, [_logits(whole, x) for x in images])
    made, attributes = copy.deepcopy(model), {}
    taken: dict[int, Tensor] = {}
    pairs = zip(made.named_modules(), whole.modules(), work.modules())
    for (path, module), before, after in pairs:
        _take(module, after, taken)
        changed = {k: v for k, v in _numbers(after).items() if getattr(before, k) != v}
        vars(module).update(changed)
        if changed:
            attributes[path] = changed
    shapes = {name: tuple(t.shape) for name, t in _tensors(model).items()}
    cuts = tuple(
        Cut(name, shapes.get(name, ()), tuple(tensor.shape))
        for name, tensor in _tensors(made).items()
        if shapes.get(name) != tuple(tensor.shape)
    )
    return Pruned(
        made,
        cuts,
        tuple(_left(cutting, refused, heads)),
        (_count(model), _count(made)),
        worst,
        tuple(tuple(x.shape[1:]) for x in images),
        attributes,
    )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that a state dict leaves out."""
    return {**model.state_dict(), **dict(model.named_buffers())}


def _numbers(module: nn.Module) -> dict[str, int]:
    """All attributes that a cut may change."""
    held = {name: getattr(module, name, None) for name in ATTRIBUTES}
    return {**{k: v for k, v in held.items() if isinstance(v, int)}, **layer_numbers(module)}


def _take(module: nn.Module, source: nn.Module, taken: dict[int, Tensor]) -> None:
    """In place: the tensors of another module that differ in value, in this module's dtypes.

    What several modules of ``source`` share (``taken``: by identity), these share, too.
    """
    for kind in ("_parameters", "_buffers"):
        mine, theirs = vars(module)[kind], vars(source)[kind]
        for key, tensor in theirs.items():
            old = mine.get(key)
            if tensor is None or (old is not None and torch.equal(old.to(tensor), tensor)):
                continue
            like = old if old is not None else module._parameters["weight"]
            assert like is not None
            if id(tensor) not in taken:
                value = tensor.detach().to(like)
                parameter = isinstance(tensor, nn.Parameter)
                taken[id(tensor)] = nn.Parameter(value, like.requires_grad) if parameter else value
            mine[key] = taken[id(tensor)]


def _left(cutting: Cutting, refused: dict[int, str], heads: list[Heads]) -> Iterator[Left]:
    """Closed units that stayed, counted by weight and reason."""
    reasons = {**cutting.kept, **refused}
    for name, weight in cutting.weights.items():
        closed = (weight == 0).flatten(1).all(1)
        for gone in (each for each in heads if each.name == name):
            closed &= gone.rows(len(weight) // 3).repeat(3)
        labels = cutting.coupling.label[cutting.coupling.outputs[name]][closed].tolist()
        counts: dict[str, int] = {}
        for label in labels:
            if label in refused or label not in cutting.gone:
                why = reasons.get(label, "no layer that can be cut reads it")
                counts[why] = counts.get(why, 0) + 1
        yield from (Left(name, units, why) for why, units in counts.items())


def _unchanged(model: nn.Module, images: list[Tensor], why: str) -> Pruned:
    count = _count(model)
    left = tuple(
        Left(name, closed, why)
        for name, weight in layer_weights(model).items()
        if (closed := int((weight == 0).flatten(1).all(1).sum()))
    )
    sizes = tuple(tuple(x.shape[1:]) for x in images)
    return Pruned(copy.deepcopy(model), (), left, (count, count), 0.0, sizes, {})


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
