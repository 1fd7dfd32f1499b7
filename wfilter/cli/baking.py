"""Write a model that has forgotten some classes for good, whole or pruned, in three formats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from wfilter.core.model import FilteredModel
from wfilter.core.prune import Pruned, prune
from wfilter.files import checkpoint
from wfilter.files.export import export
from wfilter.files.pruned import save_pruned

FORMATS = (".safetensors", ".pt2", ".onnx")
UNPRUNED = (
    "What read the closed channels is still in the file and helps whoever fills their zeros to "
    "bring a class back: before you hand it out, see --prune."
)


@dataclass(frozen=True)
class Baked:
    """A baked model's file, its gates exactly closed, exactly open or between, and its pruning."""

    path: str
    forget: tuple[str, ...]
    closed: int
    opened: int
    between: int
    parameters: tuple[int, int] | None = None
    difference: float | None = None
    pruned: str = ""

    def __str__(self) -> str:
        total = self.closed + self.opened + self.between
        text = (
            f"{self.path}: a plain model without {', '.join(self.forget)}. Of {total} gates "
            f"{self.closed} are exactly 0 (those weights are gone), {self.opened} exactly 1, and "
            f"{self.between} between (weights that are only made small can be made large again, "
            "without the base model and without data: see --snap)."
        )
        if self.pruned:
            return f"{text}\n{self.pruned}"
        return f"{text}\n{UNPRUNED}" if self.closed else text


def bake(
    wf: FilteredModel,
    forget: set[int],
    out: Path,
    snap: float = 0.0,
    *,
    pruned: bool = False,
    architecture: str = "",
    example_input: Tensor | None = None,
) -> Baked:
    """Write the model baked for ``forget``, pruned if asked for, and count its closed gates."""
    if out.suffix not in FORMATS:
        raise ValueError(f"--out {out} must end in {', '.join(FORMATS)}.")
    model = wf.bake(forget, snap=snap)
    result = prune(model, example_input) if pruned else None
    _write(model, result, out, architecture, wf.num_classes, example_input)
    gates = torch.cat([gate.detach().flatten() for gate in wf.gates(forget).values()])
    closed, opened = int((gates <= snap).sum()), int((gates >= 1 - snap).sum())
    names = wf.class_names or tuple(map(str, range(wf.num_classes)))
    chosen = tuple(names[row] for row in sorted(forget))
    between = gates.numel() - closed - opened
    if result is None:
        return Baked(str(out), chosen, closed, opened, between)
    return Baked(
        *(str(out), chosen, closed, opened, between),
        parameters=result.parameters,
        difference=result.largest_difference,
        pruned=str(result),
    )


def _write(
    model: nn.Module,
    result: Pruned | None,
    out: Path,
    architecture: str,
    num_classes: int,
    example: Tensor | None,
) -> None:
    from safetensors.torch import save

    if out.suffix != ".safetensors":
        export(model if result is None else result.model, out, example_input=example)
    elif result is not None:
        save_pruned(result, out, architecture, num_classes)
    else:
        state = model.state_dict()
        tensors = {k: v.detach().cpu().contiguous().clone() for k, v in state.items()}
        checkpoint.write_atomically(out.absolute(), save(tensors))
