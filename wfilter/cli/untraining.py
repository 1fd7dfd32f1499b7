"""A run of ``wfilter untrain``: from names and numbers to a folder of filters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wfilter import data
from wfilter.cli import settings
from wfilter.cli.jobs import Job
from wfilter.core.attach import apply_weight_filtering
from wfilter.core.model import FilteredModel
from wfilter.data.batches import InMemory
from wfilter.data.images import ImageBatches, ImageSet
from wfilter.files import card
from wfilter.untraining.history import Ended, History, training_figures
from wfilter.untraining.loop import untrain
from wfilter.untraining.objectives import Linear, Recipe, Stepwise
from wfilter.untraining.stored import recipe_from

MOST_IN_MEMORY = 2**30  # bytes of float images; larger sets are read batch by batch


@dataclass(frozen=True)
class Untraining:
    """Everything that decides a run of ``wfilter untrain``."""

    job: Job
    recipe: Recipe
    out: Path
    steps: int | None = None
    epochs: int | None = None
    batch_size: int = 64
    shift: int = 0
    validation: float = 0.1
    targets: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    granularity: str = "out"
    seed: int = 0
    amp: bool = False

    def to_toml(self, history: History | None = None) -> str:
        """The settings in full; ``wfilter untrain --config`` repeats the run.

        With the ``history`` of a run: the settings it settled on, with its choices as comments.
        """
        recipe, choices = self.recipe, ""
        if history is not None and history.fixed:
            recipe = recipe_from(history.fixed)
            choices = "".join(f"# {line}\n" for line in (*history.choices, history.verdict))
        own = {k: v for k, v in vars(self).items() if k not in ("job", "recipe", "out")}
        fields = {**vars(absolute(self.job)), **own}
        stated = {name: value for name, value in fields.items() if value not in (None, ())}
        return choices + settings.write({**stated, "recipe": recipe.to_dict()})

    def run(self, device: str | None, rank: int, *, resume: bool, progress: bool | None) -> History:
        """Untrain; the first of several processes writes filters, history and settings."""
        self.job.refuse_random_weights()
        train = self.job.images("train")
        wf = attach(
            self.job,
            train,
            targets=self.targets or "auto",
            exclude=self.exclude,
            granularity=self.granularity,
        )
        checkpoint = writable_folder(self.out) / "checkpoint.safetensors"
        history = self._untrain(wf, train, device, checkpoint, resume, progress)
        if rank == 0 and history.ended is not Ended.INTERRUPTED:
            wf.save(self.out)
            text = card.model_card(wf, self._card_lines(history), training_figures(history))
            (self.out / card.NAME).write_text(text, encoding="utf-8")
            (self.out / "history.json").write_text(history.to_json())
            (self.out / settings.FILE).write_text(self.to_toml(history), encoding="utf-8")
            checkpoint.unlink(missing_ok=True)
        return history

    def _card_lines(self, history: History) -> dict[str, object]:
        """How the filters were made, for their card; paths of this machine stay out of it."""
        weights = Path(self.job.weights).name if self.job.weights else ""
        size = "" if history.ended is Ended.SOLVED else f", {self.batch_size} images a step"
        made = {
            "base model": f"{self.job.model}{' with ' + weights if weights else ''}",
            "data": self.job.dataset,
            "recipe": f"{self.recipe.name}, {history.stopped}{size}",
            "choices": "; ".join(history.choices) or None,
            "verdict on held-out training images": history.verdict or None,
            "seconds": f"{history.seconds:.0f}",
            "seed": self.seed,
            "all settings": settings.FILE,
        }
        return {name: value for name, value in made.items() if value is not None}

    def _untrain(
        self,
        wf: FilteredModel,
        train: ImageSet,
        device: str | None,
        checkpoint: Path,
        resume: bool,
        progress: bool | None,
    ) -> History:
        val = None
        if isinstance(self.recipe, Stepwise) and self.recipe.patience and self.validation:
            train, held = data.hold_out(train, self.validation, self.seed)
            val = data.batches(held, self.batch_size)
        return untrain(
            wf,
            in_memory(train, self.batch_size, self.shift),
            val,
            recipe=self.recipe,
            steps=self.steps,
            epochs=self.epochs,
            device=device,
            checkpoint=None if isinstance(self.recipe, Linear) else checkpoint,
            resume=resume,
            seed=self.seed,
            amp=self.amp,
            progress=progress,
        )


def attach(job: Job, dataset: ImageSet, **options: Any) -> FilteredModel:
    """Fresh filters on the job's model, for the classes of a dataset."""
    network = job.network(dataset.num_classes)
    example = torch.zeros(1, *dataset.image_shape)
    try:
        with torch.no_grad():
            network.eval()(example)
    except RuntimeError as error:
        raise ValueError(
            f"{job.model} does not take images of {tuple(dataset.image_shape)}: {error}. Pass "
            "--size, or another model."
        ) from error
    return apply_weight_filtering(
        network,
        dataset.num_classes,
        class_names=dataset.class_names,
        example_input=example,
        **options,
    )


def in_memory(dataset: ImageSet, batch_size: int, shift: int) -> InMemory | ImageBatches:
    """The dataset as `untrain` reads it fastest: tensors if they fit in memory, else batches."""
    augment = partial(half_shifted, pad=shift) if shift else None
    channels, height, width = dataset.image_shape
    if 4 * len(dataset) * channels * height * width > MOST_IN_MEMORY:
        return data.batches(dataset, batch_size, shuffle=True, drop_last=True, augment=augment)
    images, labels = dataset.batch(torch.arange(len(dataset)))
    return InMemory(images, labels, batch_size, augment)


def half_shifted(images: Tensor, generator: torch.Generator, pad: int) -> Tensor:
    """The images, about half of them, chosen at random, moved by up to ``pad`` pixels.

    Example:
        >>> half_shifted(torch.rand(4, 1, 8, 8), torch.Generator(), pad=1).shape
        torch.Size([4, 1, 8, 8])
    """
    moved = data.shift_and_flip(images, generator, pad=pad)
    chosen = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(chosen, moved, images)


@contextmanager
def processes(device: str | None) -> Iterator[tuple[int, str | None]]:
    """This process's rank and device: under ``torchrun`` one of several, else the only one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0, device or ("cuda" if torch.cuda.is_available() else None)
        return
    import torch.distributed as dist

    gpu = torch.cuda.is_available() and device != "cpu"
    local = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if gpu:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield dist.get_rank(), local if gpu else device
    finally:
        dist.destroy_process_group()


def writable_folder(path: Path) -> Path:
    """The folder, made if need be; raises if it cannot be written to."""
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(13, "Permission denied", str(path))
    return path


def absolute(job: Job) -> Job:
    """The job with absolute paths, which hold wherever its settings are read from."""
    weights = job.weights
    if weights and weights != "data":
        weights = str(Path(weights).absolute())
    folder = None if job.data is None else str(Path(job.data).absolute())
    return replace(job, weights=weights, data=folder)
