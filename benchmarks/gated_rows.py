"""Feature rows under trained gates: would a detector tell which images to draw anew?

    python benchmarks/gated_rows.py --references '~/wfilter-references' --classes 3 1 8

Under the gates of a class the network never answers with it, so nothing but a detector on the gated
features can tell which images to draw anew. Here it is the linear one of `wfilter.core.folding`
(least variance within classes, 1 on the class and 0 on all others), fitted for each row on features
under that row's gates, like the means and covariances of the draws. Its threshold is where a share
``--caught`` of the class's fitting images lies above it. A draw comes from the class that the gated
network answers with, so that images drawn by mistake keep their answer and lose the rest.

Gates come from ``untrain`` (``--stages`` of recipe "auto"). Compared, by the attacks of
``attacks.py``: gates alone, gates and rows, rows alone. ``redrawn_others``: share of the other
classes' test images that lose their features; ``caught``: of the class's. ``pair_caught`` and
``pair_redrawn_others``: the same when a second class (the next one) is forgotten too, with the
detectors of both rows, on features under the product of their gates. ``--split`` judges on training
images that nothing was fitted on. Lines go to ``benchmarks/results/gated_rows.jsonl``.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attacks
import wfilter
from common import RESULTS, append_line, origin
from feature_rows import load
from wfilter import data, metrics, zoo
from wfilter.core.feature_rows import FeatureRows
from wfilter.core.folding import detectors
from wfilter.untraining.fitting import FeatureStatistics, fit_rows
from wfilter.untraining.recipes import AUTO

MODEL, DATA = "wfilter:cnn_small-cifar", "cifar10"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--references", type=lambda name: Path(name).expanduser(), required=True)
    parser.add_argument("--classes", type=int, nargs="+", default=[3, 1, 8])
    parser.add_argument("--images", type=int, default=10_000, help="to fit rows and probes")
    parser.add_argument("--stages", default="soft 0.5")
    parser.add_argument("--caught", type=float, nargs="+", default=[0.95])
    parser.add_argument("--split", action="store_true", help="hold out training images instead")
    parser.add_argument("--out", type=Path, default=RESULTS / "gated_rows.jsonl")
    args = parser.parse_args()
    torch.manual_seed(0)
    weights = args.references / f"{MODEL.partition(':')[2]}-s0.safetensors"
    model = zoo.build(MODEL, num_classes=10, weights=weights)
    train, test = images(args)
    began = time.process_time()
    wf, facts = gated(model, load(MODEL, DATA, "train", args.images), args.stages)
    facts["untrain_cpu_seconds"] = round(time.process_time() - began, 1)
    facts |= {"images": len(train), "judged_on": "training images" if args.split else "test"}
    for forget in args.classes:
        for line in measure(wf, forget, train, test, args):
            line = {"benchmark": "gated_rows", "model": MODEL, "forget": forget, **facts, **line}
            append_line(args.out, {**line, **origin()})
            print(line, flush=True)


def images(args: argparse.Namespace) -> tuple[data.ImageSet, data.ImageSet]:
    """What is fitted on, and what is judged on."""
    train = load(MODEL, DATA, "train", args.images)
    if not args.split:
        return train, load(MODEL, DATA, "test")
    cut = int(0.7 * len(train))
    return train.take(torch.arange(cut)), train.take(torch.arange(cut, len(train)))


def gated(
    model: nn.Module, train: data.ImageSet, stages: str
) -> tuple[wfilter.FilteredModel, dict[str, Any]]:
    """The model with trained gates."""
    wf = wfilter.apply_weight_filtering(model)
    recipe = dataclasses.replace(AUTO, stages=stages)
    history = wfilter.untrain(wf, data.batches(train, 100), recipe=recipe, progress=False)
    print(history.verdict, flush=True)
    return wf, {"stages": stages, "verdict": history.verdict}


@torch.no_grad()
def features_of(wf: wfilter.FilteredModel, dataset: data.ImageSet, forget: Any) -> Tensor:
    parts = torch.arange(len(dataset)).split(500)
    return torch.cat([wf.features(dataset.batch(part)[0], forget=forget) for part in parts])


class Detector:
    """Rows and a detector of one class, fitted on features under that row's gates."""

    def __init__(self, features: Tensor, labels: Tensor, forget: int):
        self.forget = forget
        statistics_ = FeatureStatistics(10, features.shape[1])
        statistics_.add(features, labels)
        self.rows = fit_rows(statistics_)
        found = detectors(self.rows)
        assert found is not None
        self.weight, self.offset = found[0][forget].float(), found[1][forget].float()
        self.own = self(features)[labels == forget]

    def __call__(self, features: Tensor) -> Tensor:
        scores: Tensor = features @ self.weight - self.offset
        return scores

    def fires(self, features: Tensor, caught: float) -> Tensor:
        """Which images are drawn anew; ``caught`` of those of the class that were fitted on."""
        return self(features) > self.own.quantile(1 - caught)


