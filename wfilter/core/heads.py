"""Prune whole attention heads, where all values of a head are closed.

Single channels of a head cannot go, since a model's code gives all heads one size. A head can,
where the number of heads is an attribute that the code reads, as in timm's ``Attention``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wfilter.core.cutting import Cutting, slice_tensor

ATTRIBUTES = ("num_heads", "attn_dim", "attention_dim", "inner_dim", "all_head_dim")


@dataclass(frozen=True)
class Heads:
    """Closed heads of one attention module: its path, its number of heads and which are closed."""

    path: str
    count: int
    closed: tuple[int, ...]

    @property
    def name(self) -> str:
        """The weight whose rows are queries, keys and values."""
        return f"{self.path}.qkv.weight"

    def rows(self, width: int) -> Tensor:
        """Which of the rows of queries, keys and values, or of the columns behind, are kept."""
        kept = torch.ones(self.count, dtype=torch.bool)
        kept[list(self.closed)] = False
        return kept.repeat_interleave(width // self.count)


def find_heads(model: nn.Module, cutting: Cutting) -> Iterator[Heads]:
    """Attention modules with ``qkv``, ``proj`` and ``num_heads``, some of whose heads are closed.

    A head is closed when all that the projection reads of it is constant.
    """
    for path, module in model.named_modules():
        uses = cutting.uses.get(f"{path}.proj.weight", [])
        heads = getattr(module, "num_heads", None)
        if len(uses) != 1 or not isinstance(heads, int) or f"{path}.qkv.weight" not in cutting.uses:
            continue
        constant = ~uses[0].channels().isnan().any(1)
        if heads < 2 or len(constant) % heads:
            continue
        closed = constant.view(heads, -1).all(1).nonzero().flatten().tolist()[: heads - 1]
        if closed:
            yield Heads(path, heads, tuple(closed))


def cut_heads(model: nn.Module, cutting: Cutting, heads: Heads) -> None:
    """In place: take the closed heads of one module out."""
    module = model.get_submodule(heads.path)
    inner = cutting.weights[f"{heads.path}.proj.weight"].shape[1]
    columns = heads.rows(inner)
    cutting.fold(model, f"{heads.path}.proj.weight", ~columns)
    slice_tensor(model, f"{heads.path}.proj.weight", {1: columns})
    for name, tensor in list(module.get_submodule("qkv").named_parameters()):
        if len(tensor) == 3 * inner:
            slice_tensor(model, f"{heads.path}.qkv.{name}", {0: columns.repeat(3)})
    for name in ATTRIBUTES:
        value = getattr(module, name, None)
        if isinstance(value, int):
            setattr(module, name, value * (heads.count - len(heads.closed)) // heads.count)
