"""The model behind a server: read from a run's folder, checked, and called on mixed batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wfilter.core.model import FilteredModel
from wfilter.core.nearness import gap, size
from wfilter.core.outputs import logits_of
from wfilter.data import zoo
from wfilter.data.backbones import InputFormat
from wfilter.files.checkpoint import FILE, load
from wfilter.files.exported import load_exported
from wfilter.serve.settings import Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TRUSTED = zoo.TRUSTED
RUN_SETTINGS = "settings.toml"

Forward = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Ranked:
    """The classes of one image, best first: names and probabilities among those allowed.

    Where the model gave no finite numbers, ``finite`` says so and there are no classes.
    """

    top: tuple[tuple[str, float], ...]
    finite: bool = True


@dataclass(frozen=True)
class Engine:
    """A filtered model ready to answer.

    Attributes:
        wf: The eager model; gates are read from it, whichever engine ``forward`` runs.
        inputs: What images must look like.
        forward: Images and bool sets ``(batch, num_classes)`` to logits.
        class_names: One for each output.
        dataset: What the model was untrained on, if that is known.
    """

    wf: FilteredModel
    inputs: InputFormat
    forward: Forward
    class_names: tuple[str, ...]
    dataset: str | None = None

    def sets(self, forget: Sequence[frozenset[int]]) -> Tensor:
        """One row of bools for each set of classes."""
        rows = torch.zeros(len(forget), len(self.class_names), dtype=torch.bool)
        for row, classes in enumerate(forget):
            rows[row, sorted(classes)] = True
        return rows

    def answer(
        self, images: Sequence[Tensor], forget: Sequence[frozenset[int]], top_k: Sequence[int]
    ) -> list[Ranked]:
        """The ranked classes of each image, from one forward in which each forgets its own set.

        A forgotten class is also taken out of the answer, whatever its gates do: its probability
        is 0, the others sum to 1, and it is never among the best.
        """
        sets = self.sets(forget)
        logits = self.forward(torch.stack(list(images)), sets).float()
        finite = logits.isfinite().all(1).tolist()  # one bad image must not spoil its batch
        masked = logits.masked_fill(sets, -torch.inf)
        # Ranked by logits: a probability that rounds to 0 would tie with a forgotten class.
        order = masked.argsort(dim=1, descending=True, stable=True)
        values = masked.softmax(1).gather(1, order)
        allowed = (~sets).sum(1).tolist()
        return [
            self._ranked(order[row], values[row], min(k, allowed[row]))
            if finite[row]
            else Ranked((), finite=False)
            for row, k in enumerate(top_k)
        ]

    def _ranked(self, order: Tensor, values: Tensor, count: int) -> Ranked:
        best = zip(order[:count].tolist(), values[:count].tolist())
        return Ranked(tuple((self.class_names[index], value) for index, value in best))


def open_engine(settings: Settings) -> Engine:
    """The engine of a run's folder; its answers are first compared with the eager model's.

    Raises:
        FileNotFoundError: The folder or the engine's file is missing.
        ValueError: Folder and engine do not fit each other, or the folder names code of its own.
    """
    file = Path(settings.run)
    file = file / FILE if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist. Make it with wfilter untrain or demo.")
    known = _run_settings(file.parent, settings)
    network = zoo.build(
        known["model"],
        num_classes=known.get("num_classes") or _classes_of(file),
        pretrained=known.get("pretrained", False),
        weights=known.get("weights"),
    )
    inputs = _input_format(known)
    example = torch.zeros(1, inputs.channels, inputs.size, inputs.size)
    wf = load(file, network, example_input=example).eval()
    names = wf.class_names or tuple(map(str, range(wf.num_classes)))
    forward = _forward(wf, settings, inputs)
    return Engine(wf, inputs, forward, tuple(names), known.get("dataset"))


def _run_settings(folder: Path, settings: Settings) -> dict[str, Any]:
    """What the run kept about its model, overridden by what ``settings`` say."""
    beside = folder / RUN_SETTINGS
    known: dict[str, Any] = tomllib.loads(beside.read_text()) if beside.is_file() else {}
    source = str(known.get("model", "")).partition(":")[0]
    if settings.model is None and source not in TRUSTED:
        named = known.get("model")
        raise ValueError(
            f"{beside} names no model. Pass --model."
            if named is None
            else f"{beside} names a model by its own code, {named}. A folder of filters must not "
            f"choose what is run: pass --model {named} if you trust it."
        )
    weights = settings.weights or known.get("weights")
    if weights == "data":
        weights = zoo.weights_path(settings.model or known["model"], known.get("data"))
    elif weights and not settings.weights:
        weights = folder / weights
    overrides = {"model": settings.model, "size": settings.size}
    return {**known, **{k: v for k, v in overrides.items() if v is not None}, "weights": weights}


def _classes_of(file: Path) -> int:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        first = next(iter(opened.keys()))
        return int(opened.get_slice(first).get_shape()[0])


def _input_format(known: dict[str, Any]) -> InputFormat:
    inputs = zoo.input_format(known["model"])
    size = known.get("size") or inputs.size
    return InputFormat(size, inputs.channels, inputs.mean, inputs.std)


def _forward(wf: FilteredModel, settings: Settings, inputs: InputFormat) -> Forward:
    def eager(images: Tensor, sets: Tensor) -> Tensor:
        with torch.inference_mode():
            return logits_of(wf(images, forget=sets))

    if settings.engine == "eager":
        _compare(eager, eager, wf.num_classes, inputs, settings.batch_size)
        return eager
    if settings.engine == "compiled":
        other = _compiled(wf, settings)
    else:
        other = _from_file(Path(settings.engine))
    _compare(eager, other, wf.num_classes, inputs, settings.batch_size)
    return other


def _compiled(wf: FilteredModel, settings: Settings) -> Forward:
    import copy

    twin = copy.deepcopy(wf).compile(dynamic=True)

    def compiled(images: Tensor, sets: Tensor) -> Tensor:
        with torch.no_grad():
            return logits_of(twin(images, forget=sets))

    return compiled


def _from_file(path: Path) -> Forward:
    if path.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"engine {path} is neither eager, compiled nor a .onnx or .pt2 file.")
    return load_exported(path)


def _compare(
    eager: Forward, other: Forward, classes: int, inputs: InputFormat, largest: int
) -> None:
    """Raise unless an engine answers as the eager model does; its batches also warm it up."""
    generator = torch.Generator().manual_seed(0)
    for count in sorted({1, 2, 3, largest}):
        images = torch.rand(count, inputs.channels, inputs.size, inputs.size, generator=generator)
        sets = torch.rand(count, classes, generator=generator) < 0.3
        expected, answered = eager(images, sets), other(images, sets)
        if expected.shape != (count, classes):
            raise ValueError(
                f"the model's output has shape {tuple(expected.shape)}.\n"
                f"A server needs logits of shape {(count, classes)}."
            )
        same_shape = answered.shape == expected.shape
        if not same_shape or gap(answered, expected) > 1e-3 * max(1.0, size(expected)):
            raise ValueError(
                "the engine answers differently from the run's own model. Export it anew: "
                "wfilter export RUN --forget sets --out FILE."
            )
