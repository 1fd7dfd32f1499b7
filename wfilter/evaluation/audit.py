"""Audit any unlearned model: what its outputs and its features still know, class by class.

    report = wfilter.audit(unlearned, test, forget=3, train=train, original=base, retrained=gold)

Every number stands beside the retrained model's, with its uncertainty and a plain verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wfilter.core.forget import refuse_other_classes
from wfilter.core.gates import class_index
from wfilter.core.model import FilteredModel
from wfilter.data.reading import as_batches
from wfilter.evaluation.render import aligned, number, piped
from wfilter.evaluation.report import Report
from wfilter.evaluation.run import as_method, num_classes, report_on, with_origin
from wfilter.evaluation.verdict import FEATURES, OUTPUTS, RULE, Verdict, verdict
from wfilter.metrics.method import Method, run
from wfilter.metrics.problem import Budget, Problem

BUDGET = Budget(test_images=2000, train_images=5000, shots=(1, 5, 10, 500))
"""Images and shots an audit uses unless told otherwise: minutes on a CPU for a small network."""

METRICS = ("accuracy", "protocol", "zrf", "probe", "attacks", "depth", "membership", "few_shot",
           "cost")  # fmt: skip
KNOWS = 0.05
"""Accuracy on the class above which a retrained reference is refused: it has seen the class."""

Models: TypeAlias = "FilteredModel | nn.Module | Mapping[int, nn.Module]"


@dataclass(frozen=True)
class Audit:
    """The tables of an audit, and a verdict for every method and class.

    Attributes:
        report: Methods by metrics; ``original`` and ``retrained`` are for comparison.
    """

    report: Report

    @property
    def methods(self) -> tuple[str, ...]:
        """The models audited, without those they are compared with."""
        compared = ("original", "retrained", "random network")
        return tuple(m for m in self.report.methods if m not in compared)

    def verdict(self, method: str, row: int) -> Verdict | None:
        """What became of one class, or ``None`` where the method was not asked to forget it."""
        return verdict(self.report, method, row)

    def lines(self) -> list[tuple[str, str, str]]:
        """(method, class, verdict) for each class of each method."""
        pairs = [
            (m, row, self.verdict(m, row)) for m in self.methods for row in self.report.classes
        ]
        return [(m, self.report.name_of(row), str(v)) for m, row, v in pairs if v is not None]

    def _grid(self) -> list[list[str]]:
        return [["method", "class", "verdict"], *(list(line) for line in self.lines())]

    def worst(self) -> list[list[str]]:
        """A table: for each method, the worst class's number in each main column."""
        names = [c.name for c in self.report.columns if c.name in (*OUTPUTS, *FEATURES, "Acc_r")]
        grid = [["method", *names]]
        for method in self.report.methods:
            worst = [self.report.worst(method, name) for name in names]
            if any(worst):
                kinds = [self.report.column(name).kind for name in names]
                shown = [
                    "-" if x is None else f"{number(x[0], kind)} {self.report.name_of(x[1])}"
                    for x, kind in zip(worst, kinds)
                ]
                grid.append([method, *shown])
        return grid

    def __str__(self) -> str:
        verdicts = aligned(self._grid(), left=(0, 1, 2))
        worst = aligned(self.worst())
        return f"{self.report}\n\nthe worst class of each column\n{worst}\n\nverdicts\n{verdicts}"

    def to_markdown(self) -> str:
        """The verdicts, then the report's tables and definitions."""
        return (
            f"### Verdicts\n\n{piped(self._grid(), left=(0, 1, 2))}\n\n{RULE}\n\n"
            f"### The worst class of each column\n\n{piped(self.worst())}\n\n"
            f"{self.report.to_markdown()}"
        )

    def to_latex(self) -> str:
        """The report's tables as ``tabular``; verdicts as comments."""
        comments = "\n".join(f"% {m}, {c}: {v}" for m, c, v in self.lines())
        return f"{self.report.to_latex()}\n{comments}\n"

    def to_json(self, path: str | Path | None = None) -> str:
        """The report with the verdicts in it; `from_json` reads it."""
        said = {
            method: {row: v.said for row in self.report.classes if (v := self.verdict(method, row))}
            for method in self.methods
        }
        details = {**self.report.details, "verdict": said}
        return replace(self.report, details=details).to_json(path)

    @staticmethod
    def from_json(source: str | Path) -> Audit:
        """An audit from the text of `to_json` or a file with it."""
        report = Report.from_json(source)
        details = {name: value for name, value in report.details.items() if name != "verdict"}
        return Audit(replace(report, details=details))


