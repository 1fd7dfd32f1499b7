"""How fast a forgotten class comes back: relearn time, and relearning from a few images."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from wfilter.data.checks import unpack
from wfilter.data.running import (
    Batches,
    Forward,
    collect_logits,
    device_of,
    evaluating,
    seeded,
    select_class,
)
from wfilter.metrics.accuracy import accuracy, set_accuracies

CAP = 100
"""The paper's largest number of epochs; a class not relearned by then counts as a failure."""


@dataclass(frozen=True)
class Relearned:
    """Epochs until the class's original accuracy returned (None: never) and the way there.

    Example:
        >>> Relearned(None, (0.0, 0.2), target=0.9).failed
        True
    """

    epochs: int | None
    accuracies: tuple[float, ...]
    target: float

    @property
    def failed(self) -> bool:
        """Whether the cap came before the target."""
        return self.epochs is None


@dataclass(frozen=True)
class RelearnSummary:
    """Mean epochs over classes, failures counted at the cap, printed as in the paper.

    Example:
        >>> print(RelearnSummary(27.6, failures=1, classes=10))
        27.6 (1)
        >>> print(RelearnSummary(100.0, failures=10, classes=10))
        > 100 (10)
    """

    mean: float
    failures: int
    classes: int

    def __str__(self) -> str:
        text = f"> {self.mean:.0f}" if self.failures == self.classes else f"{self.mean:.1f}"
        return f"{text} ({self.failures})"


def relearn_summary(results: Iterable[Relearned], cap: int = CAP) -> RelearnSummary:
    """The mean over classes, "mean (failures)"; a failure counts as ``cap`` epochs.

    Example:
        >>> done, never = Relearned(20, (), target=0.9), Relearned(None, (), target=0.9)
        >>> print(relearn_summary([done, never]))
        60.0 (1)
    """
    epochs = [result.epochs for result in results]
    if not epochs:
        raise ValueError("no results to summarise: pass one Relearned for each class.")
    mean = sum(cap if epoch is None else epoch for epoch in epochs) / len(epochs)
    return RelearnSummary(mean, sum(epoch is None for epoch in epochs), len(epochs))


