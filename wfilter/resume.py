"""Checkpoints of a running untraining: one safetensors file, no pickle, written atomically."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from wfilter.checkpoint import write_atomically
from wfilter.history import History, Record

if TYPE_CHECKING:
    from wfilter.untrain import Run


@dataclass
class Keeper:
    """Writes and reads the whole state of a run: one safetensors file, no pickle."""

    path: Path
    every: int

    def store(self, run: Run) -> None:
        """Write the run's state in one step."""
        from safetensors.torch import save

        tensors = {"alphas": run.wf.alphas.detach()}
        if run.best is not None:
            tensors["best"] = run.best
        for key, value in run.optimiser.state.get(run.wf.alphas, {}).items():
            tensors[f"optimiser.{key}"] = torch.as_tensor(value)
        tensors = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
        facts = {
            "step": run.step,
            "epoch": run.epoch,
            "position": run.position,
            "best_loss": run.best_loss,
            "bad": run.bad,
            "history": json.loads(run.history.to_json()),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, save(tensors, metadata={"untrain": json.dumps(facts)}))

    def restore(self, run: Run) -> None:
        """In place: put a run where its checkpoint left it; nothing to do without one."""
        from safetensors import safe_open

        if not self.path.is_file():
            return
        try:
            with safe_open(self.path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})["untrain"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:
            raise ValueError(
                f"{self.path} is not a checkpoint of untrain ({error}). Delete it to start over."
            ) from None
        history = facts["history"]
        if history["recipe"] != run.recipe.to_dict() or history["seed"] != run.seed:
            raise ValueError(
                f"{self.path} belongs to another run: recipe or seed differ. Use the same "
                "settings, or another checkpoint file."
            )
        if tensors["alphas"].shape != run.wf.alphas.shape:
            raise ValueError(
                f"{self.path} belongs to another model: its alphas have another shape."
            )
        with torch.no_grad():
            run.wf.alphas.copy_(tensors.pop("alphas"))
        best = tensors.pop("best", None)
        run.best = None if best is None else best.to(run.device)
        state = {name.removeprefix("optimiser."): value for name, value in tensors.items()}
        if state:
            on_device = {k: v if k == "step" else v.to(run.device) for k, v in state.items()}
            run.optimiser.state[run.wf.alphas] = on_device
        run.step, run.epoch, run.position = facts["step"], facts["epoch"], facts["position"]
        run.best_loss, run.bad = facts["best_loss"], facts["bad"]
        records = [Record(**record) for record in history["records"]]
        run.history = History(history["recipe"], history["seed"], records, "", history["seconds"])
