"""Rows without steps: which gates to close, to first order around the base model.

With every gate at ``1 - d`` the lead of a forgotten logit over all others falls by ``G d``, where
``G`` is its gradient at open gates, and the base model's answers to other images move by a KL of
``d' F d / 2`` (see
``wfilter.untraining.fisher``). A row is the ``d`` in 0..1 that makes the lead of its class
fall far enough, on its images and those most like it, at the least cost to all others: a convex
problem for each class, solved for many at once. Of the network it takes one gradient for each
example of a row, and several for each image of the Fisher information.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wfilter.core.gates import HARD, ByTarget
from wfilter.core.model import FilteredModel
from wfilter.core.outputs import logits_of
from wfilter.core.refusals import refuse_recomputation
from wfilter.data.batches import Batches, InMemory
from wfilter.untraining import fisher
from wfilter.untraining.history import Ended, History, ProgressBar, Record
from wfilter.untraining.losses import forgotten
from wfilter.untraining.objectives import Linear
from wfilter.untraining.pairs import refuse_one_class
from wfilter.untraining.reading import Read, all_images, refuse_several_labels, rows_of
from wfilter.untraining.start import prepare_alphas

BATCH = 50
ITERATIONS = 120
ENTRIES = 2**25  # about as many numbers in the gradients of one part: 128 MiB in float32


@dataclass(frozen=True)
class Examples:
    """From which images each row is made.

    Attributes:
        image: Index of the image, ``(examples,)``.
        row: The class whose lead is to fall.
        own: Whether the image is of that class.
    """

    image: Tensor
    row: Tensor
    own: Tensor

    def of_rows(self, first: int, last: int) -> Examples:
        """Those of the rows ``first`` to ``last - 1``."""
        here = (self.row >= first) & (self.row < last)
        return Examples(self.image[here], self.row[here], self.own[here])

    def first(self, count: int) -> Examples:
        """So many of them; images of their own class come first."""
        return Examples(self.image[:count], self.row[:count], self.own[:count])


def untrain_linear(
    wf: FilteredModel,
    train: Batches | InMemory,
    recipe: Linear,
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool | None = None,
) -> History:
    """In place: every row from one look at the images; what `untrain` does for this recipe."""
    if wf.granularity == "element":
        raise ValueError(
            f"recipe {recipe.name!r} keeps a number for each image and gate, too many with "
            "granularity='element'. Use 'out', or another recipe."
        )
    refuse_one_class(wf.num_classes)
    began, history = time.perf_counter(), History(recipe.to_dict(), seed)
    if device is not None:
        wf.to(device)
    prepare_alphas(wf, recipe)
    refuse_recomputation(wf)
    generator = torch.Generator().manual_seed(seed)
    pick, count, labels, augment = all_images(train, seed)

    def read(index: Tensor) -> Tensor:
        images = pick(index)
        return (images if augment is None else augment(images, generator)).to(wf.alphas.device)

    with torch.no_grad():
        parts = torch.split(torch.arange(count), BATCH)
        base = torch.cat([logits_of(wf(read(part))).float().cpu() for part in parts])
    refuse_several_labels(labels, f"recipe {recipe.name!r}")
    rows = rows_of(labels, base, wf.num_classes, generator)
    with ProgressBar(parts_of(wf, count, recipe), progress) as bar:
        for record in solve(wf, read, base, rows, recipe, seed):
            history.seconds = record.seconds = time.perf_counter() - began
            history.records.append(record)
            bar.show(record)
    history.end(Ended.SOLVED, "solved")
    return history


def leads(logits: Tensor, rows: Tensor) -> Tensor:
    """How far the logit of ``rows`` is above all others together, ``(batch,)``.

    Example:
        >>> leads(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]))
        tensor([1.3069])
    """
    rest = logits.masked_fill(forgotten(rows, logits.shape[1]), -math.inf).logsumexp(1)
    return logits.gather(1, rows.unsqueeze(1))[:, 0] - rest


def examples(base: Tensor, labels: Tensor, alike: int) -> Examples:
    """The images of each class, and ``alike`` others that the base model finds most like it.

    Where images of a class are few, those of its neighbours tell how the network makes it.

    Args:
        base: The base model's logits, ``(images, num_classes)``.
        labels: int64 ``(images,)``.
        alike: How many others for each row; fewer where there are not so many.

    Example:
        >>> chosen = examples(torch.eye(3) * 5, torch.arange(3), alike=1)
        >>> chosen.row.tolist(), chosen.own.tolist()
        ([0, 1, 2, 0, 1, 2], [True, True, True, False, False, False])
    """
    count, classes = base.shape
    chance = base.log_softmax(1).scatter(1, labels.unsqueeze(1), -math.inf)
    alike = min(alike, count)
    image = chance.topk(alike, dim=0).indices.T.flatten()  # (classes * alike,)
    row = torch.arange(classes).repeat_interleave(alike)
    foreign = labels[image] != row
    image, row = torch.cat([torch.arange(count), image[foreign]]), torch.cat([labels, row[foreign]])
    return Examples(image, row, torch.arange(len(row)) < count)


def gradients(wf: FilteredModel, images: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """What each gate adds to the lead of ``rows``, ``(batch, total_units)``, and these leads.

    All gates are open.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="weight")
        >>> gradients(wf, torch.randn(5, 4), torch.zeros(5).long())[0].shape
        torch.Size([5, 3])
    """
    gates = torch.ones(len(images), wf.alphas.shape[1]).to(wf.alphas).requires_grad_()
    with torch.enable_grad():
        lead = leads(logits_of(wf.run_gated(images, gates)), rows)
        return torch.autograd.grad(lead.sum(), gates)[0], lead.detach()


def closings(
    gradient: Tensor,
    fall: Tensor,
    row: Tensor,
    information: fisher.Information,
    rows: int,
    *,
    lambda_fisher: float,
    lambda_alpha: float,
) -> tuple[Tensor, Tensor]:
    """How far to close each gate, ``(rows, total_units)`` in 0..1, and what that costs each row.

    Minimises, for each row, half of: the mean square of what its leads lack of falling by ``fall``,
    ``lambda_fisher`` times ``d' F d`` of the closings ``d``, and ``lambda_alpha`` times their
    squares. By projected gradients, preconditioned, with Nesterov's momentum.

    Args:
        gradient: Of the lead of each example, ``(examples, total_units)``.
        fall: By how much each lead is to fall, ``(examples,)``.
        row: The row of each example, ``(examples,)``.
        information: The Fisher information of the gates.
        rows: How many rows there are.
        lambda_fisher: Weight of what it costs other images.
        lambda_alpha: Weight of closing gates at all.

    Example:
        >>> roots = torch.tensor([[0.0, 100.0]])  # the second gate is one that others need
        >>> dear = fisher.Information(roots, whole=False)
        >>> weights, fall = {"lambda_fisher": 1.0, "lambda_alpha": 0.001}, torch.tensor([0.5])
        >>> closed, _ = closings(torch.ones(1, 2), fall, torch.tensor([0]), dear, 1, **weights)
        >>> closed.round(decimals=2)
        tensor([[0.5000, 0.0000]])
    """
    share = (1 / torch.bincount(row, minlength=rows)[row].to(gradient)).sqrt()
    weighted, fall = gradient * share.unsqueeze(1), fall * share
    diagonal = lambda_fisher * information.diagonal() + lambda_alpha
    step = 1 / _curvature(weighted, row, information, diagonal, rows, lambda_fisher)
    closed = ahead = gradient.new_zeros(rows, gradient.shape[1])
    momentum = 1.0
    for _ in range(ITERATIONS):
        lacking = (fall - (weighted * ahead[row]).sum(1)).clamp(min=0)
        slope = lambda_fisher * information.times(ahead) + lambda_alpha * ahead
        slope.index_add_(0, row, lacking.unsqueeze(1) * weighted, alpha=-1)
        before, closed = closed, (ahead - step * slope / diagonal).clamp(0, 1)
        last, momentum = momentum, (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = closed + (last - 1) / momentum * (closed - before)
    lacking = (fall - (weighted * closed[row]).sum(1)).clamp(min=0)
    cost = lambda_fisher * (information.times(closed) * closed).sum(1)
    cost += lambda_alpha * closed.square().sum(1)
    return closed, cost.index_add_(0, row, lacking.square()) / 2


def _curvature(
    weighted: Tensor,
    row: Tensor,
    information: fisher.Information,
    diagonal: Tensor,
    rows: int,
    lambda_fisher: float,
) -> Tensor:
    """A bound on the curvature of each row's problem, ``(rows, 1)``, in preconditioned units."""
    vector, scale = torch.ones_like(diagonal).unsqueeze(0), diagonal.sqrt()
    largest = diagonal.new_zeros(())
    for _ in range(20):  # power iteration
        vector = information.times(vector / scale) / scale
        largest = vector.norm()
        vector = vector / largest.clamp(min=1e-12)
    shared = 1.1 * lambda_fisher * largest
    own = diagonal.new_zeros(rows).index_add_(0, row, (weighted.square() / diagonal).sum(1))
    return (1 + shared + own).unsqueeze(1)


