"""Feature rows as a stage of ``recipe="auto"``: made from the sample, judged like gates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wfilter.core.feature_rows import FeatureRows
from wfilter.core.forget import as_sets
from wfilter.core.model import FilteredModel
from wfilter.core.nearness import size
from wfilter.core.outputs import logits_of, read_inputs
from wfilter.untraining.fitting import FeatureStatistics, fit_rows
from wfilter.untraining.judging import Answer
from wfilter.untraining.kept import Blend
from wfilter.untraining.recipes import REROUTE
from wfilter.untraining.reroute import PlainHead, plain_head
from wfilter.untraining.sample import Sample

BATCH = 64
PROVED = 16  # images on which the filtered model must give the logits that were judged


class Watch:
    """Notes what a layer sees in the latest forward."""

    def __init__(self) -> None:
        self.latest: Tensor | None = None

    @contextmanager
    def on(self, layer: nn.Module) -> Iterator[Watch]:
        """Watch this layer for as long as the block is open."""

        def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.latest = args[0]  # an assignment only: recorders count calls of torch

        handle = layer.register_forward_pre_hook(note)
        try:
            yield self
        finally:
            handle.remove()


def place_for_rows(wf: FilteredModel, sample: Sample) -> tuple[PlainHead | None, str]:
    """The head that feature rows would stand before; or none, and why."""
    counts = torch.bincount(sample.rows[_fitted(sample)], minlength=wf.num_classes)
    if sample.labels is not None:
        return None, "images have several labels"
    if int((counts > 0).sum()) < 2:
        return None, "all images are of one class"
    if not bool((counts > 1).any()):
        return None, "there is at most one image of each class"
    try:
        return plain_head(wf, sample.read(torch.arange(1))), ""
    except ValueError:
        return None, "the logits are not what one linear layer makes of (batch, features)"


def _fitted(sample: Sample) -> Tensor:
    """Which images rows are made from: those that are not held out, or all where all are."""
    return sample.held if bool(sample.held.all()) else ~sample.held


IMAGINED = 256  # features for a class without images


def imagined_features(features: Tensor, rows: Tensor, bare: int, head: PlainHead) -> Tensor:
    """Features as a class without images may have them, ``(count, width)``.

    Their mean is the likeliest one, by the mean and the covariance of all features, to which the
    head gives the logits that it gives other classes on their images; around it they spread as the
    other classes do.
    """
    logits = head(features).double()
    known = torch.unique(rows[rows != bare])
    own = rows[:, None] == torch.arange(logits.shape[1])
    wanted = torch.stack([column[~mine].mean() for column, mine in zip(logits.T, own.T)])
    wanted[bare] = logits[own].mean()
    h, weight = features.double(), head.weight.double()
    centre, covariance = h.mean(0), torch.cov(h.T, correction=0)
    seen = weight @ covariance @ weight.T
    seen += 1e-3 * seen.diagonal().mean() * torch.eye(len(seen))
    gain = torch.linalg.lstsq(seen, (wanted - logits.mean(0)).unsqueeze(1)).solution[:, 0]
    mean = centre + covariance @ weight.T @ gain
    means = {row: h[rows == row].mean(0) for row in known.tolist()}
    some = torch.linspace(0, len(h) - 1, min(len(h), IMAGINED)).long()
    return torch.stack([mean + h[i] - means[int(rows[i])] for i in some]).float()


@dataclass
class Instant:
    """The features of a sample, and what rows made from them do.

    Attributes:
        wf: The filtered model.
        sample: The images.
        head: What makes their logits.
        features: What it sees of them under open gates, ``(count, width)``, float32 on the CPU.
    """

    wf: FilteredModel
    sample: Sample
    head: PlainHead
    features: Tensor

    @staticmethod
    @torch.no_grad()
    def look(wf: FilteredModel, sample: Sample, head: PlainHead) -> Instant:
        """Run all images once."""
        parts = torch.split(torch.arange(len(sample)), BATCH)
        features = [wf.features(sample.read(part)).float().cpu() for part in parts]
        return Instant(wf, sample, head, torch.cat(features))

    @property
    def base(self) -> Tensor:
        """The base model's logits."""
        return self.head(self.features)

    def rows(self) -> FeatureRows:
        """From images that are not held out; of classes without any, from what the head says."""
        fit = _fitted(self.sample)
        features, rows = self.features[fit], self.sample.rows[fit]
        statistics = FeatureStatistics(self.wf.num_classes, self.head.width)
        statistics.add(features, rows, self.head(features))
        for bare in (statistics.counts == 0).nonzero()[:, 0].tolist():
            imagined = imagined_features(features, rows, bare, self.head)
            statistics.add(imagined, torch.full((len(imagined),), bare))
        return fit_rows(
            statistics, rank=REROUTE.rank, prior=REROUTE.prior,
            head=self.head.name, logits_of=self.head,
        )  # fmt: skip

    def answer(self, rows: FeatureRows) -> Answer:
        """What the model would answer with these rows, for `judging.judge`."""

        def logits(index: Tensor, forget: Tensor, blend: Blend | None) -> Tensor:
            features = self.features[index]
            if blend is not None:
                weight = blend.weight[:, None]
                features = weight * features + (1 - weight) * self.features[blend.other]
            sets = as_sets(forget, self.wf.num_classes)
            edited: Tensor = rows(features, sets, self.head)[1]
            return torch.where(sets.any(1, keepdim=True), edited, self.head(features))

        return logits

    @torch.no_grad()
    def attach(self, rows: FeatureRows) -> bool:
        """In place: give the model these rows and open all gates; whether it answers as judged."""
        wf = self.wf
        wf.hard = False
        wf.pin_open([target.name for target in wf.targets])
        wf.feature_rows = rows.to(wf.alphas.device)
        index = torch.arange(len(self.sample))[:PROVED]
        forget = torch.where(index % 3 == 0, -1, self.sample.rows[index])
        expected = self.answer(rows.cpu())(index, forget, None)
        wf.feature_rows = rows.to(wf.alphas.device)
        images = self.sample.read(index)
        answered = logits_of(wf(images, forget=forget.to(wf.alphas.device))).float().cpu()
        return torch.allclose(answered, expected, rtol=0.02, atol=0.02 * size(expected))


def is_watchable(wf: FilteredModel, images: Tensor) -> bool:
    """Whether the head sees a whole batch at once in a mixed forward."""
    return not wf.is_compiled and wf.is_fused(read_inputs(images, {}))
