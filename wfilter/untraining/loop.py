"""Learn the alphas: all classes in one round, resumable, in one process or several."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sized
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wfilter import data as wfilter_data
from wfilter.core.gates import HARD
from wfilter.core.model import FilteredModel
from wfilter.data.batches import (
    Batches,
    InMemory,
    gathered,
    read_batches,
    refuse_no_batches,
    split_batch,
)
from wfilter.metrics.features import penultimate_features
from wfilter.untraining import losses
from wfilter.untraining import solve as linear
from wfilter.untraining.history import History, ProgressBar, Record
from wfilter.untraining.optimiser import make_optimiser
from wfilter.untraining.pairs import Pairs, blend, make_pairs, refuse_one_class
from wfilter.untraining.recipes import Recipe, get_recipe
from wfilter.untraining.state import Keeper


def untrain(
    wf: FilteredModel,
    train: Batches | InMemory,
    val: Batches | None = None,
    *,
    recipe: str | Recipe = "distill",
    epochs: int | None = None,
    steps: int | None = None,
    device: str | torch.device | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 50,
    resume: bool = False,
    seed: int = 0,
    amp: bool = False,
    compile: bool = False,
    progress: bool | None = None,
) -> History:
    """In place: learn all rows of the alphas in one round; the base model is never touched.

    Args:
        wf: The filtered model.
        train: Batches ``(images, labels)``, dicts or images alone (the base model's own answer then
            chooses the row), iterable again for each epoch; or an ``InMemory`` set.
        val: Held-out batches for early stopping, where the recipe asks for it.
        recipe: ``"distill"``, ``"distill-soft"`` (small models), ``"paper"``, ``"paper-vit"`` or a
            ``Recipe``; with very many classes and few images of each, ``"linear"``, which is solved
            and takes no steps.
        epochs: Passes over ``train``; one if neither epochs nor steps is given.
        steps: Steps in all, whatever the epochs.
        device: Where to run; where the model is by default.
        checkpoint: A file to write every ``checkpoint_every`` steps, and on Ctrl-C.
        checkpoint_every: Steps between two checkpoints.
        resume: Continue from ``checkpoint`` if it exists, to the same alphas bit for bit, if
            ``train`` gives the same batches: loaders that shuffle by torch's global random state
            do, those with a ``generator`` of their own do not.
        seed: Decides batches, rows and sets; one seed gives one result on one CPU.
        amp: Run forwards in bfloat16 by autocast.
        compile: Run forwards through ``torch.compile``.
        progress: Show a progress bar; by default only on a terminal.

    Returns:
        The history. Alphas are those of the best validation if the recipe stops early, else the
        last; with hard gates they end at exactly open or exactly closed.

    Raises:
        FloatingPointError: The loss was not finite; the alphas are those of the last good step.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="weight")
        >>> data = InMemory(torch.randn(32, 4), torch.arange(32) % 3, batch_size=16)
        >>> len(untrain(wf, data, steps=3).records)
        3
    """
    run = Run(wf, train, val, get_recipe(recipe), seed)
    if run.recipe.is_solved:
        given = {"epochs": epochs, "steps": steps, "checkpoint": checkpoint, "resume": resume}
        run.refuse_options({"val": val is not None, "amp": amp, "compile": compile, **given})
        with torch.enable_grad():
            return run.solve(device, progress)
    run.plan(epochs, steps, device, amp, compile)
    keeper = None if checkpoint is None else Keeper(Path(checkpoint), checkpoint_every)
    if resume and keeper is not None:
        keeper.restore(run)
    try:
        with torch.enable_grad():
            run.go(keeper, progress)
    except KeyboardInterrupt:
        run.history.stopped = f"interrupted at step {run.step}"
        if keeper is not None and run.between_steps:
            keeper.store(run)
    return run.finish()


class Run:
    """The state of one round of untraining."""

    def __init__(
        self,
        wf: FilteredModel,
        train: Batches | InMemory,
        val: Batches | None,
        recipe: Recipe,
        seed: int,
    ):
        wf.refuse_inside_forgetting("untrain")
        refuse_no_batches(train, "train")
        if val is not None:
            refuse_no_batches(val, "val")
        wf.refuse_other_classes(train)
        wf.refuse_other_classes(val)
        self.wf, self.train, self.val, self.recipe, self.seed = wf, train, val, recipe, seed
        self.history = History(recipe.to_dict(), seed)
        self.step = self.epoch = self.position = 0
        self.between_steps = True  # False while alphas and optimiser are not those of one step
        self.best: Tensor | None = None
        self.best_loss, self.bad = math.inf, 0
        self.base_logits: dict[int, Tensor] = {}
        started = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)

    def plan(
        self,
        epochs: int | None,
        steps: int | None,
        device: str | torch.device | None,
        amp: bool,
        compile: bool,
    ) -> None:
        """Set up what does not change during the run."""
        for name, value in (("epochs", epochs), ("steps", steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self._refuse_deep(compile)
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
        self._prepare_alphas()
        self.forward = torch.compile(self.wf) if compile else self.wf
        self.shares = not compile
        self.optimiser = make_optimiser(self.recipe, self.wf)

    def _refuse_deep(self, compile: bool) -> None:
        compiled = compile or self.wf._compiled is not None
        if self.recipe.lambda_deep and (self.world > 1 or compiled):
            raise ValueError(
                f"lambda_deep={self.recipe.lambda_deep} needs the features of all images of a step "
                "in one eager process. Run one process without compile, or use lambda_deep=0."
            )

    def _prepare_alphas(self) -> None:
        """Pin shallow targets open, and start fresh hard gates close to their threshold."""
        wf, recipe = self.wf, self.recipe
        wf.hard = recipe.gates == "hard"
        # The term on features takes one row for a whole step, and its gradient is dense.
        wf.sparse = recipe.set_share == 0 and wf.num_classes > 256 and not recipe.lambda_deep
        wf.alphas.requires_grad_(True)
        names = [target.name for target in wf.targets]
        count = max(1, math.ceil(recipe.depth * len(names)))
        if recipe.depth < 1:
            wf.pin_open(names[: len(names) - count])
        if recipe.start is not None:
            with torch.no_grad():
                for name in names[len(names) - count :]:
                    alpha = wf.alpha[name]
                    if bool((alpha == alpha.flatten()[0]).all()):
                        alpha.fill_(recipe.start)

    # ---- without steps ------------------------------------------------------------------------

    def refuse_options(self, options: Mapping[str, object]) -> None:
        """The linear recipe is solved in one go: what steers steps has no meaning for it."""
        given = [name for name, value in options.items() if value]
        if given or self.world > 1:
            raise ValueError(
                f"{given[0] if given else 'more than one process'} has no meaning for recipe "
                f"{self.recipe.name!r}, which takes no steps. Leave it out, or use another recipe."
            )
        if self.wf.granularity == "element":
            raise ValueError(
                f"recipe {self.recipe.name!r} keeps a number for each image and gate, too many "
                "with granularity='element'. Use 'out', or another recipe."
            )
        refuse_one_class(self.wf.num_classes)

    def solve(self, device: str | torch.device | None, progress: bool | None) -> History:
        """The linear recipe: every row from one look at the images."""
        wf, began = self.wf, time.perf_counter()
        if device is not None:
            wf.to(device)
        self.device, self.amp = wf.alphas.device, False
        self._prepare_alphas()
        wf._refuse_recomputation()
        generator = torch.Generator().manual_seed(self.seed)
        pick, count, labels, augment = self._all_images()

        def read(index: Tensor) -> Tensor:
            images = pick(index)
            return (images if augment is None else augment(images, generator)).to(self.device)

        parts = torch.split(torch.arange(count), linear.BATCH)
        base = torch.cat([self._base_logits(read(part), None).cpu() for part in parts])
        rows = self._rows(labels, base, generator)
        with ProgressBar(linear.parts_of(wf, count, self.recipe), progress) as bar:
            for record in linear.solve(wf, read, base, rows, self.recipe, self.seed):
                self.history.seconds = record.seconds = time.perf_counter() - began
                self.history.records.append(record)
                bar.show(record)
        self.history.stopped = "solved"
        return self.history

    def _all_images(self) -> tuple[linear.Read, int, Tensor | None, wfilter_data.Augment | None]:
        """How to get at images by their index, how many there are, and their labels."""
        data = self.train
        if isinstance(data, wfilter_data.Batches):  # the images themselves, in their own order
            whole = data.dataset
            return lambda index: whole.batch(index)[0], len(whole), whole.labels, data.augment
        if not isinstance(data, InMemory):
            torch.manual_seed(self.seed * 1_000_003)  # loaders shuffle by the global RNG
            data = gathered(data)
        if not len(data.images):
            raise ValueError("train has no batches. Check the data and drop_last.")
        return data.images.__getitem__, len(data.images), data.labels, data.augment

    # ---- the loop -----------------------------------------------------------------------------

    def go(self, keeper: Keeper | None, progress: bool | None) -> None:
        """Steps until the plan ends, the validation stops improving, or something breaks."""
        if self.total is not None and self.step >= self.total:  # resumed after its last step
            self.history.stopped = f"{self.step} steps"
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
                        self.history.stopped = (
                            f"no improvement in {self.recipe.patience} validations"
                        )
                        return
                    if keeper is not None and self.rank == 0 and self.step % keeper.every == 0:
                        keeper.store(self)
                    if self.total is not None and self.step >= self.total:
                        self.history.stopped = f"{self.step} steps"
                        return
                if not seen and self.position == 0:
                    raise ValueError("train has no batches. Check the data and drop_last.")
                self.epoch, self.position = self.epoch + 1, 0
        self.history.stopped = f"{self.epoch} epochs"

    def _epoch(self) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
        """Batches of the epoch from the current position: images, labels, indices."""
        data = self.train
        if isinstance(data, InMemory):
            for number, index in enumerate(data.order(self.seed, self.epoch)):
                if number >= self.position:
                    yield data.images[index], _take(data.labels, index), index
            return
        torch.manual_seed(self.seed * 1_000_003 + self.epoch)  # loaders shuffle by the global RNG
        if isinstance(data, wfilter_data.Batches):  # these by their own seed and epoch
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
        if self.recipe.blend and (labels is None or labels.ndim == 1):
            rows = torch.where(is_blended, base.argmax(1).cpu(), rows)
        pairs = make_pairs(self.recipe, rows, self.wf.num_classes, generator)
        pairs = pairs.share(self.rank, self.world)
        before = self.wf.alphas.detach().clone() if not self.wf.sparse else None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            logits, features = self._logits_and_features(images, pairs)
        loss = _objective(self.recipe, self.wf, logits.float(), base, pairs, rows, labels, features)
        self._refuse_bad_loss(loss)
        self._set_learning_rate()
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._average_gradients()
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

    @property
    def _changes(self) -> bool:
        """Whether a step sees other images than the data have."""
        augments = isinstance(self.train, InMemory) and self.train.augment is not None
        return augments or bool(self.recipe.blend)

    def _changed(self, images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images on the device, augmented and blended, and which of them are blended."""
        if isinstance(self.train, InMemory) and self.train.augment is not None:
            images = self.train.augment(images, generator)
        images = images.to(self.device)
        if self.recipe.blend:
            return blend(images, self.recipe.blend, generator)
        return images, torch.zeros(len(images), dtype=torch.bool)

    def _logits_and_features(self, images: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor | None]:
        """The logits, and for a recipe with a term on them the features that the head sees."""
        if not self.recipe.lambda_deep:
            return self._logits(images, pairs), None
        logits: list[Tensor] = []

        def forward(x: Tensor) -> Tensor:
            logits.append(self.wf(x, int(pairs.forget[0])))  # exact without vmap, for any target
            return logits[-1]

        features = penultimate_features(self.wf.base, images, forward=forward)
        enough = len(images) > features.shape[1]
        if not enough and self.position == 0:  # later ones may be what is left of an epoch
            raise ValueError(
                f"lambda_deep={self.recipe.lambda_deep} tells images apart by "
                f"{features.shape[1]} features, which is always possible in a batch of "
                f"{len(images)}. Use larger batches, four times as many images as features, or "
                "lambda_deep=0."
            )
        return logits[0], features if enough else None

    def _logits(self, images: Tensor, pairs: Pairs) -> Tensor:
        forget = pairs.forget.to(self.device)
        if self.shares and pairs.replicas > 1:
            return self.wf.replicated(images, forget)  # type: ignore[no-any-return]
        return self.forward(images[pairs.sample.to(self.device)], forget)  # type: ignore[no-any-return]

    def _base_logits(self, images: Tensor, index: Tensor | None) -> Tensor:
        """The base model's logits; kept per sample where the data stay the same.

        None are made for the paper's objective, which has no use for them.
        """
        if self.recipe.objective == "paper":
            return images.new_empty(0)
        if index is not None and all(int(i) in self.base_logits for i in index):
            return torch.stack([self.base_logits[int(i)] for i in index]).to(self.device)
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            logits = self.wf(images).float()
        if index is not None:
            self.base_logits.update(zip(index.tolist(), logits.cpu()))
        return logits  # type: ignore[no-any-return]

    def _rows(self, labels: Tensor | None, base: Tensor, generator: torch.Generator) -> Tensor:
        """The class whose row a sample uses to forget itself, ``(batch,)`` on the CPU."""
        classes = self.wf.num_classes
        if labels is None:
            if self.recipe.objective == "paper":
                raise ValueError("the paper recipe needs labels: give batches (images, labels).")
            return base.argmax(1).cpu()
        if labels.ndim == 2:
            if self.recipe.lambda_deep or self.recipe.is_solved:
                name = f"lambda_deep={self.recipe.lambda_deep}"
                if self.recipe.is_solved:
                    name = f"recipe {self.recipe.name!r}"
                raise ValueError(
                    f"{name} is for one answer per image, but these images have several labels "
                    "each. Use a distill recipe with lambda_deep=0."
                )
            chosen = torch.rand(labels.shape, generator=generator) * (labels.cpu() > 0)
            if bool((chosen.amax(1) == 0).any()):
                raise ValueError(
                    "a multi-label sample has no label at all; leave such samples out."
                )
            return chosen.argmax(1)
        labels = labels.cpu().long()
        if bool(((labels < 0) | (labels >= classes)).any()):
            bad = int(labels[(labels < 0) | (labels >= classes)][0])
            raise ValueError(
                f"label {bad} is outside 0..{classes - 1}: these filters were made for {classes} "
                "classes."
            )
        return labels

    def _average_gradients(self) -> None:
        if self.world > 1:
            gradient = self.wf.alphas.grad
            assert gradient is not None
            is_sparse = gradient.is_sparse
            if is_sparse:
                gradient = gradient.to_dense()
            try:
                dist.all_reduce(gradient)
            except RuntimeError as error:
                raise RuntimeError(
                    f"another process of this run has stopped, at step {self.step}. See its own "
                    "message; start all of them again with resume=True."
                ) from error
            gradient = gradient / self.world
            if is_sparse:  # again only the rows that some process has met
                rows = (gradient != 0).any(1).nonzero()[:, 0]
                gradient = torch.sparse_coo_tensor(rows[None], gradient[rows], gradient.shape)
            self.wf.alphas.grad = gradient

    def _set_learning_rate(self) -> None:
        rate = self.recipe.learning_rate
        if self.recipe.schedule == "cosine" and self.total is not None:
            rate *= 0.5 * (1 + math.cos(math.pi * self.step / self.total))
        for group in self.optimiser.param_groups:
            group["lr"] = rate

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
        """Accuracies of the step; blended images have no right answer and do not count."""
        right = (logits.argmax(1).cpu() == rows[pairs.sample]).float()
        whole = ~is_blended[pairs.sample]
        own, others = pairs.own & whole, ~pairs.own & whole
        record = Record(
            self.step + 1,
            self.epoch,
            0.0,
            float(loss.detach()),
            float(right[others].mean()) if bool(others.any()) else math.nan,
            float(right[own].mean()) if bool(own.any()) else math.nan,
            math.nan if self.wf.sparse else float((self.wf.alphas <= 0).float().mean()),
        )
        self.history.records.append(record)
        return record

    # ---- validation ---------------------------------------------------------------------------

    def _validate(self, record: Record) -> bool:
        """Now and then the validation loss; True when it has stopped improving."""
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
            pairs = make_pairs(self.recipe, rows, self.wf.num_classes, generator)
            sample, forget = pairs.sample.to(self.device), pairs.forget.to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
                logits = self.wf(images[sample], forget).float()
            values.append(
                float(_objective(self.recipe, self.wf, logits, base, pairs, rows, labels))
            )
        if not values:
            raise ValueError("val has no batches. Check the data.")
        return sum(values) / len(values)

    def finish(self) -> History:
        """Best alphas back, hard gates made exact."""
        wf = self.wf
        with torch.no_grad():
            if self.best is not None:
                wf.alphas.copy_(self.best)
            done = not self.history.stopped.startswith("interrupted")
            if wf.hard and done:
                # Closed gates keep their order, the most closed first: explanations follow it.
                wf.alphas.copy_(torch.where(wf.alphas > 0, HARD, wf.alphas - HARD))
                wf.hard = False
        return self.history


