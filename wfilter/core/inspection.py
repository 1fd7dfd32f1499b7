"""Find out how a model uses each target, by running it once on a batch with one sample marked.

The result decides the path a target takes in a mixed batch: *fused* where scaling the layer's
output per sample is provably the same as scaling its weight, *exact* otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from wfilter.core.gates import slices
from wfilter.core.layouts import Layout, possible_layouts
from wfilter.core.marking import InspectMode, MarkMode
from wfilter.core.outputs import Inputs, Key, batch_axes, logits_of, take_apart
from wfilter.core.rules import Site
from wfilter.core.state import kept
from wfilter.core.targets import Target

# Prime, so that few axes divide by it; sample 1 is not in its middle, so that a flip shows.
MARKED_BATCH = 5


Axes = Sequence[int | None]


@dataclass(frozen=True)
class Finding:
    """How one target is used: ``by`` is "output", "weight" or "unused"."""

    by: str
    layout: Layout | None
    why: str
    attended: bool = False  # attention reads parts of the output as they are

    @property
    def path(self) -> str:
        """The word the plan shows."""
        if self.by == "unused":
            return "unused"
        return "fused" if self.by == "output" and self.layout is not None else "exact"


@dataclass(frozen=True)
class Inspection:
    """What is known about inputs of one shape.

    ``axes`` says where the samples lie in each tensor of the output; ``mixes`` whether one sample's
    output depends on the others; ``classes`` is the number of logits, if they have their own axis.
    """

    key: Key
    findings: tuple[Finding, ...]
    axes: tuple[int | None, ...]
    mixes: bool
    classes: int | None
    singly: bool = False  # vmap has no way: a mixed batch runs one sample after the other

    @cached_property
    def is_fused(self) -> bool:
        """Whether a mixed batch runs as one forward of the base model."""
        return all(finding.path == "fused" for finding in self.findings)

    @cached_property
    def has_weights(self) -> bool:
        """Whether a target has no rule, so that its weight itself is gated."""
        return any(finding.by == "weight" for finding in self.findings)

    def refuse_mixing(self, model: nn.Module) -> None:
        """Stop where the samples of a batch are not independent."""
        if self.mixes:
            raise ValueError(mixing_text(model))


def mixing_text(model: nn.Module) -> str:
    """Why a model is refused whose samples seem to depend on each other."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    spoilt = next((name for name, tensor in tensors if bool(tensor.isnan().any())), None)
    if spoilt is not None:  # NaN in every answer looks like mixing
        return (
            f"{spoilt} of this {type(model).__name__} contains NaN, so its answers mean nothing. "
            "Load its weights again."
        )
    return (
        f"{type(model).__name__} mixes the samples of a batch: the logits of one depend on the "
        "others, so a batch in which each sample forgets its own class has no defined answer. Use "
        "a model whose samples are independent in eval mode."
    )


@dataclass(frozen=True)
class PlanRow:
    """One target: what it is and which path its mixed batches take, with the reason."""

    name: str
    shape: tuple[int, ...]
    units: int
    path: str
    why: str


class Plan(tuple[PlanRow, ...]):
    """One row per target; prints as a table, with a ``note`` on what is no target below it."""

    note = ""

    def __str__(self) -> str:
        header = ("name", "shape", "units", "path", "why")
        rows = [header] + [
            (r.name, " x ".join(map(str, r.shape)), str(r.units), r.path, r.why) for r in self
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]])
            for row in rows
        ]
        counts = {p: sum(r.path == p for r in self) for p in ("fused", "exact", "unused")}
        total = ", ".join(f"{n} {p}" for p, n in counts.items() if n)
        summary = f"{len(self)} targets ({total}), {sum(r.units for r in self)} units"
        return "\n".join([*lines, summary, *([self.note] if self.note else [])])

    __repr__ = __str__


