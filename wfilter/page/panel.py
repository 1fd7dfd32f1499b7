"""The panel of one class: its images, units, heads and curves."""

from __future__ import annotations

from html import escape

from wfilter import explain, plots
from wfilter.core.messages import first_few
from wfilter.page import html
from wfilter.page.maker import Maker, percent

HEADS = (
    "Attention heads the class uses, block by block: the brighter, the more of the head's gates "
    "close when it is forgotten. Blank: not filtered."
)
CURVES = (
    "Confidence in the class on its own images, relative to the base model's, while units are "
    "opened (above) or closed (below). With every unit closed the answer is the same to any image."
)
EXCITED = (
    "The images to which the unit responds most. In colour: images of the class itself. Where "
    "there are none, closing the unit replaces a low response by a constant one."
)


def panel(make: Maker, row: int) -> str:
    """The HTML of one class's panel."""
    name, curve = make.names[row], {row: make.curves[row]}
    closed = int(explain.closed_by_class(make.wf)[row])
    text = (
        f"Forgetting {name} closes {closed} of {make.wf.alphas.shape[1]} gates: "
        f"{percent(make.original[row])} of its images are right before, "
        f"{percent(make.forget.by_row[row])} after."
    )
    left = [html.box("Before and after forgetting", _cards(make, row)), *_units(make, row)]
    right = [
        html.figure(
            make.draw(
                plots.routing_plot, make.routing(row), make.names, row, label=f"where {name} goes"
            ),
            "What its images are taken for once it is forgotten"
            + (" (orange: still the class itself)." if make.forget.by_row[row] else "."),
        ),
        html.figure(
            make.draw(plots.curves_plot, curve, label=f"insertion and deletion, {name}"), CURVES
        ),
        *_heads(make, row),
    ]
    return f"<p>{escape(text)}</p>{html.columns(left, right)}"


def _cards(make: Maker, row: int, count: int = 6) -> str:
    sample = make.sample
    index = sample.of_class(row, count)
    cards = []
    for i, chances in zip(index.tolist(), explain.predictions(make.wf, sample.images[index], row)):
        lists = "".join(
            f"<table><caption>{when}</caption>"
            + "".join(f"<tr><td>{escape(make.names[c])}</td><td>{p:.0%}</td></tr>" for c, p in top)
            + "</table>"
            for when, top in (("before", chances.before), ("after", chances.after))
        )
        picture = html.image_tag(sample.pixels[i], f"an image of {make.names[row]}")
        cards.append(f'<div class="card">{picture}{lists}</div>')
    return f'<div class="cards">{"".join(cards)}</div>'


def _units(make: Maker, row: int, units: int = 4, count: int = 8) -> list[str]:
    """The images that excite the class's most closed units of the last layer."""
    responses, sample, layer = make.responses(), make.sample, make.layers[-1]
    top = [u for u in explain.top_units(make.wf, row, layer, units) if u.gate < explain.CLOSED]
    if responses is None or not top:
        return []
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
    where = escape(layer.removesuffix(".weight"))
    title = f"Most closed units of {where}, and {html.term('what excites them', EXCITED)}"
    return [html.box(title, "".join(strips))]


def _also_closed(make: Maker, row: int, layer: str, unit: int) -> str:
    gates = make.gates(layer)[:, unit]
    others = [make.names[r] for r in (gates < explain.CLOSED).nonzero()[:, 0].tolist() if r != row]
    if not others:
        return "closed for this class alone"
    return f"closed also for {first_few(others, 4)}"


def _heads(make: Maker, row: int) -> list[str]:
    usage = explain.head_usage(make.wf)
    if not plots.has_heads(usage):
        return []
    picture = make.draw(plots.heads_plot, usage, row, label=f"heads of {make.names[row]}")
    return [html.figure(picture, HEADS)]