def audit(
    model: Models,
    data: Any,
    *,
    train: Any,
    forget: int | str | Sequence[int | str] | None = None,
    original: nn.Module | None = None,
    retrained: nn.Module | Mapping[int, nn.Module] | None = None,
    others: Mapping[str, Mapping[int, nn.Module]] | None = None,
    name: str | None = None,
    seconds: float | None = None,
    budget: Budget | None = None,
    factory: Callable[[], nn.Module] | None = None,
    seed: int = 0,
) -> Audit:
    """All that an unlearned model still knows of what it should have forgotten, in one report.

    Args:
        model: A plain model that has forgotten one class, models by class, or a filtered model.
        data: Test images with labels, in any form that `evaluate` takes.
        train: Training images with labels, all classes: attackers are given them.
        forget: The class that was forgotten, or several, each by a model of its own; by default
            the classes of a mapping, all classes of a filtered model.
        original: The model before forgetting; a filtered model brings its own.
        retrained: The model trained without the class, or one for each class: the bar.
        others: Further methods for the same table, ``{name: {class: model}}``.
        name: What to call the model in the tables.
        seconds: How long forgetting took, shown as its cost.
        budget: How many images and steps the attacks may use.
        factory: Makes a freshly initialised model, where a copy cannot be reset.
        seed: Of everything random.

    Raises:
        ValueError: The models differ in the number or the order of their classes, or the retrained
            model knows the class.

    Example:
        >>> torch.manual_seed(0).initial_seed()
        0
        >>> images, labels = torch.randn(90, 4), torch.arange(90) % 3
        >>> report = audit(nn.Linear(4, 3), (images, labels), train=(images, labels), forget=1)
        >>> report.methods
        ('model',)
    """
    start = time.perf_counter()
    problem = problem_of(
        model, data, train, forget, original, budget or BUDGET, factory=factory, seed=seed
    )
    audited = [as_method(model, problem, seconds, name or _name(model))]
    audited += [as_method(models, problem, None, key) for key, models in (others or {}).items()]
    methods = [*_compared(original, retrained, model, problem), *audited]
    for method in methods:
        refuse_other_models(method, problem)
    if not audited[0].classes:
        raise ValueError("there is no class to audit: pass forget=.")
    names = [n for n in METRICS if n != "zrf" or problem.resettable]
    report = Report.join(report_on(method, problem, names) for method in methods)
    images = {**report.conditions, "images": image_counts(problem)}
    took = round(time.perf_counter() - start, 1)
    return Audit(with_origin(replace(report, conditions=images), names, problem, took))


def _name(model: Models) -> str:
    return "wfilter" if isinstance(model, FilteredModel) else "model"


def problem_of(
    model: Models,
    data: Any,
    train: Any,
    forget: int | str | Sequence[int | str] | None,
    original: nn.Module | None,
    budget: Budget,
    *,
    factory: Callable[[], nn.Module] | None = None,
    seed: int = 0,
) -> Problem:
    """The problem that an audit measures on; arguments as in `audit`."""
    batches = as_batches(data)
    names = getattr(data, "class_names", None)
    if isinstance(model, FilteredModel):
        refuse_other_classes(model.class_names, data)
        refuse_other_classes(model.class_names, train)
        base, names = model.base, model.class_names or names
    else:
        base = original or (next(iter(model.values())) if isinstance(model, Mapping) else model)
    number = num_classes(base, batches)
    if names is not None and len(names) != number:
        raise ValueError(
            f"the model has {number} outputs\nand the data {len(names)} classes. Audit it on the "
            "classes it was made for."
        )
    chosen = _chosen(model, forget, number, names)
    problem = Problem(
        base, batches, as_batches(train, "train"), chosen, number, budget, seed, factory, names
    )
    fewest = int(torch.bincount(problem.train[1], minlength=number).min())
    problem.budget = replace(budget, shots=tuple(k for k in budget.shots if k <= fewest))
    return problem