def measure(
    wf: wfilter.FilteredModel,
    forget: int,
    train: data.ImageSet,
    test: data.ImageSet,
    args: argparse.Namespace,
) -> Any:
    """One line for gates alone, one for each threshold, one for rows alone."""
    head = metrics.find_head(wf.base)
    labels = train.labels, test.labels
    seen = tuple(features_of(wf, part, forget) for part in (train, test))
    logits = tuple(without(head(h), forget) for h in seen)
    yield {"method": "gates", **judged(forget, seen, labels, logits)}
    detector, other = Detector(seen[0], labels[0], forget), (forget + 1) % 10
    second = Detector(features_of(wf, train, other), labels[0], other)
    both = features_of(wf, test, {forget, other})
    member = (labels[1] == forget) | (labels[1] == other)
    for caught in args.caught:
        fires = [detector.fires(h, caught) for h in seen]
        edited = [
            torch.where(f[:, None], detector.rows.drawn(h, z.argmax(1)), h)
            for f, h, z in zip(fires, seen, logits)
        ]
        line = judged(forget, edited, labels, [without(head(h), forget) for h in edited])
        pair = detector.fires(both, caught) | second.fires(both, caught)
        line |= {"caught_fitting": caught, "caught": share(fires[1][labels[1] == forget])}
        line |= {"redrawn_others": share(fires[1][labels[1] != forget])}
        line |= {"pair_caught": share(pair[member]), "pair_redrawn_others": share(pair[~member])}
        yield {"method": "gates and rows", **line}
    yield {"method": "rows", **ungated(wf, forget, head, train, test)}


def ungated(
    wf: wfilter.FilteredModel,
    forget: int,
    head: nn.Linear,
    train: data.ImageSet,
    test: data.ImageSet,
) -> dict[str, Any]:
    """Rows on the base model's features, as they are today."""
    seen = [features_of(wf, part, None) for part in (train, test)]
    found = FeatureStatistics(10, seen[0].shape[1])
    found.add(seen[0], train.labels)
    rows: FeatureRows = fit_rows(found)
    chosen = torch.arange(10) == forget
    fires = head(seen[1]).argmax(1) == forget
    edited = [rows.edited(h, chosen, head(h)) for h in seen]
    logits = [rows(h, chosen, head)[1] for h in seen]
    line = judged(forget, edited, (train.labels, test.labels), logits)
    own = test.labels == forget
    return {**line, "caught": share(fires[own]), "redrawn_others": share(fires[~own])}


def without(logits: Tensor, forget: int) -> Tensor:
    return logits.index_fill(1, torch.tensor([forget]), -1e4)


def share(of: Tensor) -> float:
    return round(100 * float(of.float().mean()), 2)


def judged(forget: int, seen: Any, labels: Any, logits: Any) -> dict[str, Any]:
    """The attacks on features, and the answers."""
    seen, logits = [h.detach() for h in seen], [z.detach() for z in logits]
    view = attacks.View(forget, seen[0], labels[0], seen[1], labels[1], *logits)
    acc_r, acc_f = attacks.answers(view)
    networks: list[float] = [attacks.mlp_probe(view, seed) for seed in attacks.SEEDS]
    figures: dict[str, Callable[[attacks.View], float]] = {
        "linear_probe": attacks.linear_probe,
        "auc": attacks.one_against_rest,
        "nearest_mean": attacks.nearest_mean,
        "20_nn": attacks.neighbours,
    }
    found = {name: round(attack(view), 2) for name, attack in figures.items()}
    found |= {"mlp_probe": round(statistics.mean(networks), 2)}
    return {"acc_r": round(acc_r, 2), "acc_f": round(acc_f, 2), **found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
