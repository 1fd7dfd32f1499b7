"""How a forgotten class might be brought back: attacks on baked models, for `revival.py`."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHOTS = (1, 5, 50)
POSITIONS = 1000  # rows of the least squares problem of one layer


# ---- a network in parts -------------------------------------------------------------------------


def split(model: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """What no gate touches, what comes after it, and the head."""
    if isinstance(model, nn.Sequential):
        return nn.Identity(), model[:-1], model[-1]
    stem = (model.conv1, model.bn1, model.relu, model.maxpool)
    trunk = nn.Sequential(*stem, model.layer1, model.layer2, model.layer3)
    return trunk, nn.Sequential(model.layer4, nn.AdaptiveAvgPool2d(1), nn.Flatten()), model.fc


class Tail(nn.Module):
    """The part of a network that an attacker works on: from the first gates to the logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        _, body, head = split(model)
        self.body, self.head = copy.deepcopy(body), copy.deepcopy(head)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@torch.no_grad()
def before_tail(model: nn.Module, images: Tensor) -> Tensor:
    """What a tail is given for these images."""
    trunk = split(model)[0]
    return torch.cat([trunk(part) for part in images.split(50)])


def zeros_of(tail: Tail) -> dict[str, Tensor]:
    """Weight name -> where an attacker sees that something was closed: zeros, and small rows."""
    found = {}
    for name, weight in tail.body.named_parameters("body"):
        if weight.ndim > 1:
            rows = small_rows(weight).view(-1, *[1] * (weight.ndim - 1))
            found[name] = ((weight == 0) | rows).detach()
    return {name: zeros for name, zeros in found.items() if zeros.any()}


def small_rows(weight: Tensor) -> Tensor:
    """Rows that stand apart from the others of their layer by their small norm."""
    norms = weight.flatten(1).norm(dim=1)
    share = norms / norms[norms > 0].median()
    between = (share > 0.15) & (share < 0.3)  # where rows are of all sizes, small ones tell nothing
    return (share <= 0.15) & ~between.any()


# ---- attacks without images ---------------------------------------------------------------------


@torch.no_grad()
def fill(tail: Tail, zeros: dict[str, Tensor], generator: torch.Generator, scale: float) -> None:
    """In place: noise of the other weights' spread times ``scale`` where there were zeros."""
    for name, closed in zeros.items():
        weight = tail.get_parameter(name)
        noise = torch.randn(int(closed.sum()), generator=generator)
        weight[closed] = scale * weight[~closed].std() * noise


@torch.no_grad()
def by_neighbours(tail: Tail, zeros: dict[str, Tensor], generator: torch.Generator) -> None:
    """In place: closed rows become mixtures of open ones of the same layer; other zeros noise."""
    rows = {name: closed.flatten(1).all(1) for name, closed in zeros.items()}
    fill(tail, zeros, generator, 1.0)
    for name, closed in rows.items():
        weight = tail.get_parameter(name)
        around = weight[~closed]
        pick = torch.randint(len(around), (2, int(closed.sum())), generator=generator)
        weight[closed] = (around[pick[0]] + around[pick[1]]) / 2**0.5


@torch.no_grad()
def by_scale(tail: Tail, zeros: dict[str, Tensor], generator: torch.Generator) -> None:
    """In place: rows much smaller than others are scaled up to the others' size."""
    for weight in (tail.get_parameter(name) for name in zeros):
        norms, small = weight.flatten(1).norm(dim=1), small_rows(weight)
        factor = torch.where(small, norms[~small].median() / norms.clamp(min=1e-12), 1.0)
        weight *= factor.view(-1, *[1] * (weight.ndim - 1))


@torch.no_grad()
def by_another(
    other: Tail, tail: Tail, zeros: dict[str, Tensor], generator: torch.Generator
) -> None:
    """In place: closed weights from another network of the same architecture."""
    for name, closed in zeros.items():
        tail.get_parameter(name)[closed] = other.get_parameter(name)[closed]


def by_noise(tail: Tail, zeros: dict[str, Tensor], generator: torch.Generator) -> None:
    """In place: noise of the other weights' spread."""
    fill(tail, zeros, generator, 1.0)


# ---- attacks with images ------------------------------------------------------------------------


def ridge(features: Tensor, wanted: Tensor) -> Tensor:
    """Weights ``(features, outputs)`` that make centred outputs of centred features."""
    shrink = 0.1 * features.square().sum() / len(features) * torch.eye(len(features))
    return features.T @ torch.linalg.solve(features @ features.T + shrink, wanted)


@torch.no_grad()
def new_head(tail: Tail, x: Tensor, y: Tensor, last: bool = False) -> None:
    """In place: all that follows the features, or only its last layer, solved from labels."""
    keeps = tail.head[:-1] if last and isinstance(tail.head, nn.Sequential) else nn.Identity()
    features = torch.cat([keeps(tail.features(part)) for part in x.split(100)])
    mean = features.mean(0)
    solved = ridge(features - mean, F.one_hot(y, 10).float() - 0.1)
    layer = nn.Linear(features.shape[1], 10)
    layer.weight.copy_(solved.T)
    layer.bias.copy_(0.1 - mean @ solved)
    tail.head = nn.Sequential(keeps, layer)


