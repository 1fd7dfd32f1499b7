"""``recipe="auto"``: untraining that looks, goes on where rows lag, and says what it reached.

First gates on the last layers: a `Distill` recipe on a sample of the images, of which the part of
the network before the first gate that moves is run once (`wfilter.untraining.kept`). Images that no
step has seen tell after every round what each row keeps and forgets; rows that lag go on, alone.
Where gates fall short, all rows become feature rows (`wfilter.untraining.instant`) and all gates
open: rows on features that gates have changed do worse than either alone, in sets above all. A
model without a place for feature rows goes on with more layers. The first stage whose rows all meet
the bar is the result, else the best one, and the verdict says what is missing.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from wfilter.core.gates import HARD
from wfilter.core.outputs import logits_of
from wfilter.untraining.history import Ended, History, ProgressBar
from wfilter.untraining.instant import Instant, place_for_rows
from wfilter.untraining.judging import Judgement, judge, verdict
from wfilter.untraining.kept import Kept
from wfilter.untraining.recipes import LINEAR
from wfilter.untraining.rounds import Rounds
from wfilter.untraining.sample import take_sample
from wfilter.untraining.solve import untrain_linear
from wfilter.untraining.stages import WITHOUT_STEPS, Outline, Stage, choose_stages
from wfilter.untraining.state import Keeper


class AutoRun(Rounds):
    """The state of one such round; a checkpoint holds all of it but the kept activations."""

    # ---- before the first step ----------------------------------------------------------------

    def look(self) -> None:
        """Take the sample and choose what to try."""
        classes = self.wf.num_classes
        per_class = self.recipe.images or max(100, 2500 // classes)
        self.sample = take_sample(
            self.wf, self.train, self.val, per_class, self.recipe.held_out, self.seed
        )
        self.history.images = len(self.sample)
        self.head, reason = place_for_rows(self.wf, self.sample)
        known = list(self.history.choices)  # of a run that is resumed
        self.history.choices.clear()
        self.stages = self._plan(reason)
        self._note_sample(torch.bincount(self.sample.rows, minlength=classes))
        self.history.choices += known[len(self.history.choices) :]

    def _plan(self, reason: str) -> list[Stage]:
        if self.recipe.stages:
            return Stage.parse(self.recipe.stages)
        units: dict[str, int] = {}
        for target in self.wf.targets:
            layer = target.name.rpartition(".")[0]
            units[layer] = units.get(layer, 0) + target.units
        element = self.wf.granularity == "element"
        outline = Outline(
            tuple(units.values()), self.wf.num_classes, element, self.head is not None
        )
        stages, why = choose_stages(outline)
        self.history.choices.append(f"{why}; no feature rows: {reason}" if reason else why)
        return stages

    def _note_sample(self, counts: Tensor) -> None:
        self.history.choices.append(self._about_sample(counts))
        bare = (counts == 0).nonzero()[:, 0].tolist()
        if bare:
            self.history.choices.append(
                f"no image of {len(bare)} classes, such as {self._name(bare[0])}: their rows come "
                "from other classes' images alone and are not judged"
            )

    def _about_sample(self, counts: Tensor) -> str:
        held, also = self.sample.held, self.sample.judged & ~self.sample.held
        text = f"{len(self.sample)} images, {int(counts.min())} to {int(counts.max())} of a class"
        if not bool(held.any()):
            return f"{text}: too few to hold any out, so rows are judged on those they learn from"
        where = "of val" if self.val is not None else "that no step sees"
        text = f"{text}; judged on {int(held.sum())} {where}"
        few = len(torch.unique(self.sample.rows[also]))
        return f"{text}; {few} classes have none there: on those they learn from" if few else text

    def _name(self, row: int) -> str:
        return str(row) if self.wf.class_names is None else self.wf.class_names[row]

    # ---- stages, rounds, steps ----------------------------------------------------------------

    def go(self, keeper: Keeper | None, progress: bool | None) -> None:
        """Stages until one meets the bar."""
        began, before = time.perf_counter(), self.history.seconds
        self.look()
        self.wf.feature_rows = None  # rows start over, as gates do
        self.clock = lambda: before + time.perf_counter() - began
        with ProgressBar(None, progress if self.rank == 0 else False) as bar:
            while self.epoch < len(self.stages):
                if self._try(keeper, bar):
                    break
                self.epoch, self.position, self.bad = self.epoch + 1, 0, 0
        self.history.seconds = self.clock()

    def _try(self, keeper: Keeper | None, bar: ProgressBar) -> bool:
        """One stage; whether it is the last."""
        if self.stage.gates == "linear":
            self._solve()
            return True
        if self.stage.gates == "reroute":
            return self._reroute()
        if self.is_over():
            return False
        if self.position > 0 or self.bad > 0:  # resumed
            state = self.optimiser.state.get(self.wf.alphas, {})
            self.begin(fresh=False)
            self.optimiser.state[self.wf.alphas] = state
            self.wf.pin_open(self.pinned)
        else:
            self.begin(fresh=True)
            self.best, self.latest, self.more = None, None, self._champion()
        self.keep()
        judgement = self.learn(keeper, bar)
        self._crown(judgement, f"{self.stage}, {self.step} steps; {self.kept.where}")
        return judgement.is_met(self.recipe)

    # ---- judging ------------------------------------------------------------------------------

    def _champion(self) -> dict[str, Tensor]:
        names = ("champion", "champion_stage", "champion_met")
        return {name: self.more[name] for name in names if name in self.more}

    def _crown(self, judgement: Judgement, what: str) -> bool:
        """Remember the stage if it is the best so far; whether it is."""
        met, score = judgement.is_met(self.recipe), judgement.score(self.recipe)
        said = "meets the bar" if met else "falls short"
        self.history.choices.append(f"{what}: {said}: {judgement.figures()}")
        if not met and score >= self.best_loss:
            return False
        self.best_loss = score
        self.more["champion"] = self.wf.alphas.detach().clone()
        self.more["champion_stage"] = torch.tensor(self.epoch)
        self.more["champion_met"] = torch.tensor(met and not judgement.unjudged)
        self.history.rows = judgement.rows()
        means = "feature rows (all gates open)" if self.stage.gates == "reroute" else "gates"
        self.history.verdict = verdict(judgement, self.recipe, self._name, means, self._advice())
        return True

    def _reroute(self) -> bool:
        """Feature rows for all classes; whether it ends."""
        if self.head is None:
            return False
        if self.instant is None:
            self.instant = Instant.look(self.wf, self.sample, self.head)
        instant, classes = self.instant, self.wf.num_classes
        rows = instant.rows()
        judgement = judge(instant.answer(rows), self.sample, instant.base, classes, self.seed)
        before = self.wf.alphas.detach().clone(), self.wf.hard
        if not instant.attach(rows):
            self.history.choices.append("reroute: the model answers otherwise than its head alone")
        elif self._crown(judgement, f"reroute, {rows.extra_repr()}"):
            return judgement.is_met(self.recipe)
        self.wf.feature_rows = None
        with torch.no_grad():
            self.wf.alphas.copy_(before[0])
        self.wf.hard = before[1]
        return False

    def _advice(self) -> str:
        if not bool(self.sample.held.any()) or len(self.sample) < 20 * self.wf.num_classes:
            return "more images of each class, or more targets"
        if self.head is not None and self.stage.gates != "reroute":
            return "recipe='reroute', more targets (targets='*') or more images"
        return "more targets (targets='*'), or more images"

    def _solve(self) -> None:
        """Very many classes: the rows in one go, judged on the images of the sample."""
        solved = untrain_linear(
            self.wf, self.train, LINEAR, seed=self.seed, device=self.device, progress=False
        )
        self.history.records = solved.records
        self.best, self.latest = None, None
        self._keep_plain()
        self.step = len(solved.records)
        self._crown(self.judgement(), f"linear, {self.step} parts")

    def _keep_plain(self) -> None:
        with torch.no_grad():
            self.kept = Kept(self.wf, self.wf.alphas, self.sample.read, len(self.sample))
            parts = torch.split(torch.arange(len(self.sample)), 50)
            self.base = torch.cat(
                [logits_of(self.wf(self.sample.read(p))).float().cpu() for p in parts]
            )

    def finish(self) -> History:
        """The best stage's alphas, exact where its gates are."""
        wf = self.wf
        if self.history.ended is Ended.INTERRUPTED:
            return self.history
        if "champion" in self.more:
            self.epoch = int(self.more["champion_stage"])
        if "champion" in self.more and self.stage.gates != "reroute":
            self.begin(fresh=False)
            with torch.no_grad():
                wf.alphas.copy_(self.more["champion"])
                if self.stage.gates == "hard":
                    # Closed gates keep their order, the most closed first.
                    wf.alphas.copy_(torch.where(wf.alphas > 0, HARD, wf.alphas - HARD))
            wf.pin_open(self.pinned)
        wf.hard = False
        wf.alphas.requires_grad_(True)
        met = bool(self.more.get("champion_met", False))
        length = 0 if self.stage.gates in WITHOUT_STEPS else self.first_length
        fixed = replace(self.recipe, stages=str(self.stage), steps=length)
        self.history.fixed = fixed.to_dict()
        self.history.end(Ended.MET if met else Ended.NOT_MET, f"{self.step} steps")
        return self.history
