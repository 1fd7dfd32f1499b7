"""Save and load a pruned model: its weights, its architecture by name, and its layers' widths.

How many channels each layer kept is enough to rebuild the model. Which channels those were is
not written: that would tell where a class had been.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wfilter.core.bake import make_plain, plain_copy
from wfilter.core.cutting import replace_tensor
from wfilter.core.prune import Pruned
from wfilter.data import zoo
from wfilter.files.checkpoint import write_atomically

KEY = "pruned"


def save_pruned(
    pruned: Pruned,
    path: str | Path,
    architecture: str = "",
    num_classes: int | None = None,
) -> Path:
    """Write a pruned model as one safetensors file.

    Args:
        pruned: What ``wfilter.prune`` gave back.
        path: Ends in ``.safetensors``.
        architecture: As `wfilter.zoo.build` takes it; without it the file can only be loaded into a
            model that is given.
        num_classes: To build the architecture with, if not its usual number.
    """
    from safetensors.torch import save

    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} must end in .safetensors.")
    model = plain_copy(pruned.model)
    cut, buffers = {cut.name for cut in pruned.cuts}, dict(model.named_buffers())
    unsaved = {name: buffers[name] for name in cut & (set(buffers) - set(model.state_dict()))}
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in {**model.state_dict(), **unsaved}.items()
    }
    header = {
        "architecture": architecture,
        "num_classes": num_classes,
        "attributes": pruned.attributes,
    }
    write_atomically(path.absolute(), save(tensors, metadata={KEY: json.dumps(header)}))
    return path


def load_pruned(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The pruned model of a file, in eval mode.

    Args:
        path: A file written by `save_pruned` or ``wfilter bake --prune``.
        model: The architecture before pruning, with any weights; it becomes the smaller model, in
            place. By default it is built by the name in the file.

    Raises:
        ValueError: The file holds no pruned model, names no architecture, or does not fit it.

    Example:
        >>> import tempfile, wfilter
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> with torch.no_grad():
        ...     model[0].weight[:5] = 0
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = save_pruned(wfilter.prune(model), f"{folder}/small.safetensors")
        ...     load_pruned(file, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))[0]
        Linear(in_features=4, out_features=3, bias=True)
    """
    header, tensors = _read(Path(path))
    if model is None:
        if not header["architecture"]:
            raise ValueError(
                f"{path} names no architecture. Pass the model as it was before pruning."
            )
        model = zoo.build(header["architecture"], num_classes=header["num_classes"])
    _fill_unsaved(model, tensors)
    _fit(model, header["attributes"], tensors, Path(path))
    model.load_state_dict(tensors)
    return model.eval()


def _fill_unsaved(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """In place: buffers that pruning cut and no state dict holds, taken out of ``tensors``."""
    saved = model.state_dict()
    for name, buffer in list(model.named_buffers()):
        if name in tensors and name not in saved:
            replace_tensor(model, name, tensors.pop(name).to(buffer))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Write it with wfilter bake --prune.")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Write it anew.") from None
    if not isinstance(header, dict) or set(header) != {"architecture", "num_classes", "attributes"}:
        raise ValueError(
            f"{path} holds no pruned model. Load a plain file with model.load_state_dict."
        )
    return header, tensors


def _fit(
    model: nn.Module, attributes: dict[str, Any], tensors: dict[str, torch.Tensor], path: Path
) -> None:
    """In place: give the model's tensors and layers the shapes and widths that a file has."""
    make_plain(model)
    _split_head(model, tensors)
    here = model.state_dict(keep_vars=True)
    missing = sorted(set(here) - set(tensors))
    extra = sorted(n for n in set(tensors) - set(here) if n.rpartition(".")[2] != "bias")
    if missing or extra or not set(attributes) <= {name for name, _ in model.named_modules()}:
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: missing {missing[:3]}, unexpected "
            f"{extra[:3]}. Pass the architecture it was made from."
        )
    for name, tensor in tensors.items():
        if name not in here:  # a bias that pruning added, for the constants of removed channels
            owner = model.get_submodule(name.rpartition(".")[0])
            owner.register_parameter("bias", nn.Parameter(torch.empty_like(tensor)))
        elif here[name].shape != tensor.shape:
            replace_tensor(model, name, here[name].new_empty(tensor.shape))
    for name, changed in attributes.items():
        module = model.get_submodule(name)
        for key, value in changed.items():
            setattr(module, key, int(value))


def _split_head(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """In place: two linear layers for the head if a file has two, from baked feature rows."""
    for path, module in list(model.named_modules()):
        names = {f"{path}.0.weight", f"{path}.1.weight"}
        if path and isinstance(module, nn.Linear) and names <= set(tensors):
            width = module.in_features
            head = nn.Linear(width, module.out_features)
            layers = nn.Sequential(nn.Linear(width, width), head).to(module.weight)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layers)
