"""All classes side by side: accuracies, shared units, which classes are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import torch
from torch import Tensor

from wfilter import explain, plots
from wfilter.page import html
from wfilter.page.maker import Maker, percent, route
from wfilter.untraining.history import History

COURSE = (
    "Loss and accuracies of each step's own batch, in which many images forget several classes at "
    "once or are distorted: lower than in the table."
)
GRAPH = (
    "A line joins a class to a unit among its ten most closed ones; units of two classes or more."
)
HEAT = "A line for each class, a column for each unit: dark is closed."
MEANINGS = {
    "before": "The base model on the class's images.",
    "after": "Acc_f: the same images once the class is forgotten. 0 % is wanted.",
    "others": "Acc_r: the images of all other classes at the same time. As before is wanted.",
    "closed": "Gates below 0.5 when the class is forgotten.",
    "mostly goes to": "What most of the class's images are taken for once it is forgotten.",
    "insertion": "Area under the confidence in the class while its units are opened, the most "
    "closed first; in brackets in random order. Near 1 says that the gates mark the right units.",
    "deletion": "The same while they are closed. Near 0 says that the gates mark the right units.",
}


def every_class(make: Maker) -> html.Section:
    """The table of all classes, and how many gates each closes."""
    names = make.names
    closed = explain.closed_by_class(make.wf).tolist()
    rows = [
        [
            names[row],
            percent(make.original[row]),
            percent(make.forget.by_row[row]),
            percent(make.retain.by_row[row]) if row in make.retain.by_row else "-",
            f"{closed[row]}",
            route(make.routing(row), names, 1),
            *_areas([make.curves[row]] if row in make.curves else []),
        ]
        for row in make.classes
    ]
    table = html.table(["class", *MEANINGS], [*rows, *_totals(make, closed)], MEANINGS)
    return html.Section("every", "Every class in numbers", table)


def _totals(make: Maker, closed: Sequence[int]) -> list[list[str]]:
    """The last two lines of the table: the mean, and the worst class."""
    original = list(make.original.values())
    mean = [
        "mean",
        percent(sum(original) / len(original)),
        percent(make.forget.mean),
        percent(make.retain.mean),
        f"{sum(closed) / len(closed):.0f}",
        "",
        *_areas(list(make.curves.values())),
    ]
    worst = [percent(x) for x in (min(original), make.forget.worst, make.retain.worst)]
    return [mean, ["worst class", *worst, *[""] * 4]]


def _areas(curves: Sequence[explain.ClassCurves]) -> list[str]:
    """Areas under insertion and deletion, mean over classes, with the random control."""
    if not curves:
        return ["-", "-"]
    return [
        f"{explain.mean_curve(getattr(c, kind) for c in curves).auc:.2f} "
        f"({explain.mean_curve(getattr(c, f'random_{kind}') for c in curves).auc:.2f})"
        for kind in ("insertion", "deletion")
    ]


def where(make: Maker, history: History | None) -> html.Section:
    """The pictures over all classes: where gates close, how exactly, and how untraining went."""
    wf, names = make.wf, [make.names[row] for row in make.classes]
    layers, exact = explain.closed_by_layer(wf), explain.distance_from_exact(wf)
    counts = explain.closed_by_class(wf)[make.classes]
    figures = [
        html.figure(
            make.draw(plots.depth_plot, layers, label="closed gates by depth"),
            "Which layers do the forgetting, from input to output.",
        ),
        html.figure(
            make.draw(plots.closed_plot, counts, names, label="closed gates by class"),
            f"How many of the {wf.alphas.shape[1]} gates each class closes.",
        ),
        html.figure(
            make.draw(plots.exactness_plot, exact, label="how exact gates are"),
            "A gate at exactly 0 can be cut out of the model, one at 0.3 cannot.",
        ),
        html.figure(
            make.draw(plots.curves_plot, make.curves, label="insertion and deletion, mean"),
            "Thick: mean over classes; thin: each class. Blue should rise at once above and fall "
            "at once below; grey is the control.",
        ),
    ]
    if history is not None and history.records:
        picture = make.draw(plots.history_plot, history, label="the course of untraining")
        figures.append(html.figure(picture, COURSE))
    return html.Section("gates", "Which gates close", html.masonry(figures))


def shared(make: Maker) -> html.Section:
    """Which classes share units, layer by layer."""
    wf, rows, names = make.wf, make.classes, [make.names[row] for row in make.classes]
    overlap = explain.similarity(wf)[rows][:, rows]
    order = explain.class_order(overlap) if len(rows) > plots.MANY else list(range(len(rows)))
    panels = []
    for layer in make.layers:
        graph = explain.class_unit_graph(wf, layer, classes=rows)
        drawn = make.draw(
            plots.graph_plot, graph, make.names, label=f"classes and shared units of {layer}"
        )
        gates, ordered = make.gates(layer)[rows][order], [names[i] for i in order]
        heat = make.draw(plots.heat_map, gates, ordered, layer=layer, label=f"gates of {layer}")
        both = html.columns([html.figure(drawn, GRAPH)], [html.figure(heat, HEAT)])
        panels.append((layer.removesuffix(".weight"), both))
    return html.Section("units", "Units that classes share", html.tabs(panels, "layer", "layer-"))


def alike(make: Maker) -> html.Section:
    """How much classes close the same gates, beside other measures of how alike they are."""
    rows, names = make.classes, [make.names[row] for row in make.classes]
    overlap = explain.similarity(make.wf)[rows][:, rows]
    order = explain.class_order(overlap)
    picture = make.draw(
        plots.similarity_plot, overlap, names, order=order, label="classes by closed gates"
    )
    caption = "Which classes close the same gates: shared over all closed."
    others = []
    for title, other, what in _other_similarities(make) if len(names) > 2 else ():
        correlation = explain.rank_correlation(overlap, other)
        text = (
            f"{what} Rank correlation with the overlap of closed gates: {correlation:+.2f} "
            "(1: the same order of pairs, 0: unrelated)."
        )
        # A second matrix of many classes is too large to read: the caption gives its correlation.
        if len(names) > plots.MANY:
            caption += f" {escape(text)}"
            continue
        drawn = make.draw(
            plots.similarity_plot, other, names, title=title, order=order, label=title
        )
        others.append(html.figure(drawn, escape(text)))
    figures = [html.figure(picture, caption), *others]
    return html.Section("alike", "Classes that are alike", html.three(figures))


def _other_similarities(make: Maker) -> Iterator[tuple[str, Tensor, str]]:
    """Title, matrix and meaning: the base model's confusion and, if it has one, its head."""
    rows = make.classes
    chances, labels = make.base_logits.float().softmax(1), make.sample.labels
    confusion = torch.stack([chances[labels == row].sum(0) for row in rows])[:, rows]
    confused = explain.confusion_similarity(confusion)
    yield (
        "confusion of the base model",
        confused,
        "How likely the base model takes one for another.",
    )
    head = explain.head_similarity(make.wf.base)
    if len(head) == make.wf.num_classes:
        what = "Cosine of the two classes' vectors in the last layer of the base model."
        yield "likeness of head vectors", head[rows][:, rows], what
