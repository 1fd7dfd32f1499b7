"""Run the metrics over a filtered model, and over its rivals in the same table."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wfilter import __version__, baselines
from wfilter.core.forget import refuse_other_classes
from wfilter.core.gates import class_index
from wfilter.core.model import FilteredModel
from wfilter.core.refusals import refuse_no_logits
from wfilter.core.renamed import renamed_keywords
from wfilter.data.batches import labelled
from wfilter.data.reading import LabelledBatches, as_batches
from wfilter.data.running import device_of
from wfilter.evaluation.report import Report
from wfilter.files.checkpoint import fingerprint
from wfilter.metrics.method import Method, run
from wfilter.metrics.problem import Budget, Problem
from wfilter.metrics.registry import METRICS, measure

CHEAP = ("accuracy", "zrf", "cost")
Rivals: TypeAlias = Iterable[str] | Mapping[str, Mapping[int, nn.Module]]


@renamed_keywords(rows="classes")
def evaluate(
    model: FilteredModel | nn.Module,
    data: Any,
    *,
    metrics: str | Iterable[str] = CHEAP,
    classes: int | str | Sequence[int | str] | None = None,
    train: Any = None,
    retrained: nn.Module | Mapping[int, nn.Module] | None = None,
    rivals: Rivals = (),
    rival_options: Mapping[str, Mapping[str, Any]] | None = None,
    original: nn.Module | None = None,
    budget: Budget | None = None,
    seconds: float | None = None,
    factory: Callable[[], nn.Module] | None = None,
    seed: int = 0,
) -> Report:
    """A table of everything asked about a filtered model, with the original and rivals beside it.

    Every image is made to forget all classes in turn, in mixed batches: ten classes cost ten
    forwards of the data (fewer where they share what lies before the first gate), and the data is
    read once for each method.

    Args:
        model: A filtered model; or a plain one that has forgotten the one class in ``classes``.
        data: Test images with labels: an `ImageSet`, a dataset, batches, or a pair of tensors.
        metrics: ``"all"`` or names: ``accuracy`` (with worst row, confusion, routing and AUS),
            ``sets``, ``zrf``, ``probe``, ``membership``, ``relearn``, ``few_shot``, ``curves``
            (insertion and deletion), ``cost``. The default ones are cheap.
        classes: To forget, one at a time; default all.
        train: Training images with labels, for ``probe``, ``membership``, ``relearn``,
            ``few_shot`` and for rivals given by name, which see them shuffled (batches that you
            made keep your order).
        retrained: The model retrained without a class, for each class; its numbers are the bar.
        rivals: Names from `wfilter.baselines.METHODS` or ``"all"``, run here; or finished models,
            ``{name: {class: model}}``.
        rival_options: Keyword arguments for a rival given by name.
        original: The original model, if ``model`` is a plain one.
        budget: How many images, draws and epochs the metrics may use.
        seconds: How long untraining took (``History.seconds``), shown as its cost.
        factory: Makes a freshly initialised model, where a copy of the original cannot be reset.
        seed: Of everything random.

    Raises:
        ValueError: A class has no samples, a metric is unknown or lacks what it needs.
        TypeError: The data has no labels or can be read only once.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*", init=-1000.0)
        >>> data = (torch.randn(30, 4), torch.arange(30) % 3)
        >>> report = evaluate(wf, data, rivals=["logit_mask"], train=data)
        >>> report.methods
        ('original', 'wfilter', 'logit_mask')
        >>> report.value("logit_mask", "Acc_f")
        0.0
    """
    start = time.perf_counter()
    names = _chosen(metrics)
    shared = {"train": train, "original": original, "budget": budget, "factory": factory}
    problem = make_problem(model, data, classes=classes, seed=seed, **shared)
    _refuse_lacking(names, rivals, train)
    methods = [_under_test(model, problem, seconds)]
    methods += [as_method(retrained, problem, None, "retrained")] if retrained is not None else []
    methods += _rivals(rivals, rival_options or {}, problem, train)
    if any(method.name != "original" for method in methods):
        methods.insert(0, Method.of_one("original", problem.base, problem.classes))
    parts = [report_on(method, problem, _possible(names, metrics, problem)) for method in methods]
    parts += _controls(names, methods, problem)
    report = Report.join(parts)
    took = round(time.perf_counter() - start, 1)
    return with_origin(report, names, problem, took)


def compare(
    wf: FilteredModel,
    models: Mapping[str, Mapping[int, nn.Module]],
    data: Any,
    *,
    classes: Sequence[int | str],
    **options: Any,
) -> Report:
    """A filtered model and finished models of other methods in one table, on a few classes.

    Args:
        wf: The filtered model.
        models: Method -> class -> model that has forgotten the class. ``"retrained"`` is the bar.
        data: As in `evaluate`.
        classes: To forget, one at a time.
        options: Of `evaluate`.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
        >>> data = (torch.randn(30, 4), torch.arange(30) % 3)
        >>> compare(wf, {"retrained": {1: nn.Linear(4, 3)}}, data, classes=[1]).methods
        ('original', 'retrained', 'wfilter')
    """
    return evaluate(wf, data, classes=classes, rivals=models, **options)


@renamed_keywords(rows="classes")
def make_problem(
    model: FilteredModel | nn.Module,
    data: Any,
    *,
    classes: int | str | Sequence[int | str] | None = None,
    train: Any = None,
    original: nn.Module | None = None,
    budget: Budget | None = None,
    factory: Callable[[], nn.Module] | None = None,
    seed: int = 0,
) -> Problem:
    """The problem to measure methods on with `report_on`; arguments as in `evaluate`.

    Example:
        >>> data = (torch.randn(30, 4), torch.arange(30) % 3)
        >>> base = nn.Linear(4, 3)
        >>> problem = make_problem(base, data, classes=1, original=base)
        >>> report_on(Method.of_models("mine", {1: nn.Linear(4, 3)}), problem, ["accuracy"]).methods
        ('mine',)
    """
    batches = as_batches(data)
    if isinstance(model, FilteredModel):
        refuse_no_logits(model, "evaluate")
        refuse_other_classes(model.class_names, data)
        refuse_other_classes(model.class_names, train)
        base, number, names = model.base, model.num_classes, model.class_names
    elif classes is None or original is None:
        raise ValueError(
            "a plain model has forgotten one class: say which with classes=, and pass original=, "
            "the model it was made from."
        )
    else:
        base, names = original, getattr(data, "class_names", None)
        number = num_classes(base, batches)
    named = [classes] if isinstance(classes, int | str) else classes
    wanted = range(number) if named is None else named
    chosen = tuple(sorted({class_index(row, number, names) for row in wanted}))
    if not chosen:
        raise ValueError("classes is empty: name at least one class to forget.")
    trained = None if train is None else as_batches(train, "train")
    names = names or getattr(data, "class_names", None)
    return Problem(base, batches, trained, chosen, number, budget or Budget(), seed, factory, names)


def report_on(method: Method, problem: Problem, metrics: Iterable[str] = CHEAP) -> Report:
    """The report of one method; join several with `Report.join`.

    Example:
        >>> data, base = (torch.randn(30, 4), torch.arange(30) % 3), nn.Linear(4, 3)
        >>> problem = make_problem(base, data, classes=[0, 1], original=base)
        >>> report = report_on(Method.of_one("original", base, (0, 1)), problem, ["accuracy"])
        >>> report.value("original", "AUS") <= 1
        True
    """
    cells: dict[str, Any] = {}
    details: dict[str, Any] = {}
    names = list(metrics)
    for name in names:
        measured = measure(name, method, problem)
        cells |= measured.cells
        for detail, value in measured.details.items():
            details[detail] = {method.name: value}
    ordered = [METRICS[name] for name in METRICS if name in names]
    columns = tuple(column for each in ordered for column in each.columns(problem))
    rows = {method.name: cells}
    return Report(
        columns, rows, problem.classes, problem.class_names, _conditions(problem, names), details
    )


# ---- methods ----------------------------------------------------------------------------------


def as_method(models: Any, problem: Problem, seconds: float | None, name: str) -> Method:
    """A filtered model, one plain model, or models by class as a method for the problem's classes.

    Example:
        >>> problem = Problem(nn.Linear(4, 3), [], None, (1,), 3)
        >>> as_method(nn.Linear(4, 3), problem, None, "mine").classes
        (1,)
    """
    if isinstance(models, FilteredModel):
        return Method.of_filtered(models, problem.classes, name, seconds)
    if isinstance(models, nn.Module):
        models = {_only_class(name, problem): models}
    if not isinstance(models, Mapping):
        raise TypeError(f"{name} is a {type(models).__name__}; expected {{class: model}}.")
    kept = {row: models[row] for row in problem.classes if row in models}
    if not kept:
        raise ValueError(
            f"{name} has models for the classes {sorted(models)}\n"
            f"and the report is for {list(problem.classes)}. Pass a model for one of these."
        )
    return Method.of_models(name, kept, {} if seconds is None else dict.fromkeys(kept, seconds))


def _only_class(name: str, problem: Problem) -> int:
    """The one class that a plain model can have forgotten."""
    count = len(problem.classes)
    if count > 1 and name == "retrained":
        raise ValueError(
            f"one retrained model for {count} classes. Pass {{class: model}}: each class has a "
            "model of its own that never saw it."
        )
    if count > 1:
        raise ValueError(
            f"a plain model has forgotten one class, but classes= names {count}. Pass models by "
            "class, {class: model}."
        )
    return problem.classes[0]


def _under_test(model: nn.Module, problem: Problem, seconds: float | None) -> Method:
    if model is problem.base:
        return Method.of_one("original", model, problem.classes)
    name = "wfilter" if isinstance(model, FilteredModel) else "model"
    return as_method(model, problem, seconds, name)


def _rivals(
    rivals: Rivals, options: Mapping[str, Mapping[str, Any]], problem: Problem, train: Any
) -> list[Method]:
    if isinstance(rivals, Mapping):
        return [_finished(name, models, problem) for name, models in rivals.items()]
    chosen = (
        (baselines.METHODS if rivals == "all" else [rivals]) if isinstance(rivals, str) else rivals
    )
    names = [name for name in chosen if name != "original"]
    made = {}
    for row in problem.classes if names else ():
        batches = as_batches(train, "train", shuffle=problem.seed)
        pairs = LabelledBatches(batches, problem.num_classes, "train")
        made[row] = baselines.run(
            problem.base, row, pairs, methods=names, options=options, seed=problem.seed
        )
    return [
        Method.of_models(
            name,
            {row: rival[name].model for row, rival in made.items()},
            {row: rival[name].seconds for row, rival in made.items()},
        )
        for name in names
    ]


def _finished(name: str, models: Any, problem: Problem) -> Method:
    if not isinstance(models, Mapping):
        raise TypeError(f"{name} is a {type(models).__name__}; expected {{class: model}}.")
    return as_method(models, problem, None, name)


def _controls(names: Sequence[str], methods: Sequence[Method], problem: Problem) -> list[Report]:
    """Reference lines for some metrics: a random network for probes, a logit mask for sets."""
    parts = []
    if "probe" in names and problem.resettable:
        random = Method.of_one("random network", problem.random_networks[0], problem.classes)
        parts.append(report_on(random, problem, ["probe"]))
    if "sets" in names:

        def masked(images: Tensor, chosen: Tensor) -> Tensor:
            return run(problem.base, images).masked_fill(chosen, -torch.inf)

        mask = Method("logit_mask", problem.classes, lambda row: problem.base, sets=masked)
        parts.append(report_on(mask, problem, ["sets"]))
    return parts


# ---- what was asked ---------------------------------------------------------------------------


def _chosen(metrics: str | Iterable[str]) -> list[str]:
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    names = list(METRICS) if names == ["all"] else names
    unknown = [name for name in names if name not in METRICS]
    if unknown or not names:
        raise ValueError(
            f"metrics={unknown or names} is unknown; expected 'all' or some of {list(METRICS)}."
        )
    return [name for name in METRICS if name in names]


def _refuse_lacking(names: Sequence[str], rivals: Rivals, train: Any) -> None:
    if train is not None:
        return
    needy = [name for name in names if METRICS[name].needs_train]
    if needy:
        raise ValueError(f"{', '.join(needy)} need training images: pass train=.")
    if rivals and not isinstance(rivals, Mapping):
        raise ValueError(
            "rivals given by name are made here and need training images: pass train=."
        )


def _possible(names: list[str], asked: str | Iterable[str], problem: Problem) -> list[str]:
    """The metrics, less ZRF where it is only a default and no random network can be made."""
    if "zrf" in names and asked is CHEAP and not problem.resettable:
        return [name for name in names if name != "zrf"]
    return names


def num_classes(model: nn.Module, batches: Any) -> int:
    """How many classes a model answers with.

    Example:
        >>> num_classes(nn.Linear(4, 3), [(torch.ones(2, 4), torch.arange(2))])
        3
    """
    first = next(iter(batches), None)
    if first is None:
        raise ValueError("data has no batches with images in them.")
    return int(run(model, labelled(first, "data")[0][:1]).shape[-1])


# ---- conditions -------------------------------------------------------------------------------


def _conditions(problem: Problem, names: Sequence[str]) -> dict[str, Any]:
    python = platform.python_version()
    budget = asdict(problem.budget) | {"retain_rows": problem.retain_rows or "all"}
    return {
        "seed": problem.seed,
        "metrics": list(names),
        **({"test images": _counted(problem)} if "accuracy" in names else {}),
        "budget": {k: list(v) if isinstance(v, tuple) else v for k, v in budget.items()},
        "versions": {"wfilter": __version__, "torch": str(torch.__version__), "python": python},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "device": str(device_of(problem.base)),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
    }


def _counted(problem: Problem) -> dict[str, int]:
    """How many images the accuracies are shares of."""
    counts = problem.counts[1][list(problem.classes)]
    fewest = int(counts.min())
    return {"in all": int(problem.counts[1].sum()), "of a forgotten class, at least": fewest}


def with_origin(report: Report, names: Sequence[str], problem: Problem, took: float) -> Report:
    """The report with two more conditions: the original's fingerprint, the seconds it took."""
    more: dict[str, Any] = {
        "original": fingerprint(problem.base)[:16],
        "seconds of evaluation": took,
    }
    if "zrf" in names and not any("ZRF" in row for row in report.rows.values()):
        more["left out"] = "zrf: no random network could be made of this model; pass factory="
    return replace(report, conditions={**report.conditions, **more})
