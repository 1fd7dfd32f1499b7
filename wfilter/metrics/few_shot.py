"""Relearning from few images: accuracy after some steps on k images of each class."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from wfilter.data.batches import Batches, labelled
from wfilter.data.running import Forward, collect_logits, device_of, evaluating, seeded
from wfilter.metrics.cells import Column
from wfilter.metrics.method import PAIRS, Method
from wfilter.metrics.problem import Problem
from wfilter.metrics.registry import Measured, by_class, metric
from wfilter.metrics.sets import set_accuracies
from wfilter.metrics.training import borrowed, step, unmasked

BATCH = 256  # most images in one step


def few_shot_relearn(
    model: nn.Module,
    forget: int,
    train: tuple[Tensor, Tensor],
    test: Batches,
    *,
    shots: Sequence[int] = (1, 5, 10),
    forward: Forward | None = None,
    parameters: Iterable[nn.Parameter] | None = None,
    steps: int = 20,
    lr: float | Sequence[float] = 1e-4,
    seed: int = 0,
) -> dict[int, tuple[float, float]]:
    """Acc_r and Acc_f after training on k images of each class, for each k in ``shots``.

    The other classes are shown as often as the forgotten one, so that predicting it everywhere
    does not pay. Each step of Adam takes all these images, or 256 of them if there are more;
    everything trained is put back after each k.

    Args:
        model: as in `relearn_time`, also ``forget``, ``test``, ``forward`` and ``parameters``.
        forget: the forgotten class.
        train: images and labels, with at least ``max(shots)`` images of each class.
        test: batches on which both accuracies are measured.
        shots: images of each class.
        forward: how to run the model, if not ``model(images)``.
        parameters: what to train; default all of the model's.
        steps: of the optimiser.
        lr: Adam's. Of several rates, the one best for the attacker counts: the highest mean of
            Acc_r and Acc_f. Too small a rate brings nothing back, too large a one ruins the model.
        seed: of the draw of images.

    Example:
        >>> x, y = torch.eye(2).repeat(5, 1), torch.arange(2).repeat(5)
        >>> blank = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.constant_(blank.weight, 0.5)
        >>> few_shot_relearn(blank, 1, (x, y), [(x, y)], shots=(1,), lr=0.1)
        {1: (1.0, 1.0)}
    """
    run, chosen = forward or model, None if parameters is None else list(parameters)
    rates = [lr] if isinstance(lr, float | int) else list(lr)

    def relearned(k: int, rate: float) -> tuple[float, float]:
        with seeded(seed), borrowed(model, chosen) as trained:
            images, labels = _few(*labelled(train, "train"), k)
            optimiser = torch.optim.Adam(trained, lr=rate)
            for _ in range(steps):
                few = len(labels) <= BATCH
                index = slice(None) if few else torch.randperm(len(labels))[:BATCH]
                step(model, run, optimiser, images[index], labels[index])
            with evaluating(model):
                logits, truth = collect_logits(run, test, device=device_of(model))
            return set_accuracies(logits, truth, forget)

    return {k: max((relearned(k, rate) for rate in rates), key=sum) for k in shots}


def _few(images: Tensor, labels: Tensor, shots: int) -> tuple[Tensor, Tensor]:
    """``shots`` random images of every class."""
    order = torch.randperm(len(labels))
    picked = []
    for label in sorted(set(labels.tolist())):
        places = order[labels[order] == label][:shots]
        if len(places) < shots:
            raise ValueError(f"class {label} has {len(places)} images in train\nfor {shots} shots.")
        picked.append(places)
    return images[torch.cat(picked)], labels[torch.cat(picked)]


def _columns(problem: Problem) -> list[Column]:
    """Columns of two accuracies for each number of shots."""
    columns, group = [], "relearning from few images"
    for k in problem.budget.shots:
        shown = "1 image" if k == 1 else f"{k} images"
        rates = " or ".join(f"{rate:g}" for rate in problem.budget.shot_rates)
        many = f", {BATCH} at a time" if k * problem.num_classes > BATCH else ""
        text = (
            f"after {problem.budget.shot_steps} Adam steps, learning rate {rates}, whichever is "
            f"better for the attacker, on {shown} of each class{many}; where the original's line "
            "falls too, training did damage."
        )
        columns.append(
            Column(f"{k}-shot Acc_f", group, "lower", f"Acc_f {text}", over="forget sample")
        )
        columns.append(
            Column(f"{k}-shot Acc_r", group, "higher", f"Acc_r {text}", over="retain sample")
        )
    return columns


@metric("few_shot", _columns, order=70, needs_train=True)
def measure_few_shot(method: Method, problem: Problem) -> Measured:
    """Acc_f and Acc_r after training the plain model on a few images of each class."""
    budget = problem.budget

    def number(row: int) -> dict[str, float | None]:
        relearned = few_shot_relearn(
            unmasked(method.model(row)),
            row,
            problem.train,
            list(zip(*(torch.split(part, PAIRS) for part in problem.test))),
            shots=budget.shots,
            steps=budget.shot_steps,
            lr=budget.shot_rates,
            seed=problem.seed,
        )
        halves = {
            k: {"Acc_f": forget, "Acc_r": retain} for k, (retain, forget) in relearned.items()
        }
        return {f"{k}-shot {half}": v for k, both in halves.items() for half, v in both.items()}

    return by_class(method, number)
