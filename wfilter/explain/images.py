"""Images that excite a unit, and what the model says of a class's images before and after."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import reduce
from torch import Tensor, nn

from wfilter.core.model import FilteredModel
from wfilter.core.outputs import logits_of
from wfilter.core.targets import CONVOLUTIONS, Target
from wfilter.data.running import evaluating
from wfilter.metrics.layers import find_layer, row_of, targets_by_name


@torch.no_grad()
def unit_responses(wf: FilteredModel, layer: str, images: Tensor) -> Tensor:
    """How strongly each unit of a layer responds to each image in the base model.

    The response is the unit's largest output over positions or tokens. If a BatchNorm directly
    follows a convolution, it is read after the BatchNorm, which may turn the sign.

    Returns:
        ``(images, units)``.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
        >>> unit_responses(wf, "weight", torch.ones(2, 4)).shape
        torch.Size([2, 3])
    """
    target = targets_by_name(wf)[find_layer(wf, layer)]
    if target.unit_axis is None:
        raise ValueError(f"{target.name} has one gate per element: its units have no output.")
    module, axis = _watched(wf.base, target)
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _m, _i, output: seen.append(output))
    try:
        with evaluating(wf):
            for part in torch.split(images.to(wf.alphas.device), 64):
                wf(part)
    finally:
        handle.remove()
    if not seen or sum(map(len, seen)) != len(images):
        raise ValueError(
            f"{target.owners[0][0]} does not give one output per image: it is bypassed, or folds "
            "windows into the batch. Choose another layer."
        )
    outputs = torch.cat([part.movedim(axis, 1) for part in seen])
    return reduce(outputs, "n units ... -> n units", "max")


def exciting_images(
    wf: FilteredModel, layer: str, unit: int, images: Tensor, k: int = 6
) -> list[int]:
    """Positions of the images that excite a unit most, strongest first; see `unit_responses`.

    Example:
        >>> import wfilter
        >>> model = nn.Linear(1, 2)
        >>> _ = nn.init.ones_(model.weight)
        >>> wf = wfilter.apply_weight_filtering(model, targets="*")
        >>> exciting_images(wf, "weight", 0, torch.tensor([[1.0], [3.0], [2.0]]), k=2)
        [1, 2]
    """
    responses = unit_responses(wf, layer, images)
    if not 0 <= unit < responses.shape[1]:
        raise ValueError(
            f"unit={unit} is outside 0..{responses.shape[1] - 1}, the units of {layer}."
        )
    order: list[int] = responses[:, unit].argsort(descending=True, stable=True)[:k].tolist()
    return order


@dataclass(frozen=True)
class Predictions:
    """The likeliest classes of one image and their probabilities, before and after forgetting."""

    before: tuple[tuple[int, float], ...]
    after: tuple[tuple[int, float], ...]


@torch.no_grad()
def predictions(
    wf: FilteredModel, images: Tensor, forget: int | str, k: int = 3
) -> list[Predictions]:
    """For each image the ``k`` likeliest classes of the base model and of the filtered one.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
        >>> len(predictions(wf, torch.ones(2, 4), 0)[0].after)
        3
    """
    images, row = images.to(wf.alphas.device), row_of(wf, forget)
    with evaluating(wf):
        before, after = logits_of(wf(images)), logits_of(wf(images, forget=row))
    return [Predictions(*pair) for pair in zip(_likeliest(before, k), _likeliest(after, k))]


def _likeliest(logits: Tensor, k: int) -> list[tuple[tuple[int, float], ...]]:
    best = logits.float().softmax(1).topk(min(k, logits.shape[1]))
    return [tuple(zip(i, p)) for i, p in zip(best.indices.tolist(), best.values.tolist())]


def _watched(model: nn.Module, target: Target) -> tuple[nn.Module, int]:
    """The module whose output shows a target's units, and the axis they lie on."""
    module = model.get_submodule(target.owners[0][0])
    modules = list(model.modules())
    following = modules[modules.index(module) + 1 :][:1]
    convolution = isinstance(module, CONVOLUTIONS) or target.unit_axis == 1
    for after in following if convolution else ():
        if (
            isinstance(after, nn.modules.batchnorm._BatchNorm)
            and after.num_features == target.units
        ):
            return after, 1
    return module, 1 if convolution else -1
