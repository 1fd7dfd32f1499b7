"""What ``FilteredModel.compile`` needs: a compiler, and forwards as functions of tensors alone."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wfilter.core.outputs import Inputs

if TYPE_CHECKING:
    from wfilter.core.model import FilteredModel


@dataclass(frozen=True)
class Compiled:
    """The two forwards through ``torch.compile``: of a mixed batch, and of the base model.

    ``gates`` makes the gates of a mixed batch, for labels and sets alike, before its forward.
    """

    gated: Callable[..., Any]
    plain: Callable[..., Any]
    gates: Callable[[Tensor], Tensor]


def has_compiler() -> bool:
    """Whether ``torch.compile`` can build CPU code: inductor needs a C++ compiler there."""
    return any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))


def compile_forwards(
    wf: FilteredModel, run_path: Callable[..., Any], *args: Any, **kwargs: Any
) -> Compiled | None:
    """The forwards of ``wf`` through ``torch.compile``; ``None`` where nothing can build them."""
    inductor = kwargs.get("backend", "inductor") == "inductor"
    if inductor and wf.alphas.device.type == "cpu" and not has_compiler():
        warnings.warn(
            "torch.compile needs a C++ compiler on a CPU and finds none: forwards stay eager. "
            "Install g++ or clang++, or set CXX.",
            stacklevel=3,
        )
        return None

    def gated(inputs: Inputs, gates: Tensor, sets: Tensor | None) -> Any:
        return run_path(wf, inputs, gates, sets)

    def plain(*inputs: Any, **named: Any) -> Any:
        return wf.base(*inputs, **named)

    made = wf.mixed_gates
    if wf.alphas.device.type != "cpu":  # one kernel instead of five; a CPU has none to launch
        made = torch.compile(wf.mixed_gates, *args, **kwargs)

    def gates(forget: Tensor) -> Tensor:
        # No graph has row-sparse gradients, and a frozen one would keep the alphas of its making.
        if is_freezing() or (torch.is_grad_enabled() and wf.alphas.requires_grad):
            return wf.mixed_gates(forget)
        return made(forget)

    forwards = torch.compile(gated, *args, **kwargs), torch.compile(plain, *args, **kwargs)
    return Compiled(*forwards, gates)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def is_freezing() -> bool:
    """Whether inductor turns parameters into constants of its graphs."""
    import torch._inductor.config as config

    return bool(config.freezing)


def refuse_freezing() -> None:
    """Stop where a graph is being made that would keep the alphas as they are now."""
    if torch.compiler.is_dynamo_compiling() and not torch.is_grad_enabled() and is_freezing():
        raise RuntimeError(
            "torch.compile(wf) with freezing on (TORCHINDUCTOR_FREEZING=1) would keep the alphas "
            "of this moment. Call wf.compile(), whose gates stay outside the graph, or turn "
            "freezing off."
        )


def one_graph() -> AbstractContextManager[None]:
    """Inside, a graph break of a compiled forward is an error: gates do not survive it."""
    if torch.compiler.is_dynamo_compiling():
        return torch._dynamo.error_on_graph_break(True)
    return nullcontext()