def _chosen(
    model: Models,
    forget: int | str | Sequence[int | str] | None,
    number: int,
    names: tuple[str, ...] | None,
) -> tuple[int, ...]:
    """The classes to audit, by index: those asked for, or all that the model can forget."""
    if forget is None and isinstance(model, nn.Module) and not isinstance(model, FilteredModel):
        raise ValueError("a plain model has forgotten one class: say which with forget=.")
    if forget is None:
        named: Any = range(number) if isinstance(model, FilteredModel) else model
    else:
        named = [forget] if isinstance(forget, int | str) else forget
    chosen = tuple(sorted({class_index(row, number, names) for row in named}))
    if not chosen:
        raise ValueError("forget is empty: name at least one class.")
    return chosen


def _compared(
    original: nn.Module | None,
    retrained: nn.Module | Mapping[int, nn.Module] | None,
    model: Models,
    problem: Problem,
) -> list[Method]:
    """What to compare with: the original, if known, and the retrained models, if any."""
    methods = []
    if original is not None or isinstance(model, FilteredModel):
        methods.append(Method.of_one("original", problem.base, problem.classes))
    if retrained is not None:
        methods.append(as_method(retrained, problem, None, "retrained"))
    return methods


def image_counts(problem: Problem) -> dict[str, dict[int, int]]:
    """For each kind of share (`Column.over`) and class, how many images it is a share of."""
    labels = {"test": problem.counts[1], "sample": problem.test[1], "train": problem.train[1]}
    size = problem.num_classes
    counts = {
        kind: values if kind == "test" else torch.bincount(values, minlength=size)
        for kind, values in labels.items()
    }
    own = {f"forget {k}": {c: int(n[c]) for c in problem.classes} for k, n in counts.items()}
    rest = {
        f"retain {k}": {c: int(n.sum() - n[c]) for c in problem.classes} for k, n in counts.items()
    }
    return own | rest


# ---- refusals -----------------------------------------------------------------------------------


def refuse_other_models(method: Method, problem: Problem) -> None:
    """Stop at a model whose numbers would not mean what their columns say.

    Example:
        >>> data = [(torch.ones(4, 2), torch.arange(4) % 2)]
        >>> problem = Problem(nn.Linear(2, 2), data, None, (0,), 2)
        >>> refuse_other_models(Method.of_models("mine", {0: nn.Linear(2, 5)}), problem)
        Traceback (most recent call last):
        ValueError: mine has 5 outputs
        and the audited problem 2 classes. All models of an audit must know the same classes.
    """
    images, labels = problem.test
    rows = method.classes[:1] if method.shared else method.classes
    for row in rows:
        logits = _some_logits(method, row, images)
        if logits.shape[1] != problem.num_classes:
            raise ValueError(
                f"{method.name} has {logits.shape[1]} outputs\nand the audited problem "
                f"{problem.num_classes} classes. All models of an audit must know the same classes."
            )
        predictions = logits.argmax(1)
        _refuse_another_order(method.name, row, predictions, labels, problem)
        knows = float((predictions[labels == row] == row).float().mean())
        if method.name == "retrained" and knows > KNOWS:
            raise ValueError(
                f"the retrained model for class {problem.named(row)} answers {100 * knows:.1f} % "
                "of its test images with it: it has seen the class. Pass a model trained without "
                "it."
            )


def _some_logits(method: Method, row: int, images: Tensor) -> Tensor:
    if method.filtered is not None:
        return method.logits(images, torch.full((len(images), 1), row))
    return run(method.model(row), images)


def _refuse_another_order(
    name: str, row: int, predictions: Tensor, labels: Tensor, problem: Problem
) -> None:
    """Stop where a model seems to have the right classes under permuted numbers.

    That is, each class is mostly answered with one class, no two with the same, and rarely right.
    """
    size = problem.num_classes
    counts = torch.bincount(labels * size + predictions, minlength=size**2).view(size, size)
    kept = [c for c in range(size) if c != row and int(counts[c].sum())]
    right = sum(int(counts[c, c]) for c in kept)
    best = {c: int(counts[c].argmax()) for c in kept}
    matched = sum(int(counts[c].max()) for c in kept)
    if len(set(best.values())) == len(kept) > 2 and matched > 2 * right:
        shown = ", ".join(
            f"{problem.named(c)} as {problem.named(b)}" for c, b in best.items() if c != b
        )
        raise ValueError(
            f"{name} seems to have its classes in another order: it answers {shown}. Reorder its "
            "head, or give the data in the model's order."
        )
