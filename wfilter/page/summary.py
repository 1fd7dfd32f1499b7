"""The first screen: in one sentence and one picture, what the model forgets and how well."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from wfilter import explain, metrics, plots
from wfilter.core.messages import first_few
from wfilter.page import html
from wfilter.page.maker import Maker, percent

KNOWN = 0.05  # classes with a larger share still recognised after forgetting are named
GATE = (
    "A gate multiplies one unit, an output channel or feature of a layer: 1 leaves it open, 0 "
    "closes it. Every class has gates of its own, which are applied when it is forgotten. Below "
    "0.5 a gate counts as closed."
)
ACC_F = (
    "Acc_f: share of a class's images that are still recognised once it is forgotten; mean over "
    "classes. 0 % is wanted."
)
ACC_R = (
    "Acc_r: share of the images of all other classes that are right while a class is forgotten; "
    "mean over classes. The share before is wanted."
)
AREAS = (
    "Do the closed gates mark the units that make a class? Insertion opens the units of a class in "
    "the order of their gates, the most closed first, and watches the confidence in the class: an "
    "area near 1 is good. Deletion closes them in that order: near 0 is good. In brackets the same "
    "in random order."
)
PICTURE = (
    "Ring: before; disc: after. Left, each class's own images once it is forgotten (wanted: 0). "
    "Right, everyone else's images meanwhile (wanted: as before)."
)


def header(make: Maker, heading: str, about: Mapping[str, object]) -> str:
    """Heading, sentence, picture, four numbers, an image of each class, and what was measured."""
    known = {
        **about,
        "measured on": f"{len(make.sample.labels)} images",
        "right before": percent(metrics.accuracy(make.base_logits, make.sample.labels)),
    }
    many = len(make.problem.classes) > plots.MANY
    caption = PICTURE + (" The 20 classes best known after forgetting." if many else "")
    picture = make.draw(
        plots.forgetting_plot, (_own(make), _others(make)), make.names,
        label="accuracy before and after forgetting each class",
    )  # fmt: skip
    return (
        f'<header id="summary"><h1>{escape(heading)}</h1><p class="lead">{_sentence(make)}</p>'
        + html.columns([html.figure(picture, caption)], [_numbers(make), _examples(make)])
        + f"{html.name_value_list(known)}</header>"
    )


def _own(make: Maker) -> dict[int, tuple[float, float]]:
    """Class -> accuracy on its own images, before and after."""
    return {row: (make.original[row], make.forget.by_row[row]) for row in make.problem.classes}


def _others(make: Maker) -> dict[int, tuple[float, float]]:
    """Class -> accuracy on all other classes' images, before and after."""
    known, labels = make.base_logits, make.sample.labels
    return {
        row: (metrics.retain_accuracy(known, labels, row).mean, after)
        for row, after in make.retain.by_row.items()
    }


def _sentence(make: Maker) -> str:
    """What is forgotten and how well; classes that are still known are named."""
    before = percent(metrics.accuracy(make.base_logits, make.sample.labels))
    scores = make.forget.by_row
    text = (
        f"Told to forget any one of {len(scores)} classes, this model recognises "
        f"<b>{percent(make.forget.mean)}</b> of that class's images and stays right on "
        f"<b>{percent(make.retain.mean)}</b> of all others; before, it was right on {before}."
    )
    known = sorted((row for row in scores if scores[row] > KNOWN), key=lambda row: -scores[row])
    if not known:
        return text
    named = [f"{escape(make.names[row])} ({percent(scores[row])})" for row in known]
    return f"{text} <strong>Still known: {first_few(named, 5)}.</strong>"


def _numbers(make: Maker) -> str:
    """Four numbers: Acc_f, Acc_r, the share of closed gates, and insertion with deletion."""
    gates = explain.closed_by_class(make.wf).float()
    closed = float(gates.mean()) / make.wf.alphas.shape[1]
    total = f"mean of {gates.mean():.0f} of {make.wf.alphas.shape[1]} gates"
    scores = make.forget.by_row
    worst = max(scores, key=scores.__getitem__)
    known = "no image of any class"
    if scores[worst]:
        known = f"worst: {make.names[worst]}, {percent(scores[worst])}"
    kinds = ("insertion", "random_insertion", "deletion", "random_deletion")
    area = {
        kind: explain.mean_curve(getattr(c, kind) for c in make.curves.values()).auc
        for kind in kinds
    }
    cards = [
        ("forgotten, still right", ACC_F, percent(make.forget.mean),
         known),
        ("others, still right", ACC_R, percent(make.retain.mean),
         f"worst: {percent(make.retain.worst)}"),
        ("gates closed by a class", GATE, percent(closed), total),
        ("insertion / deletion", AREAS, f"{area['insertion']:.2f} / {area['deletion']:.2f}",
         f"at random {area['random_insertion']:.2f} / {area['random_deletion']:.2f}"),
    ]  # fmt: skip
    items = "".join(
        f"<div><dt>{html.term(name, meaning)}</dt><dd>{escape(value)}</dd>"
        f"<small>{escape(note)}</small></div>"
        for name, meaning, value, note in cards
    )
    return f'<dl class="numbers">{items}</dl>'


def _examples(make: Maker, most: int = 10) -> str:
    """The first image of each class that the base model gets right, and its answer afterwards."""
    sample, items = make.sample, []
    right = make.base_logits.argmax(1) == sample.labels
    for row in make.problem.classes[:most]:
        first = (right & (sample.labels == row)).nonzero()[:1, 0]
        if len(first):
            (said,) = explain.predictions(make.wf, sample.images[first], row)
            words = f"{make.names[row]} → {make.names[said.after[0][0]]}"
            picture = html.image_tag(sample.pixels[first[0]], f"an image of {make.names[row]}")
            items.append(f"<div>{picture}<br>{escape(words)}</div>")
    strip = f'<div class="strip">{"".join(items)}</div>'
    return html.box("What an image of each class becomes once it is forgotten", strip)