def solve(
    wf: FilteredModel, read: Read, base: Tensor, labels: Tensor, recipe: Linear, seed: int
) -> Iterator[Record]:
    """In place: set the alphas, some rows at a time; a record for each such step.

    Args:
        wf: The filtered model, which has seen images of this shape.
        read: Gives the images of some indices, on the model's device.
        base: The base model's logits of all images, on the CPU.
        labels: int64 ``(images,)``, on the CPU.
        recipe: Gives ``margin``, ``alike`` and the weights.
        seed: Chooses the images and draws of the Fisher information.
    """
    generator = torch.Generator().manual_seed(seed)
    some = torch.randperm(len(labels), generator=generator)[: recipe.fisher_images]
    free = _free(wf)
    information = fisher.information(wf, torch.split(some, BATCH), read, free, generator)
    device = wf.alphas.device
    weights = {name: getattr(recipe, name) for name in ("lambda_fisher", "lambda_alpha")}
    everything = examples(base, labels, recipe.alike)
    _refuse_bare_rows(everything, wf)
    for number, (first, last) in enumerate(_parts(len(everything.row), *wf.alphas.shape)):
        shown = everything.of_rows(first, last)
        by_batch = [gradients(wf, read(i), row) for i, row in _batches(shown, device)]
        gradient = torch.cat([gradient * free for gradient, _ in by_batch])
        # Below all others together by the margin, and by no less where it has no lead to lose.
        fall = torch.cat([lead for _, lead in by_batch]).clamp(min=0) + recipe.margin
        row = (shown.row - first).to(device)
        closed, cost = closings(gradient, fall, row, information, last - first, **weights)
        if not bool(closed.isfinite().all()):
            raise FloatingPointError(
                f"the closings of rows {first} to {last - 1} are not finite. Their alphas are kept "
                "as they were. Look at the images of these classes for NaN."
            )
        with torch.no_grad():
            alphas = torch.logit(1 - closed).clamp(-HARD, HARD)
            wf.alphas[first:last] = torch.where(free, alphas, HARD)
        yield _record(wf, read, shown, labels, number + 1, closed, float(cost.mean()))


