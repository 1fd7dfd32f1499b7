"""Lines of `pruning.py`: which of them count, and their tables."""

from __future__ import annotations

import statistics
from typing import Any

from registry.models import Architecture, architectures, representatives


def one_of_each_family() -> list[Architecture]:
    known = architectures()
    vision = [a for a in known if a.library == "torchvision"]
    return [*{a.family: a for a in reversed(vision)}.values(), *representatives(known)]


def became_smaller(line: dict[str, Any]) -> bool:
    return line["kind"] == "sweep" and "error" not in line and len({*line["parameters"]}) == 2


def merged(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest line of each model; torch-pruning's and compiled figures join from others."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        key = line["kind"], line.get("key") or line["model"]
        before = newest.get(key, {})
        if line["kind"] == "compiled" and "error" in line and before:
            continue
        kept = {"torch_pruning": before["torch_pruning"]} if "torch_pruning" in before else {}
        newest[key] = {**kept, **line}
    for (kind, key), line in newest.items():
        added = newest.get(("compiled", key), {})
        if kind == "sweep" and added.get("parameters") == line.get("parameters", ()):
            line["compiled_ms"] = added["compiled_ms"]
    return list(newest.values())


def tables(lines: list[dict[str, Any]]) -> str:
    rows = merged(lines)
    return "\n".join([*_cifar_table(rows), "", *_head(rows), "", *_sweep_table(rows)]) + "\n"


def _cifar_table(rows: list[dict[str, Any]]) -> list[str]:
    text = [
        "| model | parameters, whole | pruned | multiply-adds, whole | pruned | eager ms | "
        "compiled ms | Acc_r / Acc_f, original | baked | pruned | test images | "
        "largest difference, float64 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for line in [ln for ln in rows if ln["kind"] == "cifar"]:
        times = [
            f"{t['whole']:.0f} -> {t['pruned']:.0f}"
            for t in (line["eager_ms"], line["compiled_ms"])
        ]
        accuracy = [_accuracies(line, name) for name in ("original", "whole", "pruned")]
        text.append(
            f"| {line['model']} | {line['parameters'][0]:,} | {line['parameters'][1]:,} | "
            f"{line['multiply_adds'][0] / 1e6:.0f} M | {line['multiply_adds'][1] / 1e6:.0f} M | "
            f"{' | '.join([*times, *accuracy])} | {line['images']:,} | "
            f"{line['difference_float64']:.0e} |"
        )
    return text


def _accuracies(line: dict[str, Any], name: str) -> str:
    """Of one model; older lines have those of the pruned one only."""
    if not isinstance(line["acc_r"], dict):
        line = {key: {"pruned": line[key]} for key in ("acc_r", "acc_f")}
    if name not in line["acc_r"]:
        return "-"
    return f"{line['acc_r'][name]:.2f} / {line['acc_f'][name]:.2f}"


def _head(rows: list[dict[str, Any]]) -> list[str]:
    """What came out on the whole, what the ratios are, and which have compiled times."""
    sweep = [ln for ln in rows if ln["kind"] == "sweep"]
    smaller = [ln for ln in sweep if became_smaller(ln)]
    refused = [ln for ln in sweep if "error" in ln]
    whole = len(sweep) - len(smaller) - len(refused)
    return [
        f"{len(smaller)} of {len(sweep)} architectures became smaller, {whole} stay as they are, "
        f"{len(refused)} refused. Of the {len(smaller)} is left {_medians(smaller)}. "
        f"Their largest difference in float64 is "
        f"{max((ln['difference_float64'] for ln in smaller), default=0.0):.0e}.",
        "",
        *_about_compiled(rows),
        "",
        "Ratios are pruned / whole; of torch-pruning parameters and largest difference of logits.",
    ]


def _medians(lines: list[dict[str, Any]]) -> str:
    """The median share that is left of each figure."""
    names = ("parameters", "multiply_adds", "eager_ms", "compiled_ms")
    found = []
    for name, said in zip(names, ("parameters", "multiply-adds", "eager time", "compiled time")):
        shares = [_share(ln[name]) for ln in lines if name in ln]
        if shares:
            found.append(f"{statistics.median(shares):.2f} of {said} (up to {max(shares):.2f})")
    return "in the median " + ", ".join(found)


def _about_compiled(rows: list[dict[str, Any]]) -> list[str]:
    """How many architectures have compiled times, and why others have none."""
    chosen = {a.key for a in one_of_each_family()}
    sweep = [ln for ln in rows if ln["kind"] == "sweep" and ln["key"] in chosen]
    timed = [ln for ln in sweep if "compiled_ms" in ln]
    failed = [ln for ln in rows if ln["kind"] == "compiled" and "error" in ln]
    same = [ln for ln in sweep if not became_smaller(ln)]
    text = [
        f"Compiled times: {len(timed)} of the {len(sweep)} architectures that stand for a family "
        f"have them. {len(same)} were refused or stay whole, so that there is nothing to compare; "
        f"{len(failed)} could not be timed; the other {len(sweep) - len(timed + same + failed)} "
        "were not reached in the CPU time that there was: the cheapest came first. The rest of "
        "torchvision, other sizes of the same families, was not to be compiled."
    ]
    if timed:
        text.append(f"Of those {len(timed)} is left {_medians(timed)}.")
    return [*text, *(f"- {ln['key']}: {ln['error'][:150]}" for ln in failed)]


def _sweep_table(rows: list[dict[str, Any]]) -> list[str]:
    text = [
        "| architecture | parameters | multiply-adds | eager time | compiled time | "
        "largest difference (float64) | closed units left | most of them because | torch-pruning |",
        "|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for line in [ln for ln in rows if ln["kind"] == "sweep"]:
        if "error" in line:
            text.append(f"| {line['key']} | - | - | - | - | - | - | {line['error']} | |")
            continue
        rival = line.get("torch_pruning", {})
        shown = rival.get("error", "")[:60].replace("|", "/")
        if "parameters" in rival:
            shown = f"{_ratio(rival['parameters'])}, {rival['difference']:.0e}"
        compiled = _ratio(line["compiled_ms"]) if "compiled_ms" in line else "-"
        why = line["left"][0][0][:70].replace("|", "/") if line["left"] else ""
        text.append(
            f"| {line['key']} | {_ratio(line['parameters'])} | {_ratio(line['multiply_adds'])} | "
            f"{_ratio(line['eager_ms'])} | {compiled} | "
            f"{line['difference_float64']:.0e} | "
            f"{line['left_units']} | {why} | {shown} |"
        )
    return text


def _share(pair: Any) -> float:
    """Pruned / whole, of a pair or of both by name."""
    whole, pruned = pair.values() if isinstance(pair, dict) else pair
    return pruned / whole


def _ratio(pair: Any) -> str:
    return f"{_share(pair):.3f}"
