"""Checkpoints of a running untraining: one safetensors file, no pickle, written atomically."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wfilter.files.checkpoint import digest_of, fingerprint, write_atomically
from wfilter.untraining.history import Ended, History
from wfilter.untraining.objectives import Recipe
from wfilter.untraining.stored import recipe_from

if TYPE_CHECKING:
    from wfilter.untraining.rounds import Rounds
    from wfilter.untraining.run import Run


@dataclass
class Keeper:
    """Writes and reads the whole state of a run: one safetensors file, no pickle."""

    path: Path
    every: int
    _model: dict[str, Any] = field(default_factory=dict)

    def model(self, run: Run | Rounds) -> dict[str, Any]:
        """What a checkpoint must share with the run: base model, targets and class names."""
        if not self._model:
            names = run.wf.class_names
            self._model = {
                "base": fingerprint(run.wf.base),
                "targets": [target.name for target in run.wf.targets],
                "class_names": None if names is None else list(names),
            }
        return self._model

    def store(self, run: Run | Rounds) -> None:
        """Write the run's state in one step."""
        from safetensors.torch import save

        tensors = {"alphas": run.wf.alphas.detach()}
        if run.best is not None:
            tensors["best"] = run.best
        tensors |= {f"more.{key}": value for key, value in run.more.items()}
        for key, value in run.optimiser.state.get(run.wf.alphas, {}).items():
            tensors[f"optimiser.{key}"] = torch.as_tensor(value)
        tensors = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
        state: dict[str, Any] = {
            "model": self.model(run),
            "step": run.step,
            "total": run.total,
            "epoch": run.epoch,
            "position": run.position,
            "best_loss": run.best_loss,
            "bad": run.bad,
            "history": json.loads(run.history.to_json()),
        }
        state["digest"] = digest_of(state, tensors)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, save(tensors, metadata={"untrain": json.dumps(state)}))

    def restore(self, run: Run | Rounds) -> None:
        """In place: put a run where its checkpoint left it; nothing to do without one."""
        if not self.path.is_file():
            return
        state, tensors = self._read()
        self._refuse_other_run(state, run)
        with torch.no_grad():
            run.wf.alphas.copy_(tensors.pop("alphas"))
        best = tensors.pop("best", None)
        run.best = None if best is None else best.to(run.device)
        run.more = _take(tensors, "more.")
        of_optimiser = _take(tensors, "optimiser.")
        if of_optimiser:
            # torch's optimisers count their steps on the CPU, wherever the parameter is.
            run.optimiser.state[run.wf.alphas] = {
                k: v if k == "step" else v.to(run.device) for k, v in of_optimiser.items()
            }
        run.step, run.epoch, run.position = state["step"], state["epoch"], state["position"]
        run.best_loss, run.bad = state["best_loss"], state["bad"]
        run.history = History.from_dict(state["history"])
        run.history.end(Ended.RUNNING, "")

    def _read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What the file says of the run, and its tensors, refused where a byte was changed."""
        from safetensors import safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                state = json.loads((file.metadata() or {})["untrain"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if state.pop("digest") != digest_of(state, tensors):
                raise ValueError("its digest does not match its content")
        except Exception as error:
            raise ValueError(
                f"{self.path} is not a checkpoint of untrain ({error}). Delete it to start over."
            ) from None
        return state, tensors

    def _refuse_other_run(self, state: dict[str, Any], run: Run | Rounds) -> None:
        history = state["history"]
        if not _is_of(history["recipe"], run.recipe) or history["seed"] != run.seed:
            raise ValueError(
                f"{self.path} belongs to another run: recipe or seed differ. Use the same "
                "settings, or another checkpoint file."
            )
        if state["model"] != self.model(run):
            raise ValueError(
                f"{self.path} belongs to another model: base model, targets or class names differ. "
                "Use the same ones, or another checkpoint file."
            )
        total = state.get("total", run.total)
        if run.length_matters and total != run.total:
            raise ValueError(
                f"{self.path} belongs to a run of {total} steps,\nthis one has {run.total}: the "
                "learning rate would not be that of either. Use the same number of steps, or "
                "another checkpoint file."
            )


def _take(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """In place: move out the tensors whose names begin with ``prefix``, named without it."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}


def _is_of(stored: dict[str, Any], recipe: Recipe) -> bool:
    """Whether stored settings are those of a recipe, also as an earlier version wrote them."""
    try:
        return recipe_from(stored) == recipe
    except (TypeError, ValueError):
        return False