def make_plan(
    targets: Sequence[Target],
    findings: Sequence[Finding],
    left_out: Sequence[str] = (),
    feature_rows: str | None = None,
) -> Plan:
    """The table of targets and findings; what else there is to know stands below it."""
    rows = zip(targets, findings)
    plan = Plan(PlanRow(t.name, t.shape, t.units, f.path, f.why) for t, f in rows)
    notes = []
    if left_out:
        names = ", ".join(left_out)
        notes.append(f"left out by 'auto', since no forward of the inspection used it: {names}")
    if feature_rows is not None:
        notes.append(f"feature rows before the head: {feature_rows}")
    plan.note = "\n".join(notes)
    return plan


def parameter_of(model: nn.Module, target: Target) -> Tensor:
    """The tensor as the model's own code would read it."""
    path, name = target.owners[0]
    value = getattr(model.get_submodule(path) if path else model, name)
    assert isinstance(value, Tensor)
    return value


def make_sites(
    model: nn.Module,
    targets: Sequence[Target],
    findings: Sequence[Finding] | None = None,
    pinned: frozenset[int] = frozenset(),
) -> dict[int, Site]:
    """Identity of each target's tensor -> its site; with findings, only those gated by output."""
    return sites_now(find_sites(model, targets, findings, pinned))


Owned = tuple[nn.Module, str, Site]


def find_sites(
    model: nn.Module,
    targets: Sequence[Target],
    findings: Sequence[Finding] | None,
    pinned: frozenset[int],
) -> tuple[Owned, ...]:
    """Each target's module, its tensor's name there, and its site: the same in all forwards."""
    where, owned = slices(targets), []
    for index, target in enumerate(targets):
        if target.unit_axis is None or index in pinned:
            continue
        path, name = target.owners[0]
        module = model.get_submodule(path)
        span = where[target.name]
        site = Site(index, span.start, span.stop, None, target.standardised, target.unit_axis)
        if findings is not None:
            if findings[index].by != "output":
                continue
            seen = findings[index]
            site = replace(site, layout=seen.layout, attended=seen.attended)
        owned.append((module, name, site))
    return tuple(owned)


def sites_now(owned: Sequence[Owned]) -> dict[int, Site]:
    """By the tensors that the modules hold at this moment, as moving a model gives it others."""
    sites = {}
    for module, name, site in owned:
        tensor = module._parameters.get(name)  # what getattr gives, a microsecond sooner
        sites[id(getattr(module, name) if tensor is None else tensor)] = site
    return sites


@torch.no_grad()
def inspect(model: nn.Module, targets: Sequence[Target], example: Inputs) -> Inspection:
    """Run the model on a marked batch of the example's shape, and note how it uses each target.

    Args:
        model: The base model, in eval mode.
        targets: What to look for.
        example: One sample or more; of the images only shape, dtype and device matter.
    """
    kind = example.images.dtype
    if not len(example.images):
        raise ValueError("the images are an empty batch, which shows nothing. Give at least one.")
    if not kind.is_floating_point:
        raise TypeError(
            f"the model's input has dtype {str(kind).removeprefix('torch.')}. Weight "
            "filtering needs a floating-point input, in which one sample can be marked with NaN."
        )
    clean, marked = _marked_batch(example)
    whole = {id(parameter_of(model, t)): Site(i, 0, 0) for i, t in enumerate(targets)}
    mode = InspectMode({**whole, **make_sites(model, targets)}, MARKED_BATCH)
    with kept(model):
        with mode:
            output = _try_run(model, marked)
        one = clean.of_samples(torch.tensor([0])).run(model)
        axes = batch_axes(take_apart(output)[0], take_apart(one)[0])
        for index in range(len(targets)):
            _look_downstream(model, clean, mode, index, axes)
        mixes = _mixes_samples(model, clean, output, axes)
    findings = tuple(_judge(t, mode, i) for i, t in enumerate(targets))
    return Inspection(example.key, findings, axes, mixes, _classes(output, axes))


