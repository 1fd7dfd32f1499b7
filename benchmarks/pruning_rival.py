"""The same cuts by torch-pruning's dependency graph, for `pruning.py --sweep --rival`."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def by_dependency_graph(whole: nn.Module, x: Tensor) -> dict[str, Any]:
    """Remove what torch-pruning's graph couples and is closed throughout; logits compared."""
    import torch_pruning as tp

    model = copy.deepcopy(whole).requires_grad_(True)
    before = sum(p.numel() for p in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = tp.DependencyGraph().build_dependency(model, example_inputs=x[:1])
        _remove_closed(tp, graph, model)
    with torch.no_grad():
        expected, found = whole(x), model(x)
    after = sum(p.numel() for p in model.parameters())
    difference = float((expected - found).abs().max() / expected.abs().max())
    return {"parameters": [before, after], "difference": difference}


def _remove_closed(tp: Any, graph: Any, model: nn.Module) -> None:
    closed = {
        m: (m.weight == 0).flatten(1).all(1) for m in model.modules() if isinstance(m, LAYERS)
    }
    producers = (tp.prune_conv_out_channels, tp.prune_linear_out_channels)
    for layer in list(closed)[:-1]:
        if isinstance(layer, nn.Conv2d) and layer.groups > 1:
            continue
        rows = (layer.weight == 0).flatten(1).all(1)
        remove = producers[isinstance(layer, nn.Linear)]
        indices = rows.nonzero().flatten().tolist()
        group = graph.get_pruning_group(layer, remove, idxs=indices) if indices else []
        for item in group:  # only what is closed in every layer that makes these channels
            if item.dep.handler in producers and len(item.idxs) == len(indices):
                weight = item.dep.target.module.weight
                rows[indices] &= (weight[item.idxs] == 0).flatten(1).all(1)
        indices = rows.nonzero().flatten().tolist()
        if indices and len(indices) < len(rows):
            group = graph.get_pruning_group(layer, remove, idxs=indices)
            if graph.check_pruning_group(group):
                group.prune()
