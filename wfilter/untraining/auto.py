"""``recipe="auto"``: untraining that looks, goes on where rows lag, and says what it reached.

Stages are tried from cheap to dear: exact gates on the last layers, soft ones, more layers. A stage
is a `Distill` recipe on a sample of the images, of which the part of the network before the first
gate that moves is run once (`wfilter.untraining.kept`). Images that no step has seen tell after
every round what each row keeps and forgets; rows that lag go on, alone. The first stage whose rows
all meet the bar is the result, else the best one, and the verdict says what is missing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wfilter.core.gates import HARD
from wfilter.core.model import FilteredModel
from wfilter.data.batches import Batches, InMemory
from wfilter.untraining.history import Ended, History, ProgressBar, Record
from wfilter.untraining.judging import Judgement, judge, verdict
from wfilter.untraining.kept import Blend, Kept
from wfilter.untraining.optimiser import average_gradient, learning_rate, make_optimiser
from wfilter.untraining.pairs import Pairs, refuse_one_class
from wfilter.untraining.recipes import LINEAR, Auto, Seen
from wfilter.untraining.run import processes
from wfilter.untraining.sample import take_sample
from wfilter.untraining.solve import untrain_linear
from wfilter.untraining.stages import EXPANSION, Stage, choose_stages
from wfilter.untraining.state import Keeper

PAIRS = 128  # of a step
ROUNDS = 3  # the first for all rows, the others for those that lag


class AutoRun:
    """The state of one such round; a checkpoint holds all of it but the kept activations."""

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
        self.stages = self._plan()
        self._begin(fresh=False)  # so that a checkpoint finds an optimiser to restore

    # ---- before the first step ----------------------------------------------------------------

    def _plan(self) -> list[Stage]:
        layers = dict.fromkeys(target.name.rpartition(".")[0] for target in self.wf.targets)
        element = self.wf.granularity == "element"
        if self.recipe.stages:
            return Stage.parse(self.recipe.stages)
        stages, why = choose_stages(len(layers), self.wf.num_classes, element)
        self.history.choices.append(why)
        self.layers = list(layers)
        return stages

    def look(self) -> None:
        """Take the sample."""
        classes = self.wf.num_classes
        per_class = self.recipe.images or max(100, 2500 // classes)
        self.sample = take_sample(
            self.wf, self.train, self.val, per_class, self.recipe.held_out, self.seed
        )
        counts = torch.bincount(self.sample.rows, minlength=classes)
        if not self.history.choices or len(self.history.choices) < 2:
            self.history.choices.append(self._about_sample(counts))
        if bool((counts == 0).any()):
            bare = (counts == 0).nonzero()[:, 0].tolist()
            self.history.choices.append(
                f"no image of {len(bare)} classes, such as {self._name(bare[0])}: their rows learn "
                "from other classes' images alone"
            )

    def _about_sample(self, counts: Tensor) -> str:
        held = int(self.sample.held.sum())
        text = f"{len(self.sample)} images, {int(counts.min())} to {int(counts.max())} of a class"
        if self.val is not None:
            return f"{text}; judged on the {held} of val"
        if held:
            return f"{text}; judged on {held} that no step sees"
        return f"{text}: too few to hold any out, so rows are judged on the images they learn from"

    def _name(self, row: int) -> str:
        return str(row) if self.wf.class_names is None else self.wf.class_names[row]

    @property
    def stage(self) -> Stage:
        """The one that is tried now."""
        return self.stages[min(self.epoch, len(self.stages) - 1)]

    def _begin(self, fresh: bool) -> None:
        """Set the gates of a stage: layers before its own are pinned open."""
        wf, settings = self.wf, self.stage.recipe()
        names = [target.name for target in wf.targets]
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        moving = set(layers[len(layers) - max(1, math.ceil(self.stage.share * len(layers))) :])
        wf.hard, wf.sparse = settings.gates == "hard" or self.stage.gates == "hard", False
        wf.alphas.requires_grad_(True)
        if fresh:
            assert settings.start is not None
            with torch.no_grad():
                wf.alphas.fill_(settings.start)
            wf.pin_open([n for n in names if n.rpartition(".")[0] not in moving])
        self.settings, self.optimiser = settings, make_optimiser(settings, wf)
        self.pinned = [n for n in names if n.rpartition(".")[0] not in moving]

    def _keep(self) -> None:
        """Run the images once, as far as the stage's first gate."""
        forward: Callable[[Tensor, Tensor], Any] = (
            torch.compile(self.wf) if self.compile else self.wf
        )

        def logits(images: Tensor, forget: Tensor) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
                return forward(images, forget)  # type: ignore[no-any-return]

        self.kept = Kept(logits, self.wf.alphas, self.sample.read, len(self.sample))
        big = self.sample.read(torch.arange(1)).numel() > 3 * 64 * 64
        self.pairs = PAIRS // 4 if big else PAIRS
        self.base = self.kept.fill([self.pairs, self.pairs // EXPANSION])

    # ---- stages, rounds, steps ----------------------------------------------------------------

    def go(self, keeper: Keeper | None, progress: bool | None) -> None:
        """Stages until one meets the bar."""
        began, before = time.perf_counter(), self.history.seconds
        self.look()
        self.clock: Callable[[], float] = lambda: before + time.perf_counter() - began
        with ProgressBar(None, progress if self.rank == 0 else False) as bar:
            while self.epoch < len(self.stages) and not self._is_over():
                if self.stage.gates == "linear":
                    self._solve()
                    return
                resumed = self.position > 0 or self.bad > 0
                if resumed:
                    state = self.optimiser.state.get(self.wf.alphas, {})
                    self._begin(fresh=False)
                    self.optimiser.state[self.wf.alphas] = state
                    self.wf.pin_open(self.pinned)
                else:
                    self._begin(fresh=True)
                    self.best, self.more = None, self._champion()
                self._keep()
                met = self._rounds(keeper, bar)
                self._crown(met)
                if met:
                    return
                self.epoch, self.position, self.bad = self.epoch + 1, 0, 0

    def _is_over(self) -> bool:
        return self.limit is not None and self.step >= self.limit

    @property
    def _length(self) -> int:
        """Steps of the current round: half as many for rows that lag."""
        return self._first_length if self.bad == 0 else self._first_length // 2

    @property
    def _first_length(self) -> int:
        return self.recipe.steps or min(1200, max(100, 12 * self.wf.num_classes))

    def _rounds(self, keeper: Keeper | None, bar: ProgressBar) -> bool:
        """Steps for all rows, then for those that lag; whether all meet the bar in the end."""
        while True:
            while self.position < self._length and not self._is_over():
                record = self._step()
                self.history.seconds = record.seconds = self.clock()
                bar.show(record)
                if self.position in (self._length // 2, self._length) or self._is_over():
                    self._look_at_rows(record)
                self.between_steps = True
                if keeper is not None and self.rank == 0 and self.step % keeper.every == 0:
                    keeper.store(self)
            lagging = self.judgement_of_best().lagging(self.recipe)
            if not lagging or self.bad + 1 >= ROUNDS or self._is_over():
                return not lagging
            self.more["moving"] = torch.zeros(self.wf.num_classes, dtype=torch.bool)
            self.more["moving"][lagging] = True
            self.bad, self.position = self.bad + 1, 0
            self.optimiser = make_optimiser(self.settings, self.wf)

    def _step(self) -> Record:
        # By the place in the stage: a recipe fixed to this stage takes the same steps.
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
        count = self.pairs // EXPANSION
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
        right = (logits.argmax(1).cpu() == rows[pairs.sample]).float()
        whole = ~blended[pairs.sample]
        own, others = pairs.own & whole, ~pairs.own & whole
        closed = float((self.wf.alphas <= 0).float().mean())
        retain, forget = (
            float(right[k].mean()) if bool(k.any()) else math.nan for k in (others, own)
        )
        value = float(loss.detach())
        record = Record(self.step + 1, self.epoch, 0.0, value, retain, forget, closed)
        self.history.records.append(record)
        return record

    # ---- judging ------------------------------------------------------------------------------

    def _judge(self) -> Judgement:
        return judge(self.kept, self.sample, self.base, self.wf.num_classes, self.seed)

    @torch.no_grad()
    def _look_at_rows(self, record: Record) -> None:
        """Judge all rows; keep of each the best alphas that this stage has seen."""
        found = self._judge()
        scores = found.scores(self.recipe)
        record.validation = float(scores.mean())
        if self.best is None:
            self.best, self.more["scores"] = self.wf.alphas.detach().clone(), scores
        better = scores <= self.more["scores"]  # of equals the later one: it had more steps
        self.best[better.to(self.device)] = self.wf.alphas.detach()[better.to(self.device)]
        self.more["scores"] = torch.where(better, scores, self.more["scores"])

    @torch.no_grad()
    def judgement_of_best(self) -> Judgement:
        """In place: the best alphas of each row, judged together."""
        if self.best is not None:
            self.wf.alphas.copy_(self.best)
        return self._judge()

    def _champion(self) -> dict[str, Tensor]:
        names = ("champion", "champion_stage", "champion_met")
        return {name: self.more[name] for name in names if name in self.more}

    def _crown(self, met: bool) -> None:
        """Remember the stage if it is the best so far."""
        found = self._judge()
        score = float(found.scores(self.recipe).mean())
        retain, forget = found.means()
        self.history.choices.append(
            f"{self.stage}: {100 * retain:.1f} of other classes right, {100 * forget:.2f} of the "
            f"forgotten one, after {self.step} steps; {self.kept.where}"
        )
        if met or score < self.best_loss:
            self.best_loss = score
            self.more["champion"] = self.wf.alphas.detach().clone()
            self.more["champion_stage"] = torch.tensor(self.epoch)
            self.more["champion_met"] = torch.tensor(not found.lagging(self.recipe))
            self.history.rows = found.rows()
            self.history.verdict = verdict(found, self.recipe, self._name, self._advice())

    def _advice(self) -> str:
        if not bool(self.sample.held.any()) or len(self.sample) < 20 * self.wf.num_classes:
            return "more images of each class, or more targets"
        if self.wf.granularity == "out" and len(self.stages) > 1:
            return "more targets (targets='*'), or more images"
        return "all stages (recipe='auto'), more targets or more images"

    def _solve(self) -> None:
        """Very many classes: the rows in one go, judged on the images of the sample."""
        solved = untrain_linear(
            self.wf, self.train, LINEAR, seed=self.seed, device=self.device, progress=False
        )
        self.history.records = solved.records
        self.best = None
        self._keep_plain()
        self._crown(True)
        self.step = len(solved.records)

    def _keep_plain(self) -> None:
        with torch.no_grad():
            self.kept = Kept(self.wf, self.wf.alphas, self.sample.read, len(self.sample))
            parts = torch.split(torch.arange(len(self.sample)), 50)
            self.base = torch.cat([self.wf(self.sample.read(p)).float().cpu() for p in parts])

    def finish(self) -> History:
        """The best stage's alphas, exact where its gates are."""
        wf = self.wf
        if self.history.ended is Ended.INTERRUPTED:
            return self.history
        if "champion" in self.more:
            self.epoch = int(self.more["champion_stage"])
            self._begin(fresh=False)
            with torch.no_grad():
                wf.alphas.copy_(self.more["champion"])
                if self.stage.gates == "hard":
                    # Closed gates keep their order, the most closed first.
                    wf.alphas.copy_(torch.where(wf.alphas > 0, HARD, wf.alphas - HARD))
            wf.pin_open(self.pinned)
        wf.hard = False
        met = bool(self.more.get("champion_met", False))
        length = 0 if self.stage.gates == "linear" else self._first_length
        fixed = replace(self.recipe, stages=str(self.stage), steps=length)
        self.history.fixed = fixed.to_dict()
        self.history.end(Ended.MET if met else Ended.NOT_MET, f"{self.step} steps")
        return self.history
