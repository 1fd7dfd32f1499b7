"""Choose which parameters of a model are filtered. Only reads the model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from wfilter.core.standardised import is_standardised

OneSelector = str | type[nn.Module] | Callable[[str, nn.Module, Tensor], bool]
Selector = OneSelector | Iterable[OneSelector]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# The parts of a module's path that mark a query, key or value projection in timm, torchvision and
# transformers.
_ATTENTION = re.compile(
    r"(to_)?(q|k|v|qk|kv|qv|qkv|qkvs|query|key|value|wq|wk|wv|queries|keys_values|queries_keys_values)"
    r"(_proj|_project|_conv)?"
)
_LETTERS = {"query": "q", "key": "k", "value": "v", "wq": "q", "wk": "k", "wv": "v"}
_LETTERS |= {"queries": "q", "keys_values": "kv", "queries_keys_values": "qkv"}


@dataclass(frozen=True)
class Target:
    """A tensor chosen for filtering.

    ``owners`` are the places that hold it, more than one when weights are tied: pairs of a module's
    path and the tensor's name in it. ``unit_axis`` is ``None`` when every element has its own gate.
    A ``standardised`` weight is gated after its module has rescaled it.
    """

    name: str
    shape: tuple[int, ...]
    units: int
    unit_axis: int | None
    owners: tuple[tuple[str, str], ...]
    standardised: bool = False

    def spread(self, gate: Tensor) -> Tensor:
        """The gates ``(units,)`` in a shape that multiplies the tensor."""
        if self.unit_axis is None:
            return gate.view(self.shape)
        shape = [1] * len(self.shape)
        shape[self.unit_axis] = self.units
        return gate.view(shape)


def select_targets(
    model: nn.Module,
    targets: Selector = "auto",
    exclude: Selector = (),
    granularity: str = "out",
) -> tuple[Target, ...]:
    """The floating-point parameters of ``model`` that ``targets`` names and ``exclude`` does not.

    Example:
        >>> [t.name for t in select_targets(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()))]
        ['0.weight', '0.bias']
    """
    if granularity not in ("out", "element"):
        raise ValueError(f"granularity={granularity!r} is unknown. Use 'out' or 'element'.")
    owners = _owners(model)
    parameters = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
    chosen = _match_all(model, parameters, owners, targets, "targets")
    dropped = _match_all(model, parameters, owners, exclude, "exclude")
    names = [name for name in parameters if name in chosen and name not in dropped]
    if not names:
        raise ValueError(
            f"targets={_show(targets)} with exclude={_show(exclude)} leaves nothing to filter in "
            f"{type(model).__name__}. Call find_targets(model) to see what 'auto' takes, or name "
            "parameters with a glob such as '*.weight'."
        )
    return tuple(
        _target(model, name, parameters[name], owners[name], granularity) for name in names
    )


def _owners(model: nn.Module) -> dict[str, tuple[tuple[str, str], ...]]:
    """Parameter name -> every distinct module that holds the tensor."""
    first = {id(p): name for name, p in model.named_parameters()}
    owners: dict[str, list[tuple[str, str]]] = {name: [] for name in first.values()}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[first[id(parameter)]].append((path, name))
    return {name: tuple(places) for name, places in owners.items()}


def _target(
    model: nn.Module,
    name: str,
    parameter: Tensor,
    owners: tuple[tuple[str, str], ...],
    granularity: str,
) -> Target:
    shape = tuple(parameter.shape)
    module, tensor = model.get_submodule(owners[0][0]), owners[0][1]
    standardised = is_standardised(module)
    if standardised and tensor == "weight" and granularity == "element":
        raise ValueError(
            f"{name} is standardised before use, where a gate per element has no meaning of its "
            "own. Use granularity='out', or exclude it."
        )
    if granularity == "element" or not shape:
        return Target(name, shape, parameter.numel(), None, owners)
    if standardised and tensor not in ("weight", "bias"):
        raise ValueError(
            f"{name} rescales a standardised weight and cannot be filtered; filter the weight, "
            f"whose gates act after the standardisation. Add exclude='*.{tensor}'."
        )
    axis = 1 if isinstance(module, TRANSPOSED) and tensor == "weight" else 0
    return Target(name, shape, shape[axis], axis, owners, standardised and tensor == "weight")


def _match_all(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    owners: dict[str, tuple[tuple[str, str], ...]],
    selectors: Selector,
    argument: str,
) -> set[str]:
    """Names matched by any of the selectors; a selector that matches nothing is an error."""
    single = isinstance(selectors, (str, type)) or callable(selectors)
    names: set[str] = set()
    for selector in [selectors] if single else list(selectors):  # type: ignore[arg-type]
        matched = (
            {
                name
                for name, parameter in parameters.items()
                if any(
                    _matches(selector, name, model.get_submodule(path), tensor, parameter)
                    for path, tensor in owners[name]
                )
            }
            if selector != "auto"
            else _automatic(model, parameters, owners)
        )
        if not matched:
            raise ValueError(_nothing_matched(model, list(parameters), selector, argument))
        names |= matched
    return names


def _matches(
    selector: object, name: str, module: nn.Module, tensor: str, parameter: Tensor
) -> bool:
    if isinstance(selector, str):
        if selector.startswith("re:"):
            return _pattern(selector).fullmatch(name) is not None
        return fnmatchcase(name, selector)
    if isinstance(selector, type):
        return isinstance(module, selector) and not (
            is_standardised(module) and tensor not in ("weight", "bias")
        )
    if callable(selector):
        return bool(selector(name, module, parameter))
    raise TypeError(
        f"targets and exclude take globs, 're:' patterns, module types and callables, "
        f"not {type(selector).__name__}."
    )


def _pattern(selector: str) -> re.Pattern[str]:
    try:
        return re.compile(selector[3:])
    except re.error as error:
        raise ValueError(
            f"{selector!r} is not a regular expression: {error}. Without 're:' it is a glob, such "
            "as '*.weight'."
        ) from None


def _automatic(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    owners: dict[str, tuple[tuple[str, str], ...]],
) -> set[str]:
    """The paper's choice: q/k/v projections where the model has attention, convolutions elsewhere.

    Where the only convolutions are a stem or patch embedding (MLP-Mixer and its kin), the linear
    layers but the last carry the classes, so they are taken too.
    """
    attention, convolution, linear = set(), set(), []
    attends = _attends(model)
    for name in parameters:
        path, tensor = owners[name][0]
        module = model.get_submodule(path)
        if isinstance(module, nn.MultiheadAttention):
            if tensor.startswith(("in_proj", "q_proj", "k_proj", "v_proj")):
                attention.add(name)
        elif tensor not in ("weight", "bias"):
            _refuse_derived_weight(model, path, name)
        elif attends and isinstance(module, (nn.Linear, *CONVOLUTIONS)) and _projected(path):
            attention.add(name)
        elif isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
            convolution.add(name)
        elif isinstance(module, nn.Linear):
            linear.append(name)
    if attention:
        return attention
    heads = {path for path, _ in (owners[name][0] for name in linear[-1:])}
    body = {name for name in linear if owners[name][0][0] not in heads}
    few = sum(parameters[n].numel() for n in convolution) < 0.1 * sum(
        parameters[n].numel() for n in body
    )
    weights = sum(parameters[n].ndim > 1 for n in convolution)
    return convolution | body if few and weights <= 2 else convolution


def _refuse_derived_weight(model: nn.Module, path: str, name: str) -> None:
    """Stop where "auto" would pass over a kernel because it is made from other parameters."""
    owner = path.split(".parametrizations.")[0]
    module = model.get_submodule(owner)
    kernels = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
    if isinstance(module, kernels) and "weight" not in module._parameters:
        raise ValueError(
            f"{owner}.weight is computed from {name} and others (weight norm, spectral norm, "
            "pruning), and 'auto' cannot choose among them. Name them in targets, or make the "
            "weight plain first, e.g. torch.nn.utils.parametrize.remove_parametrizations."
        )


def _projected(path: str) -> str:
    """What a module projects to, by its path: "q", "k", "v", several of them, or nothing."""
    matches = (_ATTENTION.fullmatch(part) for part in path.split(".")[-3:])
    word = next((match[2] for match in matches if match), "")
    return _LETTERS.get(word, word)


def _attends(model: nn.Module) -> bool:
    """Whether a model has the query and key projections of attention, joint or apart.

    A single layer that happens to be called ``k`` or ``value`` makes no attention.
    """
    modules = model.named_modules()
    paths = (path for path, module in modules if isinstance(module, (nn.Linear, *CONVOLUTIONS)))
    kinds = {_projected(path) for path in paths}
    return any(len(kind) > 1 for kind in kinds) or {"q", "k"} <= kinds


def _nothing_matched(model: nn.Module, names: list[str], selector: object, argument: str) -> str:
    text = _show(selector)
    if selector == "auto":
        return (
            f"{argument}='auto' found no convolution and no attention projection in "
            f"{type(model).__name__}. Name parameters instead, for example targets='*.weight'."
        )
    wanted = selector if isinstance(selector, str) else text
    plain = wanted.removeprefix("re:").replace("*", "").replace("\\", "")
    closest = difflib.get_close_matches(plain, names, n=3, cutoff=0.0)
    return (
        f"{argument}={text} matches none of the {len(names)} parameters of "
        f"{type(model).__name__}. Closest names:\n  {', '.join(closest)}. "
        "Call find_targets(model) to see them all."
    )


def _show(selector: object) -> str:
    if isinstance(selector, type):
        return selector.__name__
    return getattr(selector, "__name__", repr(selector))
