"""``wfilter explain``: draw the page of a filtered model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wfilter.cli.app import command
from wfilter.cli.options import FiltersAt, Images, Network, OldClasses, Talk


@command(epilog="Example: wfilter explain wfilter-demo/cnn-digits/gates --out page.html")
def explain(
    *,
    filters: FiltersAt,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("page.html"),
    classes: Annotated[
        list[str] | None, typer.Option(help="Only panels of these, by name or index; repeat.")
    ] = None,
    rows: OldClasses = None,
    layers: Annotated[
        list[str] | None,
        typer.Option("--layer", help="A layer to draw; repeat. By default first, middle and last."),
    ] = None,
    per_class: Annotated[int, typer.Option(min=1, help="Images of each class to look at.")] = 50,
    network: Network,
    images: Images,
    talk: Talk,
) -> None:
    """Write one HTML page: which units make a class, and what happens without them."""
    from wfilter.cli import jobs
    from wfilter.page import write_page

    jobs.check_writable(out)
    words = classes or rows
    opened = jobs.open_filters(filters, **vars(network), **vars(images))
    path = write_page(
        opened.wf,
        opened.job.images("test"),
        out,
        title=f"What {opened.job.model} forgets, and with which units",
        about=opened.about,
        history=opened.history,
        classes=sorted(jobs.parse_classes(opened.wf, words)) if words else None,
        layers=layers or None,
        per_class=per_class,
    )
    talk.output.result(f"{path} written: open it in a browser.", {"path": str(path)})
