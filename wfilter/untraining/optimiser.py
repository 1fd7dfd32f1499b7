"""What moves the alphas: optimisers, their learning rate, gradients of several processes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wfilter.core.model import FilteredModel
from wfilter.untraining.objectives import Stepwise


class RowAdam(torch.optim.Optimizer):
    """Adam whose second moment is one number per row: the mean over its units.

    Plain Adam moves every alpha of a row by the same amount whatever its gradient; here the units
    that matter move first, and about half as many gates close. Handles row-sparse gradients: rows
    a batch does not touch cost nothing.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-12,
    ):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """In place: one update of the rows that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        lr, eps = group["lr"], group["eps"]
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        if not state:
            state["mean"] = torch.zeros_like(parameter)
            state["square"] = parameter.new_zeros(len(parameter), 1)
            state["steps"] = parameter.new_zeros(len(parameter), 1)
        gradient = parameter.grad
        assert gradient is not None
        rows: Tensor | slice = slice(None)
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, gradient = gradient.indices()[0], gradient.values()
        # Units that never move (pinned open) have no gradient and must not dilute the mean.
        moving = (gradient != 0).any(0)
        size = gradient[:, moving].square().mean(1, keepdim=True) if moving.any() else 0.0
        steps = state["steps"][rows] + 1
        mean = beta1 * state["mean"][rows] + (1 - beta1) * gradient
        square = beta2 * state["square"][rows] + (1 - beta2) * size
        state["steps"][rows], state["mean"][rows], state["square"][rows] = steps, mean, square
        scale = (square / (1 - beta2**steps)).sqrt() + eps
        parameter[rows] -= lr * (mean / (1 - beta1**steps)) / scale


def make_optimiser(recipe: Stepwise, wf: FilteredModel) -> torch.optim.Optimizer:
    """The recipe's optimiser of the alphas."""
    parameters = wf.trainable_parameters()
    if recipe.optimiser == "row_adam":
        return RowAdam(parameters, recipe.learning_rate)
    if recipe.optimiser == "adam":
        if wf.sparse:  # a row is met now and then: its second moment must not lag behind
            return torch.optim.SparseAdam(parameters, recipe.learning_rate, (0.9, 0.99))
        return torch.optim.Adam(parameters, recipe.learning_rate)
    return torch.optim.SGD(parameters, recipe.learning_rate)


def learning_rate(recipe: Stepwise, step: int, total: int | None) -> float:
    """The learning rate of a step, by the recipe's schedule.

    Example:
        >>> from wfilter.untraining.recipes import DISTILL
        >>> learning_rate(DISTILL, 5, 10)
        0.05
    """
    if recipe.schedule == "cosine" and total is not None:
        return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * step / total))
    return recipe.learning_rate


def average_gradient(alphas: Tensor, world: int, step: int) -> None:
    """In place: the mean of all processes' gradients of the alphas."""
    if world == 1:
        return
    gradient = alphas.grad
    assert gradient is not None
    is_sparse = gradient.is_sparse
    if is_sparse:
        gradient = gradient.to_dense()
    try:
        dist.all_reduce(gradient)
    except RuntimeError as error:
        raise RuntimeError(
            f"another process of this run has stopped, at step {step}. See its own message; start "
            "all of them again with resume=True."
        ) from error
    gradient = gradient / world
    if is_sparse:  # make it sparse again: only rows that some process has met
        rows = (gradient != 0).any(1).nonzero()[:, 0]
        gradient = torch.sparse_coo_tensor(rows[None], gradient[rows], gradient.shape)
    alphas.grad = gradient