def new_rows(
    tail: Tail, zeros: dict[str, Tensor], x: Tensor, y: Tensor, generator: torch.Generator
) -> None:
    """In place: closed rows by least squares, so that they give what the next layers ask for.

    That is the step down the loss of the layer's output, seen through the weights that are left
    behind it. Rows start as noise, since a silent ReLU asks for nothing, and get the norm of open
    rows.
    """
    if not zeros:  # as with gates learned soft: nothing to solve for
        return
    fill(tail, zeros, generator, 0.5)
    rows = {name: closed.flatten(1).all(1) for name, closed in zeros.items()}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        tail.get_submodule(name.removesuffix(".weight")).register_forward_hook(
            lambda _, given, made, name=name: seen.update({name: (given[0], made)})
        )
        for name in rows
    ]
    tail.requires_grad_(True)
    loss = F.cross_entropy(tail(x), y)
    for hook in hooks:
        hook.remove()
    steps = torch.autograd.grad(loss, [made for _, made in seen.values()])
    for (name, (given, _)), step in zip(seen.items(), steps):
        layer = tail.get_submodule(name.removesuffix(".weight"))
        _solve_rows(layer, rows[name], given.detach(), -step, generator)


@torch.no_grad()
def _solve_rows(
    layer: nn.Conv2d, rows: Tensor, given: Tensor, wanted: Tensor, generator: torch.Generator
) -> None:
    patches = F.unfold(given, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    inputs = patches.transpose(1, 2).flatten(0, 1)  # (positions, weights of a row)
    outputs = wanted.flatten(2).transpose(1, 2).flatten(0, 1)[:, rows]
    some = torch.randperm(len(inputs), generator=generator)[:POSITIONS]
    inputs, outputs = inputs[some] - inputs.mean(0), outputs[some] - outputs.mean(0)
    solved = ridge(inputs, outputs).T
    norm = layer.weight[~rows].flatten(1).norm(dim=1).median()
    solved *= norm / solved.norm(dim=1, keepdim=True).clamp(min=1e-12)
    layer.weight[rows] = solved.view(-1, *layer.weight.shape[1:])


def fine_tune(tail: Tail, x: Tensor, y: Tensor, zeros: dict[str, Tensor] | None, args: Any) -> None:
    """In place: a new head, then a few steps of Adam on it and the zeros, or on everything.

    The old head may hold a class down for good, or never have been taught it.
    """
    new_head(tail, x, y)
    tail.requires_grad_(True)
    chosen = list(tail.head.parameters())
    chosen += list(tail.body.parameters()) if zeros is None else map(tail.get_parameter, zeros)
    optimiser = torch.optim.Adam(chosen, 1e-3)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        batch = torch.randperm(len(x), generator=generator)[: args.batch]
        F.cross_entropy(tail(x[batch]), y[batch]).backward()
        for name, closed in (zeros or {}).items():
            tail.get_parameter(name).grad[~closed] = 0
        optimiser.step()
        optimiser.zero_grad()


Attack = Callable[[Tail, dict[str, Tensor], torch.Generator], None]


def attacks(
    args: argparse.Namespace, x: Tensor, y: Tensor, other: Tail | None
) -> Iterator[tuple[str, int, Attack]]:
    """Name, images per class, and what is done to the model in place."""
    fills = {"scale small rows up": by_scale, "noise": by_noise, "neighbours": by_neighbours}
    if other is not None:
        fills["another network"] = partial(by_another, other)
    yield "none", 0, lambda *_: None
    for name, work in fills.items():
        yield name, 0, work
    for shots in args.shots:
        few = torch.cat([(y == c).nonzero().flatten()[:shots] for c in range(10)])
        for name, attack in with_images(args, x[few], y[few], fills).items():
            yield name, shots, attack


def with_images(
    args: argparse.Namespace, x: Tensor, y: Tensor, fills: dict[str, Attack]
) -> dict[str, Attack]:
    """Attacks by someone who has these images."""

    def filled(tail: Tail, zeros: Any, generator: torch.Generator) -> None:
        fills["another network"](tail, zeros, generator)
        new_head(tail, x, y)

    found: dict[str, Attack] = {
        "new head": lambda tail, *_: new_head(tail, x, y),
        "new last layer": lambda tail, *_: new_head(tail, x, y, last=True),
        "new rows": lambda tail, zeros, generator: new_rows(tail, zeros, x, y, generator),
        "tune zeros and head": lambda tail, zeros, _: fine_tune(tail, x, y, zeros, args),
        "tune all": lambda tail, *_: fine_tune(tail, x, y, None, args),
    }
    return {**found, "another network, new head": filled} if "another network" in fills else found


NEEDS_ZEROS = ("noise", "neighbours", "another network", "new rows", "tune zeros")


def is_meant(kind: str, attack: str, shots: int, tail: Tail) -> bool:
    """Not for networks without zeros what fills zeros, nor what a restart leaves untouched."""
    if attack == "new last layer" and not isinstance(tail.head, nn.Sequential):
        return False  # it has no other: the same as a new head
    if kind == "retrained":
        return not attack.startswith((*NEEDS_ZEROS, "scale"))
    return shots > 0 or kind != "restarted"
