"""Put the report together."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wfilter import explain, metrics, plots
from wfilter.core.gates import class_index, slices
from wfilter.core.model import FilteredModel
from wfilter.data.images import ImageSet
from wfilter.metrics.layers import all_gates
from wfilter.page import html
from wfilter.page.sample import Sample, take_sample
from wfilter.untraining.history import History

OVERVIEW = 100  # classes drawn in the pictures of all classes
PANELS = 20  # classes with a panel of their own, unless the caller names them
INTRODUCTION = (
    "A filter puts a gate between 0 (closed) and 1 (open) on every unit, that is, on each output "
    "channel or feature of a layer. Every class has gates of its own; forgetting it applies them, "
    "and the gates that close (below 0.5) show which units the class needs."
)
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
HEADS = (
    "Attention heads the class uses, block by block: the brighter, the more of the head's gates "
    "close when it is forgotten. Blank: not filtered."
)
GRAPH = (
    "A line joins a class to a unit that is among its ten most closed ones. Only units of two "
    "classes or more are shown, under their number in the layer; colours tell classes, or "
    "clusters of many, apart."
)
HEAT = "A line for each class, a column for each unit: dark units are closed when it is forgotten."


def write_page(
    wf: FilteredModel,
    data: ImageSet | Iterable[Any],
    path: str | Path,
    *,
    title: str = "",
    facts: Mapping[str, object] | None = None,
    history: History | None = None,
    classes: Sequence[int | str] | None = None,
    layers: Sequence[str] | None = None,
    per_class: int = 50,
    curve_images: int = 10,
    steps: int = 20,
) -> Path:
    """Measure a filtered model on some images and write one HTML file with all that it shows.

    Args:
        wf: The filtered model.
        data: An `ImageSet`, or batches ``(images, labels)``; without an image set the pictures are
            stretched to full contrast, since their normalisation is not known.
        path: The file to write.
        title: The heading; by default the model's class.
        facts: Shown in the header: model, data, recipe, figures measured elsewhere.
        history: Of untraining, to show its course.
        classes: Those with a panel of their own; by default the first 20 with images.
        layers: Targets to draw; by default the first, the intermediate and the last live one.
        per_class: Images of each class for accuracies and pictures, the first of the data.
        curve_images: How many of them for insertion and deletion, which cost most.
        steps: Of insertion and deletion.

    Returns:
        The path.

    Example:
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
    sample = take_sample(wf, data, per_class)
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
        body = "\n".join(
            [
                _header(make, heading, facts or {}),
                _accuracies(make),
                "<section><h2>One class at a time</h2>"
                + html.tabs([(sample.names[r], _panel(make, r)) for r in shown], "class")
                + "</section>",
                _all_classes(make, history),
                _shared(make),
                "<footer>A run-time filter hides a class, it does not erase it: whoever holds the "
                "weights can open the gates.</footer>",
            ]
        )
        Path(path).write_text(html.document(heading, body), encoding="utf-8")
    return Path(path)


