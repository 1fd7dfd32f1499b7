"""Pieces of HTML: tables, inlined pictures, and the frame around them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from torch import Tensor

from wfilter.plots import INK, as_pixels

LARGE = 640  # pixels; wider drawings are not scaled down
LARGEST = 112  # pixels; larger photographs are reduced to this
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ElementTree.register_namespace("", SVG)  # else every tag would be written as ns0:...
ElementTree.register_namespace("xlink", XLINK)


def inline_svg(path: Path, key: str, label: str) -> str:
    """A matplotlib SVG as part of a page: ids made unique by ``key``, ink in the page's colour.

    Example:
        >>> import tempfile, torch
        >>> from wfilter.plots import closed_plot
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = closed_plot(torch.tensor([3, 5]), f"{folder}/a.svg", ["cat", "dog"])
        ...     inline_svg(path, "a", "closed gates")[-5:]
        '/svg>'
    """
    svg = ElementTree.parse(path).getroot()
    for metadata in svg.findall(f"{{{SVG}}}metadata"):
        svg.remove(metadata)
    for element in svg.iter():
        element.text, element.tail = _stripped(element.text), _stripped(element.tail)
        for name, value in element.attrib.items():
            element.set(name, _own(name, value, key))
    pixels = float(svg.attrib["viewBox"].split()[2]) * 4 / 3
    for name in ("width", "height"):
        del svg.attrib[name]  # the page decides how large it is
    if pixels > LARGE:  # shown in full size, to be scrolled on a narrow screen
        svg.attrib |= {"class": "large", "style": f"min-width:{pixels:.0f}px"}
    else:
        svg.attrib["style"] = f"max-width:{1.2 * pixels:.0f}px"
    svg.attrib |= {"role": "img", "aria-label": label}
    return ElementTree.tostring(svg, encoding="unicode")


def _own(name: str, value: str, key: str) -> str:
    """An attribute's value with ``key`` before this picture's ids, and ink in the page's colour."""
    if name == "id":
        return f"{key}-{value}"
    if name == f"{{{XLINK}}}href" and value[:1] == "#":
        return f"#{key}-{value[1:]}"
    return value.replace("url(#", f"url(#{key}-").replace(INK, "currentColor")


def _stripped(text: str | None) -> str | None:
    """The text; where it is only indentation, a tenth of a drawing's size, one line break."""
    return "\n" if text is not None and not text.strip() else text


def image_tag(pixels: Tensor, label: str) -> str:
    """An image in 0..1, ``(channels, height, width)``, embedded: PNG if small, else JPEG.

    Example:
        >>> import torch
        >>> image_tag(torch.zeros(1, 8, 8), "a black square")[:31]
        '<img alt="a black square" width'
    """
    from PIL import Image

    picture = Image.fromarray(as_pixels(pixels))
    small = max(picture.size) <= 40
    if max(picture.size) > LARGEST:
        picture.thumbnail((LARGEST, LARGEST))
    buffer = io.BytesIO()
    picture.save(buffer, **({"format": "PNG"} if small else {"format": "JPEG", "quality": 85}))
    data = base64.b64encode(buffer.getvalue()).decode()
    kind = "png" if small else "jpeg"
    width, height = picture.size
    return (
        f'<img alt="{escape(label)}" width="{width}" height="{height}" '
        f'src="data:image/{kind};base64,{data}">'
    )


def figure(picture: str, caption: str) -> str:
    """A picture with a line of explanation; the caption is HTML."""
    return f'<figure><div class="wide">{picture}</div><figcaption>{caption}</figcaption></figure>'


def columns(left: Sequence[str], right: Sequence[str]) -> str:
    """Figures in two columns, each filled from the top; one column on a narrow screen."""
    stacks = "".join(f'<div class="stack">{"".join(figures)}</div>' for figures in (left, right))
    return f'<div class="grid">{stacks}</div>'


def masonry(figures: Sequence[str]) -> str:
    """Figures in two columns that the browser makes equally high; one on a narrow screen."""
    return f'<div class="masonry">{"".join(figures)}</div>'


def three(figures: Sequence[str]) -> str:
    """Figures side by side, three in a line where there is room."""
    return f'<div class="three">{"".join(figures)}</div>'


def term(word: str, definition: str) -> str:
    """A word whose definition appears under the pointer, on focus or on a tap.

    Example:
        >>> term("gate", "what multiplies a unit")[:36]
        '<span class="term" tabindex="0" data'
    """
    if not definition:
        return escape(word)
    return f'<span class="term" tabindex="0" data-tip="{escape(definition)}">{escape(word)}</span>'


def box(title: str, body: str) -> str:
    """A part of a page with a background of its own; title and body are HTML."""
    return f'<div class="box"><h4>{title}</h4>{body}</div>'


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    meanings: Mapping[str, str] | None = None,
) -> str:
    """A table; the first cell of a row is its header. Cells are text, not HTML.

    ``meanings`` defines columns by their name in ``head``.

    Example:
        >>> table(["class", "n"], [["cat", "3"]])[:37]
        '<div class="wide"><table><thead><tr><'
    """
    defined = meanings or {}
    top = "".join(f'<th scope="col">{term(cell, defined.get(cell, ""))}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def name_value_list(named: Mapping[str, object]) -> str:
    """Names and values in a line that wraps."""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in named.items()
    )
    return f"<dl>{items}</dl>"


def tabs(panels: Sequence[tuple[str, str]], label: str, key: str = "") -> str:
    """Named panels of which one is shown: a row of tabs, or a drop-down list for many.

    ``key`` begins the ids, so that a page can have several rows of tabs.

    Example:
        >>> "option" in tabs([("cat", "a"), ("dog", "b")], "class")
        False
    """
    many = len(panels) > 20
    names = [escape(name) for name, _ in panels]
    if many:
        options = "".join(f'<option value="{i}">{name}</option>' for i, name in enumerate(names))
        control = f'<label class="pick">{escape(label)} <select>{options}</select></label>'
    else:
        buttons = "".join(
            f'<button role="tab" id="{key}tab-{i}" aria-controls="{key}panel-{i}" '
            f'aria-selected="{"false" if i else "true"}">{name}</button>'
            for i, name in enumerate(names)
        )
        control = f'<div role="tablist" aria-label="{escape(label)}">{buttons}</div>'
    bodies = "".join(
        f'<div role="tabpanel" class="panel" id="{key}panel-{i}" aria-label="{name}">'
        f"<h3>{name}</h3>{body}</div>"
        for i, (name, (_, body)) in enumerate(zip(names, panels))
    )
    return f'<div class="tabs">{control}{bodies}</div>'


class Section(NamedTuple):
    """A part of a page with a title, which the page's outline lists."""

    key: str
    title: str
    body: str

    def __str__(self) -> str:
        return (
            f'<section id="{self.key}"><h2>{escape(self.title)}</h2>{self.body}</section>'
            if self.body
            else ""
        )


def document(title: str, header: str, sections: Sequence[Section], footer: str = "") -> str:
    """The whole page, with outline, style and script inside it; ``header`` has the id summary."""
    here = Path(__file__).parent
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    named = [("summary", "Summary"), *((s.key, s.title) for s in sections if s.body)]
    links = "".join(f'<a href="#{key}">{escape(name)}</a>' for key, name in named)
    body = "\n".join([header, *map(str, sections), f"<footer>{footer}</footer>"])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n"
        f'<body><nav aria-label="on this page">{links}</nav><main>\n{body}\n</main>'
        f'<div role="tooltip" id="tip" hidden></div><script>\n{script}</script></body></html>\n'
    )
