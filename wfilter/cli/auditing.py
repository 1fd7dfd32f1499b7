"""``wfilter audit``: models and references by name and file, and the report in any form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from wfilter.cli import jobs
from wfilter.core.gates import class_index
from wfilter.data.images import ImageSet
from wfilter.evaluation.audit import BUDGET, Audit, audit
from wfilter.page import write_audit

CLASS = "{class}"
FORMS: dict[str, Callable[[Audit, Path], Any]] = {
    ".html": write_audit,
    ".json": lambda audited, path: audited.to_json(path),
    ".md": lambda audited, path: path.write_text(audited.to_markdown(), encoding="utf-8"),
    ".tex": lambda audited, path: path.write_text(audited.to_latex(), encoding="utf-8"),
}


def check_path(path: Path) -> None:
    """Raise before any work if the report could not be written."""
    jobs.check_writable(path)
    if path.suffix not in FORMS:
        raise ValueError(f"--out {path} must end in {', '.join(FORMS)}.")


def run(
    model: str,
    job: dict[str, Any],
    classes: Sequence[str],
    original: str | None,
    retrained: str | None,
    images: int | None,
) -> Audit:
    """The audit of a folder of filters, or of a model by name with its weights.

    Args:
        model: A folder that ``untrain`` wrote, or a model as `wfilter.zoo.build` takes it.
        job: The other fields of `jobs.Job`.
        classes: Names or indices; empty: all classes of the filters.
        original: Weights of the model before forgetting.
        retrained: Weights of the model trained without the class; ``{class}`` in the path stands
            for the class's index, there and in the weights of ``job``.
        images: How many test images to attack; by default as many as `BUDGET` says.
    """
    budget = BUDGET if images is None else replace(BUDGET, test_images=images)
    if Path(model).exists():
        opened = jobs.open_filters(Path(model), None, **job)
        models: Any = opened.wf
        where, test, base = opened.job, opened.job.images("test"), None
        chosen = sorted(jobs.parse_classes(models, classes)) if classes else None
    else:
        where = jobs.Job(model, **job)
        where.refuse_random_weights()
        test = where.images("test")
        chosen = _rows(classes, test)
        models = _models(where, str(job["weights"]) if job.get("weights") else None, chosen)
        base = None if original is None else _network(where, original, test)
    gold = None if retrained is None else _models(where, retrained, chosen or range(len(test)))
    return audit(
        models,
        test,
        train=where.images("train"),
        forget=chosen,
        original=base,
        retrained=gold,
        budget=budget,
    )


def _rows(classes: Sequence[str], test: ImageSet) -> list[int]:
    words = [word.strip() for text in classes for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError("a plain model has forgotten one class: say which with --classes.")
    names = test.class_names
    return sorted(
        class_index(int(w) if w not in names and w.isdigit() else w, len(names), names)
        for w in words
    )


def _models(job: jobs.Job, weights: str | None, classes: Sequence[int]) -> dict[int, nn.Module]:
    """A model for each class; for several classes ``weights`` must hold ``{class}``."""
    if weights is not None and CLASS not in weights and len(classes) > 1:
        raise ValueError(
            f"{weights} is one model for {len(classes)} classes. Write {CLASS} where the class's "
            "index stands in the names of the files."
        )
    test = job.images("test")
    files = {row: None if weights is None else weights.replace(CLASS, str(row)) for row in classes}
    return {row: _network(job, file, test) for row, file in files.items()}


def _network(job: jobs.Job, weights: str | None, test: ImageSet) -> nn.Module:
    return replace(job, weights=weights).network(test.num_classes).eval()
