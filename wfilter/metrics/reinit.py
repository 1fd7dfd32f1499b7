"""A freshly initialised copy of any model: the reference of ZRF, the start of retraining."""

import copy
import inspect
from collections.abc import Callable

import torch
from torch import nn

from wfilter.data.running import seeded


def fresh_copy(
    model: nn.Module, *, factory: Callable[[], nn.Module] | None = None, seed: int = 0
) -> nn.Module:
    """The same architecture with new random parameters; the given model is left untouched.

    Without a factory every module's ``reset_parameters`` runs on a copy, then the model's own
    ``init_weights`` (timm) if it has one. Every parameter and running statistic is overwritten
    with NaN first, so a parameter that nothing resets (a class token, say) is found and refused.

    Args:
        model: the model to copy; keeps its device and dtype.
        factory: makes a new model of the same shapes, the exact way to initialise it.
        seed: of the new parameters; torch's global random state is left as it was.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> torch.equal(fresh_copy(layer, seed=0).weight, fresh_copy(layer, seed=1).weight)
        False
    """
    with seeded(seed), torch.no_grad():
        if factory is not None:
            return _like(factory(), model)
        fresh = copy.deepcopy(model)
        _spoil(fresh)
        _reset(fresh)
    left = [name for name, tensor in fresh.state_dict().items() if _spoiled(tensor)]
    if left:
        raise ValueError(
            f"{type(model).__name__} has no method that resets {', '.join(left[:5])}"
            f"{' ...' if len(left) > 5 else ''} ({len(left)} tensors). "
            "Pass factory=, a function that makes a new model."
        )
    return fresh


def _spoil(model: nn.Module) -> None:
    """In place: NaN in every parameter and every running statistic."""
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in ("running_mean", "running_var"):
            buffer.fill_(torch.nan)


def _reset(model: nn.Module) -> None:
    """In place: new parameters, children before parents, then by the whole model's own scheme."""
    for module in reversed(list(model.modules())):
        for name in ("reset_parameters", "_reset_parameters"):  # MultiheadAttention has the second
            _call(getattr(module, name, None))
    _call(getattr(model, "init_weights", None))


def _call(method: object) -> None:
    """Call ``method`` if it needs no argument; else do nothing."""
    if callable(method):
        needed = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
        if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed):
            method()


def _spoiled(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def _like(fresh: nn.Module, model: nn.Module) -> nn.Module:
    """The factory's model on the device of ``model``, if their tensors have the same shapes."""
    shapes, expected = ({n: t.shape for n, t in m.state_dict().items()} for m in (fresh, model))
    different = [name for name in {**shapes, **expected} if shapes.get(name) != expected.get(name)]
    if different:
        name = different[0]
        raise ValueError(
            f"factory() makes {name} of shape {shapes.get(name)}\n"
            f"where the model has {expected.get(name)}. Make the same architecture."
        )
    first = next(model.parameters(), None)
    return fresh if first is None else fresh.to(first.device, first.dtype)
