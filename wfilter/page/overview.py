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

COLUMNS = (
    "Before: the base model on the class's images. After: the same images once the class is "
    "forgotten (0 % is wanted), and the class most of them then go to. Others: the images of all "
    "other classes at the same time (as before is wanted). Insertion and deletion: areas under the "
    "curves below, in brackets those of a random order; insertion near 1 and deletion near 0 say "
    "that the closed gates are the ones that make the class."
)
COURSE = (
    "The course of untraining, on each step's own batch. Many of its images forget several classes "
    "at once, or are distorted, so accuracies are lower than in the table."
)
GRAPH = (
    "A line joins a class to a unit that is among its ten most closed ones. Only units of two "
    "classes or more are shown, under their number in the layer; colours tell classes, or "
    "clusters of many, apart."
)
HEAT = "A line for each class, a column for each unit: dark units are closed when it is forgotten."


def accuracies(make: Maker) -> str:
    """The table of accuracies."""
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
    worst = [
        "worst class",
        percent(min(original)),
        percent(make.forget.worst),
        percent(make.retain.worst),
        *[""] * 4,
    ]
    head = ["class", "before", "after: Acc_f", "others: Acc_r", "closed gates"]
    return (
        "<section><h2>Accuracy</h2>"
        + html.table([*head, "mostly goes to", "insertion", "deletion"], [*rows, mean, worst])
        + f"<p>{COLUMNS}</p></section>"
    )


def _areas(curves: Sequence[explain.ClassCurves]) -> list[str]:
    """Areas under insertion and deletion, mean over classes, with the random control."""
    if not curves:
        return ["-", "-"]
    return [
        f"{explain.mean_curve(getattr(c, kind) for c in curves).auc:.2f} "
        f"({explain.mean_curve(getattr(c, f'random_{kind}') for c in curves).auc:.2f})"
        for kind in ("insertion", "deletion")
    ]


# ---- one class ---------------------------------------------------------------------------------


def all_classes(make: Maker, history: History | None) -> str:
    """The pictures of all classes."""
    wf, names = make.wf, [make.names[row] for row in make.classes]
    left = [
        html.figure(
            make.draw(plots.curves_plot, make.curves, label="insertion and deletion, mean"),
            "Thick: mean over classes; thin: each class. If the gates point at the right units, "
            "blue rises at once above and falls at once below; grey is the control.",
        ),
        html.figure(
            make.draw(
                plots.closed_plot,
                explain.closed_by_class(wf)[make.classes],
                names,
                label="closed gates by class",
            ),
            f"How many of the {wf.alphas.shape[1]} gates each class closes.",
        ),
    ]
    right = [
        html.figure(
            make.draw(plots.depth_plot, explain.closed_by_layer(wf), label="closed gates by depth"),
            "Which layers do the forgetting, from input to output.",
        ),
        html.figure(
            make.draw(
                plots.exactness_plot, explain.distance_from_exact(wf), label="how exact gates are"
            ),
            "A gate at exactly 0 can be cut out of the model, one at 0.3 cannot.",
        ),
    ]
    if history is not None and history.records:
        picture = make.draw(plots.history_plot, history, label="the course of untraining")
        right.append(html.figure(picture, COURSE))
    return f"<section><h2>All classes</h2>{html.columns(left, right)}</section>"


def shared(make: Maker) -> str:
    """Which classes share units, and which are alike."""
    wf, rows, names = make.wf, make.classes, [make.names[row] for row in make.classes]
    overlap = explain.similarity(wf)[rows][:, rows]
    order = explain.class_order(overlap) if len(rows) > plots.MANY else list(range(len(rows)))
    figures = []
    for layer in make.layers:
        graph = explain.class_unit_graph(wf, layer, classes=rows)
        picture = make.draw(
            plots.graph_plot, graph, make.names, label=f"classes and shared units of {layer}"
        )
        figures.append(html.figure(picture, GRAPH))
        gates = make.gates(layer)[rows][order]
        picture = make.draw(
            plots.heat_map, gates, [names[i] for i in order], layer=layer, label=f"gates of {layer}"
        )
        figures.append(html.figure(picture, HEAT))
    figures += _alike(make, overlap, names)
    return (
        '<section><h2>Units that classes share</h2><div class="grid">'
        f"{''.join(figures)}</div></section>"
    )


def _alike(make: Maker, overlap: Tensor, names: Sequence[str]) -> list[str]:
    """The overlap of gates, and beside it what else says that two classes are alike."""
    order = explain.class_order(overlap)
    text = (
        "Which classes close the same gates: shared over all closed ones, similar classes "
        "side by side."
    )
    picture = make.draw(
        plots.similarity_plot, overlap, names, order=order, label="classes by closed gates"
    )
    figures = [html.figure(picture, text)]
    for title, other, what in _other_similarities(make) if len(names) > 2 else ():
        found = explain.rank_correlation(overlap, other)
        text = (
            f"{what} Rank correlation with the overlap of closed gates: {found:+.2f} "
            "(1: the same order of pairs, 0: unrelated)."
        )
        if len(names) > plots.MANY:  # as large as the first matrix, for one number
            figures[0] = figures[0].replace("</figcaption>", f" {escape(text)}</figcaption>")
            continue
        picture = make.draw(
            plots.similarity_plot, other, names, title=title, order=order, label=title
        )
        figures.append(html.figure(picture, f"{escape(text)} Classes in the order of the gates."))
    return figures


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
