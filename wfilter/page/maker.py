"""What several sections of the page need: figures, drawings, results, each measured once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from wfilter import explain, metrics
from wfilter.core.gates import slices
from wfilter.core.model import FilteredModel
from wfilter.metrics.layers import all_gates
from wfilter.page import html
from wfilter.page.sample import PageSample


@dataclass
class Maker:
    """What every section needs: the model, its numbers, and a folder to draw in."""

    wf: FilteredModel
    sample: PageSample
    curves: dict[int, explain.ClassCurves]
    folder: Path
    classes: list[int]
    layers: tuple[str, ...]
    drawn: int = 0
    _responses: Tensor | None = None

    @cached_property
    def problem(self) -> metrics.Problem:
        """The sample as the problem that metrics are measured on."""
        present = tuple(sorted(set(self.sample.labels.tolist())))
        batches = [(self.sample.images, self.sample.labels)]
        return metrics.Problem(self.wf.base, batches, None, present, self.wf.num_classes)

    @cached_property
    def answers(self) -> metrics.Answers:
        """The filtered model's answers to the sample while each class is forgotten in turn."""
        method = metrics.Method.of_filtered(self.wf, self.problem.classes)
        return metrics.answers(method, self.problem)

    @cached_property
    def base_logits(self) -> Tensor:
        """The base model's logits ``(count, num_classes)``."""
        return metrics.collect_logits(self.wf.base, self.problem.batches)[0]

    @cached_property
    def original(self) -> dict[int, float]:
        """Class -> the base model's accuracy on it."""
        labels = self.sample.labels
        return dict(metrics.forget_accuracy(self.base_logits, labels, labels).by_row)

    @cached_property
    def retain(self) -> metrics.RowScores:
        """Acc_r by forgotten class: accuracy on the images of all others."""
        return self.answers.retain

    @cached_property
    def forget(self) -> metrics.RowScores:
        """Acc_f by forgotten class: accuracy on its own images."""
        return self.answers.forget

    def routing(self, row: int) -> Tensor:
        """Share of a forgotten class's images taken for each class, ``(num_classes,)``."""
        return self.answers.routing(row, self.wf.num_classes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all classes."""
        return self.sample.names

    def draw(
        self, plot: Callable[..., Path], numbers: Any, *args: Any, label: str, **kw: Any
    ) -> str:
        """What a function of `wfilter.plots` draws, as inline SVG."""
        self.drawn += 1
        path = plot(numbers, self.folder / f"{self.drawn}.svg", *args, **kw)
        return html.inline_svg(path, f"p{self.drawn}", label)

    def gates(self, layer: str) -> Tensor:
        """Gates of a layer, ``(num_classes, units)``."""
        return all_gates(self.wf)[:, slices(self.wf.targets)[layer]]

    def responses(self) -> Tensor | None:
        """Responses of the last layer's units to the sample, if they can be watched."""
        if self._responses is None:
            try:
                sample = self.sample
                self._responses = explain.unit_responses(self.wf, self.layers[-1], sample.images)
            except ValueError:
                return None
        return self._responses


def percent(share: float) -> str:
    """A share in 0..1 as the percentage that the page shows."""
    return f"{100 * share:.1f} %"


def route(routing: Tensor, names: Sequence[str], count: int) -> str:
    """The ``count`` classes that most images are taken for, with their shares."""
    top = [row for row in routing.argsort(descending=True)[:count].tolist() if routing[row]]
    return ", ".join(f"{names[row]} ({100 * float(routing[row]):.0f} %)" for row in top)
