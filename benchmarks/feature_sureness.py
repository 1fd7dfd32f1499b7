"""How sure answers are of the images of a forgotten class, and whether that gives them away.

    python benchmarks/feature_sureness.py --model wfilter:cnn-mnist --data mnist
    python benchmarks/feature_sureness.py --model wfilter:cnn-mnist --data mnist --together 1 3 8

Mean entropy (nats) of the answers on the class's test images, and the area under the ROC curve of
telling them from all other test images by it, under the logit mask, feature rows, feature rows
whose draws are answered as surely as other classes (``sureness`` 1), and on the network of
``--references`` that never saw the class. Rows are those of ``feature_rows.py``. A JSON line for
each class goes to ``results/feature_sureness.jsonl``; every run makes the table beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from common import RESULTS, append_line, origin, read_lines
from feature_rows import features_of, fitted, load, network, reference
from references import folder
from wfilter import metrics, zoo
from wfilter.core.feature_rows import FeatureRows

FILE = RESULTS / "feature_sureness.jsonl"
INTRODUCTION = """# How sure answers on a forgotten class are

Mean entropy (nats) of the answers on the class's test images, and AUC (%) of telling them from all
other test images by it; means over classes. `row, as sure`: draws answered as surely as the class
they are drawn from. Made by `python benchmarks/feature_sureness.py` from `feature_sureness.jsonl`.
"""
METHODS = ("mask", "row", "row, as sure", "retrained")


def main() -> None:
    args = parse_arguments()
    if args.model:
        with torch.no_grad():
            measure(args)
    FILE.with_suffix(".md").write_text(table(read_lines(FILE)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: only make the table")
    parser.add_argument("--data", choices=("mnist", "cifar10"))
    parser.add_argument("--classes", type=int, nargs="*", default=list(range(10)))
    parser.add_argument("--together", type=int, nargs="*", help="forget these as one set")
    parser.add_argument("--references", type=Path, default=folder())
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/wfilter-features")
    args = parser.parse_args()
    if args.model and not args.data:
        parser.error("--model needs --data")
    args.command = "judge"  # originals are looked for where `feature_rows.py judge` does
    return args


def measure(args: argparse.Namespace) -> None:
    model, weights = network(args.model, args)
    head = metrics.find_head(model)
    sets = {"train": load(args.model, args.data, "train", 10_000)}
    sets["test"] = load(args.model, args.data, "test")
    cached = {k: features_of(model, s, args.cache, f"{args.data}-{k}") for k, s in sets.items()}
    rows, _ = fitted(cached["train"], head)
    features, labels, _ = cached["test"]
    for forget in args.together or args.classes:
        chosen = torch.isin(torch.arange(10), torch.tensor(args.together or [forget]))
        logits = {"mask": head(features).masked_fill(chosen, -1e4)}
        logits["row"] = rows(features, chosen, head)[1]
        logits["row, as sure"] = as_sure(rows)(features, chosen, head)[1]
        path = reference(forget, args)
        if path is not None:
            other = zoo.build(args.model, num_classes=10, weights=path)
            seen = features_of(other, sets["test"], args.cache, f"{args.data}-test")[0]
            logits["retrained"] = metrics.find_head(other)(seen)
        own, rest = labels == forget, ~chosen[labels]
        line: dict[str, Any] = {"benchmark": "feature_sureness", "model": args.model}
        line |= {"data": args.data, "weights": weights, "forget": forget}
        line |= {"together": args.together or [forget]}
        line |= {name: told_apart(x, own, rest) for name, x in logits.items()}
        append_line(FILE, {**line, **origin()})


def as_sure(rows: FeatureRows) -> FeatureRows:
    """The same rows, whose draws are answered as surely as the class they are drawn from."""
    parts = (rows.means, rows.factors, rows.rests, rows.phases, rows.mixing)
    return FeatureRows(*parts)


def told_apart(logits: Tensor, own: Tensor, rest: Tensor) -> dict[str, float]:
    """Mean entropy on the class, and the AUC of telling it from the rest by entropy, in %."""
    entropy = torch.special.entr(logits.double().softmax(1)).sum(1)
    asked = own | rest
    auc = roc_auc_score(own[asked].numpy(), entropy[asked].numpy())
    return {"entropy": round(float(entropy[own].mean()), 4), "auc": round(100 * auc, 2)}


def table(lines: list[dict[str, Any]]) -> str:
    """Means over the classes of each model and set; of two lines for one class the later counts."""
    latest = {(x["model"], x["forget"], *x["together"]): x for x in lines}
    groups: dict[tuple[str, tuple[int, ...]], list[dict[str, Any]]] = {}
    for line in latest.values():
        together = tuple(line["together"]) if len(line["together"]) > 1 else ()
        groups.setdefault((line["model"], together), []).append(line)
    head = " | ".join(f"{name}: entropy | AUC" for name in METHODS)
    rows = [f"| model | classes | {head} |", "|---|---|" + "---:|" * 2 * len(METHODS)]
    for (model, together), own in groups.items():
        classes = ", ".join(str(line["forget"]) for line in own)
        classes += " together" if together else ""
        cells = [cell(own, name, key) for name in METHODS for key in ("entropy", "auc")]
        rows.append(f"| {model} | {classes} | {' | '.join(cells)} |")
    return "\n".join([INTRODUCTION, *rows, ""])


def cell(lines: list[dict[str, Any]], method: str, key: str) -> str:
    if not all(method in line for line in lines):
        return "-"
    mean = sum(line[method][key] for line in lines) / len(lines)
    return f"{mean:.2f}" if key == "entropy" else f"{mean:.1f}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
