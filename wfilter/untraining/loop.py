"""Learn the alphas: all classes in one round, resumable, in one process or several."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from pathlib import Path

import torch

from wfilter.core.forget import refuse_other_classes
from wfilter.core.forgetting import refuse_inside
from wfilter.core.model import FilteredModel
from wfilter.core.refusals import check_base, refuse_no_logits
from wfilter.data.batches import Batches, InMemory, refuse_no_batches
from wfilter.untraining.auto import AutoRun
from wfilter.untraining.history import Ended, History
from wfilter.untraining.objectives import Auto, Linear, Recipe, Reroute, Stepwise
from wfilter.untraining.recipes import get_recipe
from wfilter.untraining.reroute import untrain_reroute
from wfilter.untraining.run import Run, processes
from wfilter.untraining.solve import untrain_linear
from wfilter.untraining.state import Keeper


def untrain(
    wf: FilteredModel,
    train: Batches | InMemory,
    val: Batches | None = None,
    *,
    recipe: str | Recipe = "auto",
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
        val: Held-out batches: for early stopping where the recipe asks for it; ``"auto"`` judges
            rows on them instead of holding out some of ``train``.
        recipe: ``"auto"`` looks at the model and the images, tries gates, then feature rows, until
            every row meets the bar, or says which do not (``History.verdict``). Or fixed settings:
            ``"distill"``, ``"distill-soft"`` (small models), ``"linear"`` (very many classes;
            solved, no steps), ``"paper"``, ``"paper-vit"``, or a ``Recipe``. ``"reroute"`` learns
            no gates: it draws the features of a forgotten class anew from others, from one pass
            over ``train``.
        epochs: Passes over ``train``; one if neither epochs nor steps is given. For ``"auto"``, as
            for ``steps``, the most that it may take; by default it decides.
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
    settings = get_recipe(recipe)
    _refuse_bad_data(wf, train, val)
    how_long = {"epochs": epochs, "steps": steps, "checkpoint": checkpoint, "resume": resume}
    options = {"val": val is not None, "amp": amp, "compile": compile, **how_long}
    if isinstance(settings, Reroute):
        _refuse_options(settings, options)
        return untrain_reroute(wf, train, settings, seed=seed, device=device, progress=progress)
    if not isinstance(settings, Auto):  # auto removes an earlier run's feature rows itself
        _refuse_feature_rows(wf)
    if isinstance(settings, Linear):
        _refuse_options(settings, options)
        with torch.enable_grad():
            return untrain_linear(wf, train, settings, seed=seed, device=device, progress=progress)
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    run: Run | AutoRun
    if isinstance(settings, Auto):
        if device is not None:
            wf.to(device)
        limit = _limit(train, epochs, steps)
        run = AutoRun(wf, train, val, settings, seed, limit=limit, amp=amp, compile=compile)
    elif isinstance(settings, Stepwise):
        run = Run(wf, train, val, settings, seed)
        run.plan(epochs, steps, device, amp, compile)
    else:
        raise TypeError(
            f"recipe={settings.name!r} has no objective. Use Paper, Distill, Linear or Reroute."
        )
    keeper = None if checkpoint is None else Keeper(Path(checkpoint), checkpoint_every)
    if resume and keeper is not None:
        keeper.restore(run)
    try:
        with torch.enable_grad():
            run.go(keeper, progress)
    except KeyboardInterrupt:
        run.history.end(Ended.INTERRUPTED, f"interrupted at step {run.step}")
        if keeper is not None and run.between_steps:
            keeper.store(run)
    return run.finish()


def _limit(train: object, epochs: int | None, steps: int | None) -> int | None:
    """The most steps that may be taken, if there is such a number."""
    if epochs is None:
        return steps
    if not isinstance(train, Sized):
        raise ValueError("train has no length, so epochs have no number of steps. Pass steps=...")
    return min(epochs * len(train), steps or epochs * len(train))


def _refuse_bad_data(wf: FilteredModel, train: object, val: object) -> None:
    if not isinstance(wf, FilteredModel):
        raise TypeError(
            f"untrain takes a filtered model, not a {type(wf).__name__}. Call "
            "wf = wfilter.apply_weight_filtering(model) first."
        )
    check_base(wf.base, wf.parts)
    refuse_no_logits(wf, "untrain")
    refuse_inside(wf.base, "untrain")
    refuse_no_batches(train, "train")
    if val is not None:
        refuse_no_batches(val, "val")
    refuse_other_classes(wf.class_names, train)
    refuse_other_classes(wf.class_names, val)


def _refuse_feature_rows(wf: FilteredModel) -> None:
    if wf.feature_rows is not None:
        raise ValueError(
            "these filters have feature rows, made for the features as they are: other gates would "
            "change those. Set wf.feature_rows = None first, and fit the rows again afterwards."
        )


def _refuse_options(recipe: Recipe, options: Mapping[str, object]) -> None:
    """A recipe that is solved in one go has no use for what steers steps."""
    asked = [name for name, value in options.items() if value]
    if processes()[1] > 1:
        asked.append("more than one process")
    if asked:
        raise ValueError(
            f"{asked[0]} has no meaning for recipe {recipe.name!r}, which takes no steps. Leave it "
            "out, or use another recipe."
        )
