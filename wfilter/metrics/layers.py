"""What a filtered model's layers, rows and gates are called and hold."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
from torch import Tensor

from wfilter.core.gates import class_index, slices
from wfilter.core.model import FilteredModel
from wfilter.core.targets import Target

CLOSED = 0.5  # a gate below this counts as closed


def find_layer(wf: FilteredModel, layer: str) -> str:
    """The full name of a target; ``.weight`` may be left out.

    Example:
        >>> import wfilter
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3))
        >>> find_layer(wfilter.apply_weight_filtering(model, targets="*"), "0")
        '0.weight'
    """
    names = targets_by_name(wf)
    for name in (layer, f"{layer}.weight"):
        if name in names:
            return name
    closest = difflib.get_close_matches(layer, list(names), 3, cutoff=0.0)
    raise ValueError(
        f"layer={layer!r} is not one of the {len(names)} targets. Closest names: "
        f"{', '.join(closest)}. See wf.plan."
    )


def targets_by_name(wf: FilteredModel) -> Mapping[str, Target]:
    """Target name -> target."""
    return {target.name: target for target in wf.targets}


def row_of(wf: FilteredModel, forget: int | str) -> int:
    """The row of a class given by index or name."""
    return class_index(forget, wf.num_classes, wf.class_names)


def all_gates(wf: FilteredModel) -> Tensor:
    """Gates of all rows, ``(num_classes, total_units)``, on the CPU."""
    alphas = wf.alphas.detach().cpu()
    return (alphas > 0).to(alphas.dtype) if wf.hard else torch.sigmoid(alphas)


def ranking(wf: FilteredModel, row: int, span: slice) -> Tensor:
    """Positions within a span of units, smallest alpha first; ties: most open for others first."""
    own = wf.alphas.detach()[row, span].cpu()
    others = all_gates(wf)[:, span].sum(0)
    by_others = others.argsort(descending=True, stable=True)
    return by_others[own[by_others].argsort(stable=True)].to(wf.alphas.device)


def live_layers(wf: FilteredModel) -> tuple[str, ...]:
    """Names of the targets in which some class closes some gate, first to last.

    The others (pinned open, or never moved) say nothing about any class.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="*")
        >>> live_layers(wf)
        ()
        >>> wf.alpha["weight"].data[0, 1] = -1.0
        >>> live_layers(wf)
        ('weight',)
    """
    gates = all_gates(wf)
    return tuple(
        n for n, span in slices(wf.targets).items() if bool((gates[:, span] < CLOSED).any())
    )


def forgets_by_gates(wf: FilteredModel) -> bool:
    """Whether gates do any of the forgetting: not with feature rows and all gates open.

    Example:
        >>> import wfilter
        >>> forgets_by_gates(wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="*"))
        True
    """
    return wf.feature_rows is None or bool(live_layers(wf))


def refuse_open_gates(wf: FilteredModel) -> None:
    """Stop where all gates are open, so that they cannot say which units make a class."""
    if not forgets_by_gates(wf):
        raise ValueError(
            "these filters forget by feature rows and all their gates are open, so that gates say "
            "nothing about units. Untrain gates to see which units make a class: "
            "recipe='distill-soft' for small networks, 'distill' for wide ones."
        )
