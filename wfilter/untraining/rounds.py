"""Gates learned in rounds: steps for all rows, a look at each, then steps for those that lag."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wfilter.core.model import FilteredModel
from wfilter.data.batches import Batches, InMemory
from wfilter.untraining.history import History, ProgressBar, Record
from wfilter.untraining.instant import Instant, Watch, is_watchable
from wfilter.untraining.judging import Judgement, judge
from wfilter.untraining.kept import Blend, Kept
from wfilter.untraining.objectives import Auto, Seen
from wfilter.untraining.optimiser import average_gradient, learning_rate, make_optimiser
from wfilter.untraining.pairs import Pairs, refuse_one_class
from wfilter.untraining.reroute import PlainHead
from wfilter.untraining.run import processes
from wfilter.untraining.sample import Sample
from wfilter.untraining.stages import EXPANSION, Stage, moving_layers
from wfilter.untraining.state import Keeper

PAIRS = 128  # in each step
LEAST = 200  # steps of a first round; with half as many, rows cost held-out images more
ROUNDS = 3  # the first for all rows, the others for those that lag


class Rounds:
    """Learns and judges the gates of one stage; `AutoRun` decides which stages there are.

    Attributes:
        sample: The images, taken before the first stage.
        head: Where feature rows would stand, if they have a place.
        clock: Seconds since the run began.
    """

    sample: Sample
    head: PlainHead | None
    clock: Callable[[], float]
    length_matters = False

    def __init__(
        self,
        wf: FilteredModel,
        train: Batches | InMemory,
        val: Batches | InMemory | None,
        recipe: Auto,
        seed: int,
        *,
        limit: int | None = None,
        amp: bool = False,
        compile: bool = False,
    ):
        refuse_one_class(wf.num_classes)
        self.wf, self.train, self.val, self.recipe, self.seed = wf, train, val, recipe, seed
        self.limit, self.amp, self.compile = limit, amp, compile
        self.history = History(recipe.to_dict(), seed)
        self.device = wf.alphas.device
        self.rank, self.world = processes()
        self.total: int | None = None
        self.between_steps = True
        # As in a checkpoint: steps in all, the stage, steps of its round, the round.
        self.step = self.epoch = self.position = self.bad = 0
        self.best: Tensor | None = None  # of each row the best alphas of this stage
        self.best_loss = math.inf  # the best stage's score
        self.more: dict[str, Tensor] = {}
        self.stages = [Stage("soft")]  # until there are images to choose by
        self.instant: Instant | None = None
        self.latest: Judgement | None = None  # what the best alphas came to
        self.begin(fresh=False)  # so that a checkpoint finds an optimiser to restore

    # ---- the stage ----------------------------------------------------------------------------

    @property
    def stage(self) -> Stage:
        """The one that is tried now."""
        return self.stages[min(self.epoch, len(self.stages) - 1)]

    def begin(self, fresh: bool) -> None:
        """Set the gates of a stage: layers before its own are pinned open."""
        wf, settings = self.wf, self.stage.recipe()
        names = [target.name for target in wf.targets]
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        moving = set(layers[len(layers) - moving_layers(self.stage.share, len(layers)) :])
        wf.hard, wf.sparse = settings.gates == "hard" or self.stage.gates == "hard", False
        wf.alphas.requires_grad_(True)
        if fresh:
            assert settings.start is not None
            with torch.no_grad():
                wf.alphas.fill_(settings.start)
            wf.pin_open([n for n in names if n.rpartition(".")[0] not in moving])
        self.settings, self.optimiser = settings, make_optimiser(settings, wf)
        self.pinned = [n for n in names if n.rpartition(".")[0] not in moving]

    def keep(self) -> None:
        """Run the images once, as far as the stage's first gate."""
        forward: Callable[[Tensor, Tensor], Any] = (
            torch.compile(self.wf) if self.compile else self.wf
        )

        def logits(images: Tensor, forget: Tensor) -> object:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
                return forward(images, forget)

        self.kept = Kept(logits, self.wf.alphas, self.sample.read, len(self.sample))
        big = self.sample.read(torch.arange(1)).numel() > 3 * 64 * 64
        self.pairs = PAIRS // 4 if big else PAIRS
        self.base = self._fill([self.pairs, self.pairs // EXPANSION])

    def _fill(self, sizes: list[int]) -> Tensor:
        """The base model's logits; where it costs nothing, also what the head sees."""
        first = self.sample.read(torch.arange(min(sizes[0], len(self.sample))))
        plain = not (self.amp or self.compile) and is_watchable(self.wf, first)
        if self.head is None or self.instant is not None or not plain:
            return self.kept.fill(sizes)
        watch, features = Watch(), list[Tensor]()

        def note(count: int) -> None:
            assert watch.latest is not None
            features.append(watch.latest[:count].detach().float().cpu())

        layer = self.wf.base.get_submodule(self.head.name.rpartition(".")[0])
        with watch.on(layer):
            base = self.kept.fill(sizes, note)
        self.instant = Instant(self.wf, self.sample, self.head, torch.cat(features))
        return base

    # ---- rounds and steps ---------------------------------------------------------------------

    def is_over(self) -> bool:
        """Whether the limit of steps is reached."""
        return self.limit is not None and self.step >= self.limit

    @property
    def _length(self) -> int:
        """Steps of the current round: half as many for rows that lag."""
        return self.first_length if self.bad == 0 else self.first_length // 2

    @property
    def first_length(self) -> int:
        """Steps of a stage's first round."""
        return self.recipe.steps or min(1200, max(LEAST, 12 * self.wf.num_classes))

    @property
    def _pairs_of_a_step(self) -> int:
        """A quarter where at most a quarter of the rows lag: all others have left the batch."""
        moving = self.more.get("moving")
        few = moving is not None and 4 * int(moving.sum()) <= len(moving)
        return self.pairs // 4 if few else self.pairs

    def learn(self, keeper: Keeper | None, bar: ProgressBar) -> Judgement:
        """Steps for all rows, then for those that lag; what they come to."""
        while True:
            while self.position < self._length and not self.is_over():
                record = self._step()
                self.history.seconds = record.seconds = self.clock()
                bar.show(record)
                if self.position == self._length or self.is_over():
                    self._look_at_rows(record)
                self.between_steps = True
                if keeper is not None and self.rank == 0 and self.step % keeper.every == 0:
                    keeper.store(self)
            judgement = self.judgement_of_best()
            if judgement.is_met(self.recipe) or self.bad + 1 >= ROUNDS or self.is_over():
                return judgement
            lagging = judgement.lagging(self.recipe) or list(range(self.wf.num_classes))
            if 2 * len(lagging) > self.wf.num_classes and self._has_next:
                return judgement  # more steps help a few rows, not most of them
            self.more["moving"] = torch.zeros(self.wf.num_classes, dtype=torch.bool)
            self.more["moving"][lagging] = True
            self.bad, self.position = self.bad + 1, 0
            self.optimiser = make_optimiser(self.settings, self.wf)

    @property
    def _has_next(self) -> bool:
        """Whether the next stage makes feature rows."""
        return self.epoch + 1 < len(self.stages) and self.stages[self.epoch + 1].gates == "reroute"

    def _step(self) -> Record:
        # Seeded by the step's number within its stage, not within the run: a recipe fixed to this
        # stage alone then takes the same steps.
        place = self.bad * 100_003 + self.position
        generator = torch.Generator().manual_seed(self.seed * 7_919 + place)
        index, blend, blended = self._draw(generator)
        rows = self.sample.rows[index]
        with torch.no_grad():
            nothing = torch.full((len(index),), -1, device=self.device)
            base = self.kept.logits(index, nothing, blend)
        many = self.sample.labels is not None
        if not many:
            rows = torch.where(blended, base.argmax(1).cpu(), rows)
        pairs = self._pairs(rows, generator).share(self.rank, self.world)
        forget = pairs.forget.to(self.device)
        logits = self.kept.logits(index[pairs.sample], forget, blend.part(pairs.sample))
        loss = self.settings.loss(Seen(pairs, logits, base, rows, many))
        if not bool(torch.isfinite(loss)):
            raise FloatingPointError(
                f"the loss is {float(loss.detach())} at step {self.step}. The alphas of the step "
                "before are kept. Look at the images for NaN."
            )
        self._move(loss)
        record = self._record(loss, logits.detach(), pairs, rows, blended)
        self.step, self.position = self.step + 1, self.position + 1
        return record

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, Blend, Tensor]:
        """Images of a step, and how they are blended: half of them of rows that lag, if any do."""
        fit = (~self.sample.held).nonzero()[:, 0] if self.sample.held.any() else None
        fit = torch.arange(len(self.sample)) if fit is None or not len(fit) else fit
        count = self._pairs_of_a_step // EXPANSION
        index = fit[torch.randint(len(fit), (count,), generator=generator)]
        moving = self.more.get("moving")
        if moving is not None:
            own = fit[moving[self.sample.rows[fit]]]
            if len(own):
                chosen = own[torch.randint(len(own), (count // 2,), generator=generator)]
                index = torch.cat([chosen, index[count // 2 :]])
        other = index[torch.randperm(count, generator=generator)]
        blended = (torch.rand(count, generator=generator) < self.settings.blend) & (other != index)
        weight = 0.5 + 0.5 * torch.rand(count, generator=generator)
        return index, Blend(other, torch.where(blended, weight, 1.0)), blended

    def _pairs(self, rows: Tensor, generator: torch.Generator) -> Pairs:
        """Classes and sets for the images; those without a row that lags get such a row."""
        classes = self.wf.num_classes
        pairs = self.settings.make_pairs(rows, classes, generator)
        forget = pairs.forget
        if forget.dtype != torch.bool:
            forget = torch.nn.functional.one_hot(forget, classes).bool()
        moving = self.more.get("moving")
        if moving is not None:
            lagging = moving.nonzero()[:, 0]
            chosen = lagging[torch.randint(len(lagging), (len(forget),), generator=generator)]
            idle = ~(forget & moving).any(1)
            one = torch.nn.functional.one_hot(chosen, classes).bool()
            forget = torch.where(idle[:, None], one, forget)
        own = forget.gather(1, rows[pairs.sample][:, None])[:, 0]
        return Pairs(pairs.sample, forget, own)

    def _move(self, loss: Tensor) -> None:
        """In place: one step of the optimiser; rows that are done stay where they are best."""
        wf = self.wf
        rate = learning_rate(self.settings, self.position, self._length)
        for group in self.optimiser.param_groups:
            group["lr"] = rate if self.bad == 0 else 0.5 * rate
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradient(wf.alphas, self.world, self.step)
        self.between_steps = False
        self.optimiser.step()
        moving = self.more.get("moving")
        if moving is not None and self.best is not None:
            with torch.no_grad():
                done = ~moving.to(self.device)
                wf.alphas[done] = self.best[done]

    def _record(
        self, loss: Tensor, logits: Tensor, pairs: Pairs, rows: Tensor, blended: Tensor
    ) -> Record:
        accuracies = pairs.accuracies(logits, rows, blended)
        closed = float((self.wf.alphas <= 0).float().mean())
        value = float(loss.detach())
        record = Record(self.step + 1, self.epoch, 0.0, value, *accuracies, closed)
        self.history.records.append(record)
        return record

    # ---- judging ------------------------------------------------------------------------------

    def judgement(self) -> Judgement:
        """The alphas of this moment, judged on held-out images."""

        def answer(index: Tensor, forget: Tensor, blend: Blend | None) -> Tensor:
            forget = forget.to(self.device)
            parts = torch.split(torch.arange(len(index)), 1024)
            return torch.cat([self._answers(index, forget, blend, part) for part in parts])

        return judge(answer, self.sample, self.base, self.wf.num_classes, self.seed)

    def _answers(self, index: Tensor, forget: Tensor, blend: Blend | None, part: Tensor) -> Tensor:
        mixed = None if blend is None else blend.part(part)
        return self.kept.logits(index[part], forget[part.to(self.device)], mixed).cpu()

    @torch.no_grad()
    def _look_at_rows(self, record: Record) -> None:
        """Judge all rows; keep of each the best alphas that this stage has seen."""
        judgement = self.judgement()
        scores = judgement.scores(self.recipe)
        record.validation = judgement.score(self.recipe)
        if self.best is None:
            self.best, self.more["scores"] = self.wf.alphas.detach().clone(), scores
        better = scores <= self.more["scores"]  # where equal, the later alphas: they had more steps
        self.best[better.to(self.device)] = self.wf.alphas.detach()[better.to(self.device)]
        self.more["scores"] = torch.where(better, scores, self.more["scores"])
        self.latest = judgement if torch.equal(self.best, self.wf.alphas) else None

    @torch.no_grad()
    def judgement_of_best(self) -> Judgement:
        """In place: the best alphas of each row, judged together."""
        if self.latest is not None:
            return self.latest
        if self.best is not None:
            self.wf.alphas.copy_(self.best)
        return self.judgement()
