"""Can a draw be solved for the features it was made of, by whoever knows the feature rows?

    python benchmarks/feature_inversion.py --references '~/wfilter-references'

Takes test images of a class that the small CIFAR-10 network answers right, draws their features
anew by the row, and then looks for features that give the same draw: least squares by Adam, from
several starts around the mean of the class, the best one kept. The attacker knows the rows and the
class each image was drawn from. Stored: how much of the draw is explained (1: the same draw was
found), and how much of the deviations of the true features from the mean of their class (1: the
features were found, 0 or less: no better than the mean). ``--turns`` makes noise of other phases,
to see when the search works. Lines go to ``benchmarks/results/feature_inversion.jsonl``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from common import RESULTS, append_line, origin
from feature_rows import features_of, fitted, load
from wfilter import metrics, zoo
from wfilter.core.feature_rows import FeatureRows
from wfilter.untraining.fitting import TURNS

MODEL, DATA = "wfilter:cnn_small-cifar", "cifar10"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--references", type=lambda name: Path(name).expanduser(), required=True)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/wfilter-features")
    parser.add_argument("--forget", type=int, default=3)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--turns", type=float, nargs="+", default=[TURNS, 1.0, 0.1])
    args = parser.parse_args()
    torch.manual_seed(0)
    weights = args.references / f"{MODEL.partition(':')[2]}-s0.safetensors"
    model = zoo.build(MODEL, num_classes=10, weights=weights)
    head = metrics.find_head(model).requires_grad_(False)
    assert isinstance(head, nn.Linear)
    train, test = (load(MODEL, DATA, split, n) for split, n in (("train", 10_000), ("test", None)))
    rows, _ = fitted(features_of(model, train, args.cache, f"{DATA}-train"), head)
    features, labels, _ = features_of(model, test, args.cache, f"{DATA}-test")
    right = (head(features).argmax(1) == args.forget) & (labels == args.forget)
    h = features[right][: args.images]
    logits = head(h)
    logits[:, args.forget] = -torch.inf
    for turns in args.turns:
        figures = search(rescaled(rows, turns), h, logits.argmax(1), args)
        line = {"benchmark": "feature_inversion", "model": MODEL, "forget": args.forget}
        line |= {"turns": turns, "images": len(h), "starts": args.starts, "steps": args.steps}
        append_line(RESULTS / "feature_inversion.jsonl", {**line, **figures, **origin()})
        print(turns, figures, flush=True)


def rescaled(rows: FeatureRows, turns: float) -> FeatureRows:
    """The same rows with phases of this standard deviation within a class."""
    phases = rows.phases * (turns / TURNS)
    return FeatureRows(rows.means, rows.factors, rows.rests, phases, rows.mixing)


def search(
    rows: FeatureRows, h: Tensor, route: Tensor, args: argparse.Namespace
) -> dict[str, float]:
    """The best of several searches for each image."""
    centre, spread = rows.means[args.forget], h.std(0)
    wanted = rows.drawn(h, route)
    best, error = h.clone(), torch.full((len(h),), torch.inf)
    for start in range(args.starts):
        guess = (centre + bool(start) * spread * torch.randn_like(h)).requires_grad_()
        optimiser = torch.optim.Adam([guess], 0.02 * float(spread.mean()))
        for _ in range(args.steps):
            miss = (rows.drawn(guess, route) - wanted).square().sum(1)
            optimiser.zero_grad()
            miss.sum().backward()
            optimiser.step()
        miss = (rows.drawn(guess, route) - wanted).square().sum(1).detach()
        better = miss < error
        best[better], error[better] = guess.detach()[better], miss[better]
    around = wanted - rows.means[route]
    return {
        "draw_explained": round(1 - float(error.sum() / around.square().sum()), 3),
        "features_explained": round(
            1 - float((best - h).square().sum() / (h - h.mean(0)).square().sum()), 3
        ),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