def parts_of(wf: FilteredModel, images: int, recipe: Linear) -> int:
    """In how many parts `solve` takes the rows of so many images."""
    return len(_parts(images + recipe.alike * wf.num_classes, *wf.alphas.shape))


def _parts(count: int, classes: int, units: int) -> list[tuple[int, int]]:
    """The rows, some at a time, of about equally many examples each."""
    rows = max(1, ENTRIES * classes // (count * units))
    return [(first, min(first + rows, classes)) for first in range(0, classes, rows)]


def _refuse_bare_rows(shown: Examples, wf: FilteredModel) -> None:
    seen = torch.bincount(shown.row, minlength=wf.num_classes)
    bare = (seen == 0).nonzero()[:, 0].tolist()
    if bare:
        raise ValueError(
            f"there is no image of class {bare[0]} ({len(bare)} such classes), and no other to "
            "make its row from. Give images of it, or alike=16."
        )


def _batches(shown: Examples, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and rows of the examples, some at a time."""
    yield from zip(torch.split(shown.image, BATCH), torch.split(shown.row.to(device), BATCH))


def _free(wf: FilteredModel) -> Tensor:
    """Bool ``(total_units,)``: the units of targets that are not pinned open."""
    free = torch.ones(wf.alphas.shape[1], dtype=torch.bool, device=wf.alphas.device)
    by_target = ByTarget(wf.targets, free)
    for name in wf.pinned:
        by_target[name].fill_(False)
    return free


@torch.no_grad()
def _record(
    wf: FilteredModel,
    read: Read,
    shown: Examples,
    labels: Tensor,
    step: int,
    closed: Tensor,
    cost: float,
) -> Record:
    """What the network itself makes of the new rows: on their images, and on as many others."""
    shown = shown.first(max(BATCH, 2 * int(shown.own.sum())))
    parts = _batches(shown, closed.device)
    outputs = (logits_of(wf(read(index), forget=row)) for index, row in parts)
    answers = torch.cat([logits.argmax(1).cpu() for logits in outputs])
    right = (answers == labels[shown.image]).float()
    retain, forget = float(right[~shown.own].mean()), float(right[shown.own].mean())
    return Record(step, 0, 0.0, cost, retain, forget, float((closed >= 0.5).float().mean()))
