"""The model card of a folder of filters: what they are, how made, figures, what they protect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from wfilter.core.model import FilteredModel

NAME = "README.md"
FIGURES = "\n## Figures\n"
LIMITS = "\n## What it protects against\n"
NOT_MEASURED = (
    "Not measured on test images yet. `wfilter evaluate FOLDER --card` puts the table here, as "
    "does `wf.save(folder, report=wfilter.evaluate(wf, data))`."
)


def model_card(
    wf: FilteredModel,
    made: Mapping[str, object] | None = None,
    figures: str = "",
    source: str = "filters.safetensors",
) -> str:
    """The text of a card, with the front matter that model hubs read.

    Args:
        wf: The filtered model.
        made: How the filters were made: model, data, recipe, ...
        figures: Markdown, such as ``Report.to_markdown()`` and ``Audit.to_markdown()`` give.
        source: What a reader passes to ``wfilter.load``.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="*")
        >>> print(model_card(wf).splitlines()[5])
        # Weight filters for Linear
    """
    listed = "".join(f"- {name}: {value}\n" for name, value in (made or {}).items())
    how = f"\n## How they were made\n\n{listed}" if listed else ""
    return f"""---
library_name: wfilter
pipeline_tag: image-classification
tags: [machine-unlearning, image-classification]
---
# Weight filters for {type(wf.base).__name__}

With these filters the model behaves as if any class, or set of classes, had never been learned:
a different one for every image of a batch if need be. {_contents(wf)}

```python
wf = wfilter.load("{source}", model)  # the base model these filters were made for
logits = wf(images, forget=labels)  # one class to forget per image
```
{how}{FIGURES}
{figures.strip() or NOT_MEASURED}
{LIMITS}
A filter hides a class at run time; it does not erase it. Whoever holds the base model can leave the
filters off, and whoever holds the filters can open their gates. A baked model (`wf.bake`) has lost
the weights under gates that are exactly 0; gates between 0 and 1 can be divided back by whoever has
the base model. Of these filters' gates {_exact(wf)}.

The output forgets, the features less so: a linear probe trained on them may still find a forgotten
class. Labels are trusted: nothing stops a caller who may choose `forget` from choosing nothing.
"""


def with_figures(card: str, figures: str) -> str:
    """The card with its figures replaced; the rest stays as it was.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="*")
        >>> with_figures(model_card(wf, figures="old"), "new") == model_card(wf, figures="new")
        True
    """
    before, _, rest = card.partition(FIGURES)
    _, heading, limits = rest.partition(LIMITS)
    return f"{before.rstrip()}\n{FIGURES}\n{figures.strip()}\n{heading}{limits}"


def put_figures(folder: Path, figures: str) -> None:
    """In place: replace the figures in the card of a folder.

    Raises:
        FileNotFoundError: The folder has no card.
    """
    path = folder / NAME
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: only a folder of filters has a card.")
    path.write_text(with_figures(path.read_text(encoding="utf-8"), figures), encoding="utf-8")


def _contents(wf: FilteredModel) -> str:
    names = wf.class_names or ()
    listed = f" ({', '.join(names[:10])}{', ...' if len(names) > 10 else ''})" if names else ""
    closed = (wf.alphas.detach() < 0).float().mean(1)
    return (
        f"{wf.num_classes} classes{listed}, {len(wf.targets)}\nfiltered parameters, "
        f"{wf.alphas.shape[1]} gates for each class, of which it closes "
        f"{100 * closed.mean():.1f} % ({100 * closed.min():.1f} to {100 * closed.max():.1f} %)."
    )


def _exact(wf: FilteredModel) -> str:
    gates = torch.sigmoid(wf.alphas.detach())
    exact = float(((gates == 0) | (gates == 1)).float().mean())
    return f"{100 * (1.0 if wf.hard else exact):.0f} % are exactly 0 or 1"
