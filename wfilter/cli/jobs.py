"""What a command works on, by name: model, weights, dataset, filters, processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wfilter import data
from wfilter.cli import settings
from wfilter.core.attach import apply_weight_filtering
from wfilter.core.gates import class_index
from wfilter.core.model import FilteredModel
from wfilter.data import formats as readers
from wfilter.data import zoo
from wfilter.data.images import ImageSet
from wfilter.evaluation.bench import randomise
from wfilter.files import checkpoint
from wfilter.untraining.history import Ended, History

if TYPE_CHECKING:
    from wfilter.evaluation.report import Report

REPORTS = (".json", ".md", ".tex")


@dataclass(frozen=True)
class Job:
    """A model and a dataset, both by name, and where their files are.

    Attributes:
        model: As `wfilter.zoo.build` takes it.
        weights: A safetensors file, or ``"data"`` for the one in the data folder.
        pretrained: Take timm's or torchvision's own weights.
        num_classes: Outputs of the head; by default those of the dataset.
        dataset: As `wfilter.data.load` takes it.
        data: The data folder; by default the environment variable ``WFILTER_DATA``.
        size: Side of the images in pixels, where the model's own is not known or not wanted.
        download: Whether a missing dataset may be fetched.
    """

    model: str = ""
    weights: str | None = None
    pretrained: bool = False
    num_classes: int | None = None
    dataset: str | None = None
    data: str | None = None
    size: int | None = None
    download: bool = False

    def __post_init__(self) -> None:
        if self.data in readers.NAMES:
            raise ValueError(
                f"--data is the folder that holds the datasets. For the dataset itself write "
                f"--dataset {self.data}."
            )
        if not self.model:
            raise ValueError(
                "no model is named. Write timm:NAME, torchvision:NAME, transformers:NAME, "
                "wfilter:NAME or package.module:function, or name one in the settings file."
            )

    def network(self, num_classes: int | None = None) -> nn.Module:
        """The model with its weights."""
        outputs = self.num_classes if self.num_classes is not None else num_classes
        if self.pretrained and self.model.startswith("torchvision:"):
            outputs = self.num_classes
        weights: str | Path | None = self.weights
        if weights == "data":
            weights = zoo.weights_path(self.model, self.data)
        return zoo.build(
            self.model, num_classes=outputs, pretrained=self.pretrained, weights=weights
        )

    def images(self, split: str) -> ImageSet:
        """A split of the dataset, as the model wants to see it."""
        if self.dataset is None:
            raise ValueError(f"no dataset is named. Pass --dataset: {', '.join(readers.NAMES)}.")
        try:
            wanted = dict(vars(zoo.input_format(self.model)))
        except ValueError:
            wanted = {}  # someone else's model: the dataset as it is stored
        if self.size is not None:
            wanted["size"] = self.size
        return data.load(self.dataset, split, self.data, download=self.download, **wanted)

    def refuse_random_weights(self) -> None:
        """Raise if the model has random weights: it knows nothing that could be forgotten."""
        source = self.model.partition(":")[0]
        if not self.weights and not self.pretrained and source in zoo.TRUSTED:
            raise ValueError(
                f"{self.model} has random weights: there is nothing to forget. Pass --weights "
                "FILE.safetensors, --weights data (the data folder's), or --pretrained."
            )


@dataclass(frozen=True)
class Filters:
    """A folder or file written by ``untrain``, opened."""

    path: Path
    job: Job
    wf: FilteredModel

    @property
    def example(self) -> Tensor | None:
        """One image of the size the model takes, if that is known."""
        return _example(self.job, self.wf.base)

    @property
    def history(self) -> History | None:
        """The history of the untraining, if it is kept beside the filters."""
        path = self.path.parent / "history.json"
        if not path.is_file():
            return None
        try:
            stored = json.loads(path.read_text())
            return History.from_dict(stored)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged ({error}). Delete it: only the course of untraining is lost."
            ) from error

    @property
    def about(self) -> dict[str, object]:
        """What a page's header says of the filters: model, data, recipe."""
        known = {"model": self.job.model, "data": self.job.dataset}
        history = self.history
        if history is not None and history.records:
            name = history.recipe.get("name", "?")
            solved = history.ended is Ended.SOLVED
            known["recipe"] = (
                f"{name}, {'solved' if solved else f'{history.records[-1].step} steps'}"
            )
            known["untrained in"] = f"{history.seconds:.0f} s"
        return {name: value for name, value in known.items() if value}