def _try_run(model: nn.Module, inputs: Inputs) -> object:
    """The model's output; an error says for which inputs, as they are not those of the user."""
    try:
        return inputs.run(model)
    except Exception as error:
        shape, kind = tuple(inputs.images.shape), str(inputs.images.dtype).removeprefix("torch.")
        others = f" and {', '.join(inputs.others)}" if inputs.others else ""
        raise RuntimeError(  # as torch raises itself, so that whoever catches that goes on
            f"{type(model).__name__} does not run on {MARKED_BATCH} samples like those given, "
            f"images of shape {shape} and dtype {kind}{others}: {error}\n"
            "Give a batch that it takes (image[None] for a single one). Of other inputs a tensor "
            "as long as the batch belongs to its samples; any other, or one in a list, to all."
        ) from error


def _marked_batch(example: Inputs) -> tuple[Inputs, Inputs]:
    """A batch of random images of the example's shape, and the same with sample 1 all NaN."""
    clean = example.drawn(MARKED_BATCH)
    images = clean.images.clone()
    images[1] = float("nan")
    return clean, clean.with_images(images)


def _classes(output: object, axes: Axes) -> int | None:
    """How many logits each sample has, if they are ``(batch, num_classes)``."""
    try:
        logits = logits_of(output)
    except TypeError:
        return None
    places = [a for t, a in zip(take_apart(output)[0], axes) if t is logits]
    return logits.shape[-1] if logits.ndim == 2 and not any(places) else None


def _mixes_samples(model: nn.Module, clean: Inputs, output: object, axes: Axes) -> bool:
    """Whether sample 1, which is NaN, shows in the output of another.

    Where the model drops NaN on its way, another sample is put in the place of number 1 instead.
    """
    others = [sample for sample in range(MARKED_BATCH) if sample != 1]
    marked = [row.isnan().any(1) for row in _rows(output, axes)]
    if any(bool(row[others].any()) for row in marked):
        return True
    if all(bool(row[1]) for row in marked):
        return False
    changed = clean.images.clone()
    changed[1] = 1 - changed[1]
    before, after = clean.run(model), clean.with_images(changed).run(model)
    pairs = zip(_rows(before, axes), _rows(after, axes))
    return not all(torch.allclose(a[others], b[others], 1e-3, 1e-5) for a, b in pairs)


def _rows(output: object, axes: Axes) -> list[Tensor]:
    """The floating-point tensors of an output that have a row per sample, ``(batch, ...)``."""
    leaves = [
        leaf.movedim(axis, 0)
        for leaf, axis in zip(take_apart(output)[0], axes)
        if axis is not None and leaf.is_floating_point() and leaf.numel()
    ]
    return [leaf.reshape(MARKED_BATCH, -1) for leaf in leaves if len(leaf) == MARKED_BATCH]


def _look_downstream(
    model: nn.Module, clean: Inputs, mode: InspectMode, index: int, axes: Axes
) -> None:
    """Where an output does not depend on the input, see which logits depend on the output.

    The query of a class token is an example: in the first block it is the same for all samples.
    """
    use = mode.uses[index]
    if use.layouts != {None} or use.unknown or len(use.shapes) != 1:
        return
    ((shape, axis),) = use.shapes
    for layout in possible_layouts(shape, axis, MARKED_BATCH):
        with MarkMode(mode.sites, index, layout, MARKED_BATCH):
            rows = _rows(clean.run(model), axes)
        marked = torch.stack([row.isnan().any(1) for row in rows]).any(0).tolist() if rows else []
        if marked == [sample == 1 for sample in range(MARKED_BATCH)]:
            use.layouts = {layout}
            return


def _judge(target: Target, mode: InspectMode, index: int) -> Finding:
    use = mode.uses[index]
    called = ", ".join(dict.fromkeys(use.functions))
    if not use.functions and not use.unknown:
        return Finding("unused", None, "no forward uses it in eval mode")
    if target.unit_axis is None:
        return Finding("weight", None, "one gate per element: each sample has its own weights")
    if use.unknown:
        return Finding("weight", None, f"used by {use.unknown[0]}, which has no rule")
    if len(use.layouts) > 1:
        return Finding("output", None, f"{called}: called with different batch layouts")
    (layout,) = use.layouts
    if layout is None:
        return Finding("output", None, f"{called}: run once for the whole batch, or mixes samples")
    return Finding("output", layout, f"{called}, {layout}", use.attended)