# ---- pieces of a step -------------------------------------------------------------------------


def _take(labels: Tensor | None, index: Tensor) -> Tensor | None:
    return None if labels is None else labels[index]


def _objective(
    recipe: Recipe,
    wf: FilteredModel,
    logits: Tensor,
    base: Tensor,
    pairs: Pairs,
    rows: Tensor,
    labels: Tensor | None,
    features: Tensor | None = None,
) -> Tensor:
    """The recipe's loss over the pairs of a step."""
    sample, forget = pairs.sample.to(logits.device), pairs.forget.to(logits.device)
    many = labels is not None and labels.ndim == 2
    loss = logits.new_zeros(())
    if recipe.objective == "distill":
        match = losses.binary_distillation if many else losses.distillation
        loss = recipe.lambda_retain * match(logits, base[sample], forget)
        if recipe.lambda_forget and not many:
            loss = loss + recipe.lambda_forget * losses.margin(logits, forget, recipe.margin)
    else:
        truth = rows.to(logits.device)[sample]
        own = pairs.own.to(logits.device)
        if bool((~own).any()):
            retain = F.cross_entropy(logits[~own], truth[~own])
            loss = loss + recipe.lambda_retain * retain
        if bool(own.any()):
            away = losses.reciprocal(logits[own], truth[own], recipe.epsilon)
            loss = loss + recipe.lambda_forget * away
    if features is not None:
        own = pairs.own.to(logits.device)
        others = losses.look_alikes(base[sample], forget, own)
        loss = loss + recipe.lambda_deep * losses.ridge_probe(features.float(), own, others)
    if recipe.lambda_alpha:
        rows_used = torch.unique(forget) if wf.sparse else slice(None)
        alphas = [alpha[rows_used] for alpha in wf.alpha.values()]
        closed = losses.closedness(alphas, recipe.regulariser == "layer")
        loss = loss + recipe.lambda_alpha * closed
    return loss
