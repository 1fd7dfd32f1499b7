"""Measure a filtered model and put the sections of its report together."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wfilter import explain
from wfilter.core.gates import class_index
from wfilter.core.model import FilteredModel
from wfilter.core.renamed import renamed_keywords
from wfilter.data.images import ImageSet
from wfilter.evaluation.audit import Audit
from wfilter.page import html
from wfilter.page.audit import audit_sections
from wfilter.page.maker import Maker
from wfilter.page.overview import alike, every_class, shared, where
from wfilter.page.panel import panel
from wfilter.page.sample import PageSample, take_page_sample
from wfilter.page.summary import header
from wfilter.untraining.history import History

PANELS = 20  # classes with a panel of their own, unless the caller names them
OVERVIEW = 100  # classes drawn in the pictures of all classes
FOOTER = (
    "A run-time filter hides a class, it does not erase it: whoever holds the weights can open the "
    "gates."
)


@renamed_keywords(facts="about")
def write_page(
    wf: FilteredModel,
    data: ImageSet | Iterable[Any],
    path: str | Path,
    *,
    title: str = "",
    about: Mapping[str, object] | None = None,
    history: History | None = None,
    classes: Sequence[int | str] | None = None,
    layers: Sequence[str] | None = None,
    per_class: int = 50,
    curve_images: int = 10,
    steps: int = 20,
    audit: Audit | None = None,
) -> Path:
    """Measure a filtered model on some images and write one HTML file with all that it shows.

    Args:
        wf: The filtered model.
        data: An `ImageSet`, or batches ``(images, labels)``; without an image set the pictures are
            stretched to full contrast, since their normalisation is not known.
        path: The file to write.
        title: The heading; by default the model's class.
        about: Shown in the header: model, data, recipe, figures measured elsewhere.
        history: The history of untraining, to show its course.
        classes: Those with a panel of their own; by default the first 20 with images.
        layers: Targets to draw; by default the first, the intermediate and the last live one.
        per_class: Images of each class for accuracies and pictures, the first of the data.
        curve_images: How many of them for insertion and deletion, which cost most.
        steps: How many steps insertion and deletion take.
        audit: An audit of the same model (`wfilter.audit`), to be shown on the page, too.

    Returns:
        The path.

    Example:
        >>> import torch
        >>> import tempfile, wfilter
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> wf = wfilter.apply_weight_filtering(
        ...     model, targets="*", example_input=torch.zeros(1, 1, 2, 2)
        ... )
        >>> batch = (torch.rand(6, 1, 2, 2), torch.arange(6) % 3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_page(wf, [batch], f"{folder}/a.html", steps=2).name
        'a.html'
    """
    sample = take_page_sample(wf, data, per_class)
    present = sorted(set(sample.labels.tolist()))
    shown = _chosen(wf, classes, sample, present)
    chosen = [explain.find_layer(wf, x) for x in layers] if layers else explain.default_layers(wf)
    curves = {
        row: explain.class_curves(
            wf, sample.images[sample.of_class(row, curve_images)], row, steps=steps
        )
        for row in shown
    }
    with tempfile.TemporaryDirectory() as folder:
        make = Maker(wf, sample, curves, Path(folder), present[:OVERVIEW], tuple(chosen))
        heading = title or f"What {type(wf.base).__name__} forgets, and with which units"
        sections = [
            html.Section(
                "class",
                "One class at a time",
                html.tabs([(sample.names[r], panel(make, r)) for r in shown], "class"),
            ),
            every_class(make),
            where(make, history),
            shared(make),
            alike(make),
            *(audit_sections(audit, Path(folder)) if audit is not None else ()),
        ]
        text = html.document(heading, header(make, heading, about or {}), sections, FOOTER)
        Path(path).write_text(text, encoding="utf-8")
    return Path(path)


def _chosen(
    wf: FilteredModel, classes: Sequence[int | str] | None, sample: PageSample, present: list[int]
) -> list[int]:
    """The rows with a panel; a class without images is an error."""
    if classes is None:
        return present[:PANELS]
    rows = [class_index(c, wf.num_classes, sample.names) for c in classes]
    missing = [sample.names[row] for row in rows if row not in present]
    if missing or not rows:
        raise ValueError(f"classes={list(classes)}: the data has no images of {missing}.")
    return rows