def open_filters(path: str | Path, *values: Any, **named: Any) -> Filters:
    """Filters with the model they were made for.

    The values, in the order of `Job`'s fields, override the settings kept beside the filters.
    """
    overrides = {**dict(zip(Job.__dataclass_fields__, values)), **named}
    path = Path(path)
    file = path / checkpoint.FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist. Make filters with wfilter untrain, or try wfilter demo."
        )
    beside = file.parent / settings.FILE
    known = settings.read(beside) if beside.is_file() else {}
    fields = {name: known[name] for name in Job.__dataclass_fields__ if name in known}
    source = str(fields.get("model", "")).partition(":")[0]
    if not overrides.get("model") and source not in (*zoo.TRUSTED, ""):
        raise ValueError(
            f"{beside} names a model by its own code, {fields['model']}. A folder of filters must "
            f"not choose what is run: pass --model {fields['model']} if you trust it."
        )
    header, _ = checkpoint.read_header(file)
    job = Job(**{**fields, **{k: v for k, v in overrides.items() if v not in (None, False)}})
    try:
        network = job.network(header["num_classes"])
    except FileNotFoundError as error:
        if overrides.get("weights"):
            raise
        raise FileNotFoundError(
            f"{error} {beside} names it: if it was moved, pass --weights."
        ) from error
    with naming_size(job, job.size):
        wf = checkpoint.load(file, network, example_input=_example(job, network))
    return Filters(file, job, wf)


@contextmanager
def naming_size(job: Job, size: int | None) -> Iterator[None]:
    """Where ``--size`` was given, name it in place of torch's own error inside the block."""
    try:
        yield
    except RuntimeError as error:
        if size is None:
            raise
        raise ValueError(
            f"{job.model} does not take images of {size} x {size}: {error}. Pass another --size, "
            "or leave it out."
        ) from error


def parse_classes(wf: FilteredModel, texts: Sequence[str]) -> set[int]:
    """The indices of classes given by name or index, with commas between several in one text.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
        >>> parse_classes(wf, ["2", "0,1"])
        {0, 1, 2}
    """
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError("no class is named. Pass --forget with class names or indices.")
    names = wf.class_names or ()
    return {
        class_index(
            int(word) if word not in names and word.lstrip("-").isdigit() else word,
            wf.num_classes,
            wf.class_names,
        )
        for word in words
    }


def _example(job: Job, network: nn.Module) -> Tensor | None:
    """One image of the model's size, else of the dataset's; nothing if neither is known."""
    try:
        taken = zoo.input_format(job.model)
    except ValueError:
        if job.dataset is None:
            return None
        return torch.zeros(1, *job.images("test").image_shape)
    size = taken.size if job.size is None else job.size
    return torch.zeros(1, taken.channels, size, size)


def random_filters(job: Job, batch_size: int, device: str | None) -> tuple[FilteredModel, Tensor]:
    """The job's model with random filters, and a batch of noise it takes: for timing."""
    example = _example(job, network := job.network())
    with naming_size(job, job.size):
        wf = randomise(apply_weight_filtering(network, example_input=example))
    wf = wf.to(device) if device else wf
    if example is None:
        raise ValueError(f"the images that {job.model} takes are not known. Pass --size.")
    return wf, torch.rand(batch_size, *example.shape[1:], device=wf.alphas.device)


def check_writable(path: Path) -> None:
    """Raise before any work if a file could not be written."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"--out {path}: {folder} is not a folder. Make it first.")
    if path.is_dir():
        raise IsADirectoryError(f"--out {path} is a folder. Name a file in it.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PermissionError(f"--out {path} may not be written. Choose another place.")


def check_report_path(path: Path) -> None:
    """Raise before any work if a report could not be written; its suffix chooses the format."""
    check_writable(path)
    if path.suffix not in REPORTS:
        raise ValueError(f"--out {path} must end in {', '.join(REPORTS)}.")


def write_report(report: Report, path: Path) -> None:
    """Write a report as JSON, Markdown or LaTeX, as the suffix of ``path`` says."""
    ways = {".json": report.to_json, ".md": report.to_markdown, ".tex": report.to_latex}
    path.write_text(ways[path.suffix](), encoding="utf-8")