def relearn_time(
    model: nn.Module,
    forget: int,
    train: Any,
    test: Batches,
    *,
    target: float,
    forward: Forward | None = None,
    parameters: Iterable[nn.Parameter] | None = None,
    samples: int = 500,
    max_epochs: int = CAP,
    batch_size: int = 64,
    lr: float = 1e-4,
    seed: int = 0,
) -> Relearned:
    """Epochs of ``samples`` random training images until class ``forget`` is back at ``target``.

    Source: Tarun et al., arXiv 2111.08947, as the paper uses it. The paper does not say what is
    trained, nor with which optimiser: Adam here, on the parameters given. Everything that was
    trained is put back afterwards.

    Args:
        model: a baked or unlearned model, or a filtered one with ``forward`` and ``parameters``.
        forget: the forgotten class.
        train: training images of all classes: a dataset, a DataLoader (its dataset is used), or
            a pair of tensors (images, labels).
        test: batches on which the class's accuracy is measured.
        target: the original model's accuracy on the class.
        forward: how to run the model, if not ``model(images)``.
        parameters: what to train; default all of the model's.
        samples: drawn anew for each epoch.
        max_epochs: where to give up.
        batch_size: of the optimiser's steps.
        lr: Adam's. 1e-3 ruins even a ResNet-18 that forgot nothing; alphas need about 0.1.
        seed: of the draws.

    Example:
        >>> x, y = torch.eye(2).repeat(20, 1), torch.arange(2).repeat(20)
        >>> blank = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.constant_(blank.weight, 0.5)
        >>> relearn_time(blank, 1, (x, y), [(x, y)], target=1.0, samples=40, lr=0.1).epochs
        1
    """
    run, dataset = forward or model, _dataset(train)
    shown = select_class(test, forget)
    known = [(shown, torch.full((len(shown),), forget))]
    with seeded(seed), _borrowed(model, parameters) as trained:
        optimizer = torch.optim.Adam(trained, lr=lr)
        path = [_class_accuracy(model, run, known)]
        while path[-1] < target and len(path) <= max_epochs:
            picked = torch.randperm(len(dataset))[:samples].tolist()
            for batch in DataLoader(dataset, batch_size, sampler=picked):
                _step(model, run, optimizer, *unpack(batch))
            path.append(_class_accuracy(model, run, known))
    return Relearned(len(path) - 1 if path[-1] >= target else None, tuple(path), target)


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
    lr: float = 1e-4,
    seed: int = 0,
) -> dict[int, tuple[float, float]]:
    """Acc_r and Acc_f after training on k images of each class, for each k in ``shots``.

    The other classes are shown as often as the forgotten one, so that predicting it everywhere
    does not pay. Full-batch Adam; everything trained is put back after each k.

    Args:
        model: as in `relearn_time`, also ``forget``, ``test``, ``forward`` and ``parameters``.
        forget: the forgotten class.
        train: images and labels, with at least ``max(shots)`` images of each class.
        test: batches on which both accuracies are measured.
        shots: images of each class.
        forward: how to run the model, if not ``model(images)``.
        parameters: what to train; default all of the model's.
        steps: of the optimiser.
        lr: Adam's.
        seed: of the draw.

    Example:
        >>> x, y = torch.eye(2).repeat(5, 1), torch.arange(2).repeat(5)
        >>> blank = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.constant_(blank.weight, 0.5)
        >>> few_shot_relearn(blank, 1, (x, y), [(x, y)], shots=(1,), lr=0.1)
        {1: (1.0, 1.0)}
    """
    run, chosen = forward or model, None if parameters is None else list(parameters)
    results = {}
    for k in shots:
        with seeded(seed), _borrowed(model, chosen) as trained:
            images, labels = _few(*unpack(train), k)
            optimizer = torch.optim.Adam(trained, lr=lr)
            for _ in range(steps):
                _step(model, run, optimizer, images, labels)
            with evaluating(model):
                logits, truth = collect_logits(run, test, device=device_of(model))
            results[k] = set_accuracies(logits, truth, forget)
    return results


def _dataset(train: Any) -> Any:
    """Something with a length and items, so that samples can be drawn at random."""
    if isinstance(train, (tuple, list)) and len(train) == 2 and isinstance(train[0], Tensor):
        return TensorDataset(*unpack(train))
    dataset = getattr(train, "dataset", train)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"train is a {type(train).__name__} without length or items; expected a dataset, a "
            "DataLoader over one, or a pair of tensors (images, labels)."
        )
    return dataset


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


def _class_accuracy(model: nn.Module, run: Forward, known: Batches) -> float:
    with evaluating(model):
        return accuracy(*collect_logits(run, known, device=device_of(model)))


def _step(
    model: nn.Module, run: Forward, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> None:
    """One step of cross-entropy in the mode the model is in."""
    device = device_of(model)
    loss = nn.functional.cross_entropy(run(images.to(device)), labels.to(device))
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


@contextmanager
def _borrowed(
    model: nn.Module, parameters: Iterable[nn.Parameter] | None
) -> Iterator[list[nn.Parameter]]:
    """The parameters to train; every tensor, mode and flag of the model is put back afterwards."""
    trained = list(model.parameters() if parameters is None else parameters)
    if not trained:
        raise ValueError("parameters is empty: there is nothing to train.")
    chosen = set(trained)
    everything = {*model.parameters(), *model.buffers(), *chosen}
    values = {tensor: tensor.detach().clone() for tensor in everything}
    flags = {tensor: tensor.requires_grad for tensor in everything}
    with evaluating(model), torch.enable_grad():
        try:
            model.train()
            for tensor in everything:
                if tensor.is_floating_point():
                    tensor.requires_grad_(tensor in chosen)
            yield trained
        finally:
            with torch.no_grad():
                for tensor in everything:
                    tensor.requires_grad_(flags[tensor]).copy_(values[tensor])
            for parameter in trained:
                parameter.grad = None
