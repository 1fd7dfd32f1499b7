"""What is left of a class: probes of its features, membership, insertion and deletion."""

from __future__ import annotations

from collections.abc import Mapping

from wfilter import metrics
from wfilter.evaluation.measures.bench import Bench, Measured, by_class
from wfilter.evaluation.method import Subject


def probe(subject: Subject, bench: Bench) -> Measured:
    """Linear probe and nearest class mean on the features of training and test sample."""
    kept: dict[str, metrics.Probe] = {}

    def number(row: int) -> dict[str, float | None]:
        train, test = bench.seen(subject, row)
        if not (subject.shared and kept):
            known = (train.features, bench.train[1], test.features, bench.test[1])
            kept["probe"] = metrics.linear_probe(*known)
            kept["NCM"] = metrics.nearest_class_mean(*known)
        return {
            f"{name} {half}": value
            for name, found in kept.items()
            for half, value in zip("fr", _halves(found.by_class, row))
        }

    return by_class(subject, number)


def _halves(by_class: Mapping[int, float], row: int) -> tuple[float, float]:
    """The number of a class, and the mean of the others."""
    others = [value for label, value in by_class.items() if label != row]
    return by_class[row], sum(others) / len(others)


def membership(subject: Subject, bench: Bench) -> Measured:
    """Both attacks on the forgotten class's training images."""

    def number(row: int) -> dict[str, float | None]:
        train, test = bench.seen(subject, row)
        forgotten, other = bench.train[1] == row, bench.test[1] != row
        retain = train.logits[~forgotten], bench.train[1][~forgotten]
        outside = test.logits[other], bench.test[1][other]
        asked = train.logits[forgotten], bench.train[1][forgotten]
        return {
            "MIA confidence": metrics.confidence_attack(retain, outside, asked, seed=bench.seed),
            "MIA entropy": metrics.entropy_attack(retain[0], outside[0], asked[0]),
        }

    return by_class(subject, number)


def curves(subject: Subject, bench: Bench) -> Measured:
    """Areas of insertion and deletion, by gate and in a random order."""
    if subject.filtered is None:
        return Measured({})
    from wfilter import explain

    wf, budget, points = subject.filtered, bench.budget, {}

    def number(row: int) -> dict[str, float | None]:
        images = bench.of_class(row)[0][: budget.curve_images]
        found = explain.class_curves(wf, images, row, steps=budget.curve_steps, seed=bench.seed)
        by_name = {name.replace("_", " "): curve for name, curve in vars(found).items()}
        points[row] = {name: list(curve.values) for name, curve in by_name.items()}
        return {name: curve.auc for name, curve in by_name.items()}

    measured = by_class(subject, number)
    return Measured(measured.cells, {"curves": points})
