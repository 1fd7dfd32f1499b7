"""One round of steps: the state of a run, and what a step does."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sized

import torch
import torch.distributed as dist
from torch import Tensor

from wfilter import data as wfilter_data
from wfilter.core.gates import HARD
from wfilter.core.model import FilteredModel
from wfilter.core.outputs import logits_of
from wfilter.data.batches import Batches, InMemory, read_batches, split_batch
from wfilter.untraining.groups import find_groups, level, tie
from wfilter.untraining.history import Ended, History, ProgressBar, Record
from wfilter.untraining.objectives import Distill, Seen, Stepwise
from wfilter.untraining.optimiser import average_gradient, learning_rate, make_optimiser
from wfilter.untraining.pairs import Pairs, blend, refuse_one_class
from wfilter.untraining.reading import rows_of
from wfilter.untraining.start import prepare_alphas
from wfilter.untraining.state import Keeper


def processes() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    started = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if started else (0, 1)


class Run:
    """The state of one round of untraining."""

    def __init__(
        self,
        wf: FilteredModel,
        train: Batches | InMemory,
        val: Batches | None,
        recipe: Stepwise,
        seed: int,
    ):
        refuse_one_class(wf.num_classes)
        self.wf, self.train, self.val, self.recipe, self.seed = wf, train, val, recipe, seed
        self.history = History(recipe.to_dict(), seed)
        self.step = self.epoch = self.position = 0
        self.between_steps = True  # False while alphas and optimiser are not those of one step
        self.best: Tensor | None = None
        self.best_loss, self.bad = math.inf, 0
        self.base_logits: dict[int, Tensor] = {}
        self.groups: Tensor | None = None  # found when the first images are there
        self.more: dict[str, Tensor] = {}  # further tensors of a checkpoint
        self.length_matters = recipe.schedule != "constant"
        self.rank, self.world = processes()
        self.blend = recipe.blend if isinstance(recipe, Distill) else 0.0

    def plan(
        self,
        epochs: int | None,
        steps: int | None,
        device: str | torch.device | None,
        amp: bool,
        compile: bool,
    ) -> None:
        """Set up what does not change during the run."""
        if device is not None:
            self.wf.to(device)
        self.device = self.wf.alphas.device
        length = len(self.train) if isinstance(self.train, Sized) else None
        if length == 0:
            raise ValueError("train has no batches. Check the data and drop_last.")
        self.length = length
        self.epochs = epochs if epochs is not None else (None if steps else 1)
        total = [steps] if steps else []
        if self.epochs is not None and length is not None:
            total.append(self.epochs * length)
        self.total = min(total) if total else None
        if self.total is None and self.recipe.schedule != "constant":
            raise ValueError(
                "train has no length, so a cosine schedule has no end. Pass steps=..., or a recipe "
                "with schedule='constant'."
            )
        self.amp = amp
        prepare_alphas(self.wf, self.recipe)
        sets = isinstance(self.recipe, Distill) and self.recipe.set_share > 0
        dense = sets or self.recipe.groups
        self.wf.sparse = self.wf.num_classes > 256 and not dense
        self.forward = torch.compile(self.wf) if compile else self.wf
        self.shares = not compile
        self.optimiser = make_optimiser(self.recipe, self.wf)

    # ---- the loop -----------------------------------------------------------------------------

    def go(self, keeper: Keeper | None, progress: bool | None) -> None:
        """Steps until the plan ends, the validation stops improving, or something breaks."""
        if self.total is not None and self.step >= self.total:  # resumed after its last step
            self.history.end(Ended.STEPS, f"{self.step} steps")
            return
        began, before = time.perf_counter(), self.history.seconds
        with ProgressBar(self.total, progress if self.rank == 0 else False) as bar:
            while self.epochs is None or self.epoch < self.epochs:
                seen = False
                for batch in self._epoch():
                    seen = True
                    record = self._step(batch)
                    self.history.seconds = record.seconds = before + time.perf_counter() - began
                    bar.show(record)
                    if self._validate(record):
                        words = f"no improvement in {self.recipe.patience} validations"
                        self.history.end(Ended.NO_IMPROVEMENT, words)
                        return
                    if keeper is not None and self.rank == 0 and self.step % keeper.every == 0:
                        keeper.store(self)
                    if self.total is not None and self.step >= self.total:
                        self.history.end(Ended.STEPS, f"{self.step} steps")
                        return
                if not seen and self.position == 0:
                    raise ValueError("train has no batches. Check the data and drop_last.")
                self.epoch, self.position = self.epoch + 1, 0
        self.history.end(Ended.EPOCHS, f"{self.epoch} epochs")

    def _epoch(self) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
        """Batches of the epoch from the current position: images, labels, indices."""
        data = self.train
        if isinstance(data, InMemory):
            for number, index in enumerate(data.order(self.seed, self.epoch)):
                if number >= self.position:
                    yield data.images[index], _take(data.labels, index), index
            return
        torch.manual_seed(self.seed * 1_000_003 + self.epoch)  # loaders shuffle by the global RNG
        if isinstance(
            data, wfilter_data.ImageBatches
        ):  # but these by a seed and epoch of their own
            data.epoch = self.epoch
        for number, batch in enumerate(read_batches(data)):
            if number >= self.position:
                images, labels = split_batch(batch)
                yield images, labels, None

    def _step(self, batch: tuple[Tensor, Tensor | None, Tensor | None]) -> Record:
        images, labels, index = batch
        generator = torch.Generator().manual_seed(self.seed * 7_919 + self.step)
        images, is_blended = self._changed(images, generator)
        base = self._base_logits(images, None if self._changes else index)
        rows = self._rows(labels, base, generator)
        if self.blend and (labels is None or labels.ndim == 1):
            rows = torch.where(is_blended, base.argmax(1).cpu(), rows)
        pairs = self.recipe.make_pairs(rows, self.wf.num_classes, generator)
        pairs = pairs.share(self.rank, self.world)
        before = self.wf.alphas.detach().clone() if not self.wf.sparse else None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            logits = self._logits(images, pairs)
        many = labels is not None and labels.ndim == 2
        loss = self._loss(Seen(pairs, logits.float(), base, rows, many))
        self._refuse_bad_loss(loss)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.recipe, self.step, self.total)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradient(self.wf.alphas, self.world, self.step)
        self._tie(images)
        self.between_steps = False
        self.optimiser.step()
        if before is not None and not bool(torch.isfinite(self.wf.alphas).all()):
            with torch.no_grad():
                self.wf.alphas.copy_(before)
            raise FloatingPointError(self._advice("the alphas are no longer finite after"))
        record = self._record(loss, logits.detach(), pairs, rows, is_blended)
        self.step, self.position = self.step + 1, self.position + 1
        self.between_steps = True
        return record

    def _tie(self, images: Tensor) -> None:
        """In place: the gradients of gates that open and close together."""
        if not self.recipe.groups:
            return
        if self.groups is None:
            self.groups = find_groups(self.wf, images)
            level(self.wf.alphas, self.groups)
        tie(self.wf.alphas, self.groups)

    @property
    def _changes(self) -> bool:
        """Whether a step sees other images than the data have."""
        augments = isinstance(self.train, InMemory) and self.train.augment is not None
        return augments or bool(self.blend)

    def _changed(self, images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images on the device, augmented and blended, and which of them are blended."""
        if isinstance(self.train, InMemory) and self.train.augment is not None:
            images = self.train.augment(images, generator)
        images = images.to(self.device)
        if self.blend:
            return blend(images, self.blend, generator)
        return images, torch.zeros(len(images), dtype=torch.bool)

    def _logits(self, images: Tensor, pairs: Pairs) -> Tensor:
        forget = pairs.forget.to(self.device)
        if self.shares and pairs.replicas > 1:
            return logits_of(self.wf.replicated(images, forget))
        return logits_of(self.forward(images[pairs.sample.to(self.device)], forget))

    def _base_logits(self, images: Tensor, index: Tensor | None) -> Tensor:
        """The base model's logits; kept per sample where the data stay the same."""
        if not self.recipe.needs_base:
            return images.new_empty(0)
        if index is not None and all(int(i) in self.base_logits for i in index):
            return torch.stack([self.base_logits[int(i)] for i in index]).to(self.device)
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            logits = logits_of(self.wf(images)).float()
        if index is not None:
            self.base_logits.update(zip(index.tolist(), logits.cpu()))
        return logits

    def _rows(self, labels: Tensor | None, base: Tensor, generator: torch.Generator) -> Tensor:
        """The class whose row a sample uses to forget itself, ``(batch,)`` on the CPU."""
        if labels is None and not self.recipe.needs_base:
            raise ValueError("the paper recipe needs labels: give batches (images, labels).")
        return rows_of(labels, base, self.wf.num_classes, generator)

    def _loss(self, seen: Seen) -> Tensor:
        """The recipe's objective and its regulariser."""
        loss = self.recipe.loss(seen)
        if not self.recipe.lambda_alpha:
            return loss
        forget = seen.pairs.forget.to(self.device)
        rows = torch.unique(forget) if self.wf.sparse else slice(None)
        return loss + self.recipe.closing([alpha[rows] for alpha in self.wf.alpha.values()])

    def _refuse_bad_loss(self, loss: Tensor) -> None:
        if not bool(torch.isfinite(loss)):
            raise FloatingPointError(self._advice(f"the loss is {float(loss.detach())} at"))

    def _advice(self, what: str) -> str:
        return (
            f"{what} step {self.step} (epoch {self.epoch}, batch {self.position}). The alphas "
            "of the step before are kept. Look at that batch for NaN, or lower the learning rate: "
            "dataclasses.replace(recipe, learning_rate=...)."
        )

    def _record(
        self, loss: Tensor, logits: Tensor, pairs: Pairs, rows: Tensor, is_blended: Tensor
    ) -> Record:
        accuracies = pairs.accuracies(logits, rows, is_blended)
        # With very many classes a look at all alphas would cost more than the step.
        closed = math.nan if self.wf.sparse else float((self.wf.alphas <= 0).float().mean())
        value = float(loss.detach())
        record = Record(self.step + 1, self.epoch, 0.0, value, *accuracies, closed)
        self.history.records.append(record)
        return record

    # ---- validation ---------------------------------------------------------------------------

    def _validate(self, record: Record) -> bool:
        """Measure the validation loss where it is due; True when it has stopped improving."""
        recipe = self.recipe
        if self.val is None or not recipe.patience:
            return False
        every = max(1, (self.length or 100) // recipe.evaluations)
        if self.step % every:
            return False
        record.validation = loss = self._validation_loss()
        if loss < self.best_loss:
            self.best_loss, self.bad, self.best = loss, 0, self.wf.alphas.detach().clone()
        else:
            self.bad += 1
        return self.bad >= recipe.patience

    @torch.no_grad()
    def _validation_loss(self) -> float:
        assert self.val is not None
        generator = torch.Generator().manual_seed(self.seed)
        values = []
        for batch in read_batches(self.val):
            images, labels = split_batch(batch)
            images = images.to(self.device)
            base = self._base_logits(images, None)
            rows = self._rows(labels, base, generator)
            if len(rows) < 2:
                continue
            pairs = self.recipe.make_pairs(rows, self.wf.num_classes, generator)
            sample, forget = pairs.sample.to(self.device), pairs.forget.to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
                logits = logits_of(self.wf(images[sample], forget)).float()
            many = labels is not None and labels.ndim == 2
            values.append(float(self._loss(Seen(pairs, logits, base, rows, many))))
        if not values:
            raise ValueError("val has no batches. Check the data.")
        return sum(values) / len(values)

    def finish(self) -> History:
        """Best alphas back, hard gates made exact."""
        wf = self.wf
        with torch.no_grad():
            if self.best is not None:
                wf.alphas.copy_(self.best)
            if wf.hard and self.history.ended is not Ended.INTERRUPTED:
                # Closed gates keep their order, the most closed first: explanations follow it.
                wf.alphas.copy_(torch.where(wf.alphas > 0, HARD, wf.alphas - HARD))
                wf.hard = False
        return self.history


# ---- pieces of a step -------------------------------------------------------------------------


def _take(labels: Tensor | None, index: Tensor) -> Tensor | None:
    return None if labels is None else labels[index]