@dataclass
class Maker:
    """What every section needs: the model, its numbers, and a folder to draw in."""

    wf: FilteredModel
    sample: Sample
    curves: dict[int, explain.ClassCurves]
    folder: Path
    classes: list[int]
    layers: tuple[str, ...]
    drawn: int = 0
    _responses: Tensor | None = None

    @cached_property
    def problem(self) -> metrics.Problem:
        """The sample, to measure on."""
        present = tuple(sorted(set(self.sample.labels.tolist())))
        batches = [(self.sample.images, self.sample.labels)]
        return metrics.Problem(self.wf.base, batches, None, present, self.wf.num_classes)

    @cached_property
    def answers(self) -> metrics.Answers:
        """What the filtered model makes of the sample while classes are forgotten."""
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
        return {
            row: metrics.accuracy(self.base_logits[labels == row], labels[labels == row])
            for row in self.problem.classes
        }

    @cached_property
    def retain(self) -> metrics.RowScores:
        """Acc_r by class."""
        return self.answers.retain

    @cached_property
    def forget(self) -> metrics.RowScores:
        """Acc_f by class."""
        return self.answers.forget

    def routing(self, row: int) -> Tensor:
        """Where a class's images go once it is forgotten, ``(num_classes,)``."""
        return self.answers.routing(row, self.wf.num_classes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all classes."""
        return self.sample.names

    def draw(
        self, plot: Callable[..., Path], numbers: Any, *args: Any, label: str, **kw: Any
    ) -> str:
        """One of `wfilter.plots` as inline SVG."""
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


def _chosen(
    wf: FilteredModel, classes: Sequence[int | str] | None, sample: Sample, present: list[int]
) -> list[int]:
    """The rows with a panel; a class without images is an error."""
    if classes is None:
        return present[:PANELS]
    rows = [class_index(c, wf.num_classes, sample.names) for c in classes]
    missing = [sample.names[row] for row in rows if row not in present]
    if missing or not rows:
        raise ValueError(f"classes={list(classes)}: the data has no images of {missing}.")
    return rows


def _header(make: Maker, heading: str, facts: Mapping[str, object]) -> str:
    wf = make.wf
    closed = explain.closed_by_class(wf).float().mean() / wf.alphas.shape[1]
    insertion = explain.mean_curve(c.insertion for c in make.curves.values())
    deletion = explain.mean_curve(c.deletion for c in make.curves.values())
    known = {
        "right before": _percent(metrics.accuracy(make.base_logits, make.sample.labels)),
        "others right after: Acc_r": _percent(make.retain.mean),
        "forgotten right after: Acc_f": _percent(make.forget.mean),
        "insertion / deletion": f"{insertion.auc:.3f} / {deletion.auc:.3f}",
        "closed gates per class": _percent(float(closed)),
        "measured on": f"{len(make.sample.labels)} images",
    }
    return (
        f"<header><h1>{escape(heading)}</h1>{html.facts_list({**facts, **known})}"
        f"<p>{INTRODUCTION}</p></header>"
    )


def _accuracies(make: Maker) -> str:
    names = make.names
    closed = explain.closed_by_class(make.wf).tolist()
    rows = [
        [
            names[row],
            _percent(make.original[row]),
            _percent(make.forget.by_row[row]),
            _percent(make.retain.by_row[row]) if row in make.retain.by_row else "-",
            f"{closed[row]}",
            _route(make.routing(row), names, 1),
            *_areas([make.curves[row]] if row in make.curves else []),
        ]
        for row in make.classes
    ]
    original = list(make.original.values())
    mean = [
        "mean",
        _percent(sum(original) / len(original)),
        _percent(make.forget.mean),
        _percent(make.retain.mean),
        f"{sum(closed) / len(closed):.0f}",
        "",
        *_areas(list(make.curves.values())),
    ]
    worst = [
        "worst class",
        _percent(min(original)),
        _percent(make.forget.worst),
        _percent(make.retain.worst),
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


def _panel(make: Maker, row: int) -> str:
    name = make.names[row]
    curve = make.curves[row]
    closed = int(explain.closed_by_class(make.wf)[row])
    text = (
        f"Forgetting {name} closes {closed} of {make.wf.alphas.shape[1]} gates. Its images: "
        f"{_percent(make.original[row])} right before, {_percent(make.forget.by_row[row])} after."
        f" Now they are taken for {_route(make.routing(row), make.names, 3)}."
    )
    curves = [
        html.figure(
            make.draw(plots.curves_plot, {row: curve}, label=f"insertion and deletion, {name}"),
            "Confidence in the class on its own images, relative to the base model's, while gates "
            "are opened one share after the other (above) or closed (below). With every unit "
            "closed the model answers the same to any image, which may be this very class.",
        ),
    ]
    rest = [
        html.figure(
            make.draw(
                plots.routing_plot, make.routing(row), make.names, row, label=f"where {name} goes"
            ),
            "What its images are taken for once it is forgotten"
            + (" (orange: still the class itself)." if make.forget.by_row[row] else "."),
        ),
        *_heads(make, row),
    ]
    return (
        f"<p>{escape(text)}</p><h4>Before and after forgetting</h4>{_cards(make, row)}"
        f"{_units(make, row)}{html.columns(curves, rest)}"
    )


def _cards(make: Maker, row: int, count: int = 6) -> str:
    sample = make.sample
    index = sample.of_class(row, count)
    cards = []
    for i, found in zip(index.tolist(), explain.predictions(make.wf, sample.images[index], row)):
        lists = "".join(
            f"<table><caption>{when}</caption>"
            + "".join(
                f"<tr><td>{escape(make.names[c])}</td><td>{p:.0%}</td></tr>" for c, p in chances
            )
            + "</table>"
            for when, chances in (("before", found.before), ("after", found.after))
        )
        picture = html.image_tag(sample.pixels[i], f"an image of {make.names[row]}")
        cards.append(f'<div class="card">{picture}{lists}</div>')
    return f'<div class="cards">{"".join(cards)}</div>'


def _units(make: Maker, row: int, units: int = 3, count: int = 8) -> str:
    """The images that excite the class's most closed units of the last layer."""
    responses, sample, layer = make.responses(), make.sample, make.layers[-1]
    top = [u for u in explain.top_units(make.wf, row, layer, units) if u.gate < explain.CLOSED]
    if responses is None or not top:
        return ""
    strips = []
    for unit in top:
        order = responses[:, unit.index].argsort(descending=True, stable=True)[:count].tolist()
        items = "".join(
            f"<div{' class=own' if sample.labels[i] == row else ''}>"
            f"{html.image_tag(sample.pixels[i], make.names[int(sample.labels[i])])}<br>"
            f"{escape(make.names[int(sample.labels[i])])}</div>"
            for i in order
        )
        also = _also_closed(make, row, layer, unit.index)
        strips.append(f'<p>Unit {unit.index}: {escape(also)}.</p><div class="strip">{items}</div>')
    return (
        f"<h4>Most closed units of {escape(layer.removesuffix('.weight'))}, and the images that "
        "excite them most</h4><p>In colour: images of the class itself. Where there are none, "
        f"closing the unit replaces a low response by a constant one.</p>{''.join(strips)}"
    )


def _also_closed(make: Maker, row: int, layer: str, unit: int) -> str:
    gates = make.gates(layer)[:, unit]
    others = [make.names[r] for r in (gates < explain.CLOSED).nonzero()[:, 0].tolist() if r != row]
    if not others:
        return "closed for this class alone"
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    return f"closed also for {', '.join(others[:4])}{more}"


def _heads(make: Maker, row: int) -> list[str]:
    usage = explain.head_usage(make.wf)
    if not plots.has_heads(usage):
        return []
    picture = make.draw(plots.heads_plot, usage, row, label=f"heads of {make.names[row]}")
    return [html.figure(picture, HEADS)]


# ---- all classes -------------------------------------------------------------------------------


def _all_classes(make: Maker, history: History | None) -> str:
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


def _shared(make: Maker) -> str:
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


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _route(routing: Tensor, names: Sequence[str], count: int) -> str:
    top = [row for row in routing.argsort(descending=True)[:count].tolist() if routing[row]]
    return ", ".join(f"{names[row]} ({100 * float(routing[row]):.0f} %)" for row in top)
