"""The table of ``benchmarks/feature_rows.py``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIGURES = {
    "acc_r": "Acc_r",
    "acc_f": "Acc_f",
    "linear_probe": "linear probe",
    "auc": "AUC",
    "nearest_mean": "nearest mean",
    "20_nn": "20-NN",
    "mlp_probe": "MLP",
    "refit_2_percent": "head on 2 %",
    "prototype": "prototype",
    "inverter": "knows the rows",
    "relearn_1": "relearn 1",
    "relearn_5": "5",
    "relearn_10": "10",
    "relearn_500": "500",
    "mia_confidence": "MIA conf.",
    "mia_entropy": "MIA entr.",
}
SHOWN = ["linear_probe", "auc", "nearest_mean", "20_nn", "mlp_probe", "acc_r"]  # by class
VARIED = [*SHOWN[:-1], "refit_2_percent", "prototype", "inverter", "relearn_10", "mia_entropy"]
METHODS = {
    "mask": "logit mask (features as they are)",
    "row": "feature row",
    "folded": "row folded into linear layers",
    "retrained": "trained without the class",
}


def write_table(
    lines: Sequence[dict[str, Any]], many: Sequence[dict[str, Any]], path: Path
) -> None:
    """All tables, made from the stored lines alone; ``many`` are those of other seeds."""
    parts = [INTRODUCTION]
    single = [line for line in lines if "forget" in line and "together" not in line]
    for model in dict.fromkeys(line["model"] for line in single):
        own = [line for line in lines if line["model"] == model]
        mine = [line for line in single if line["model"] == model]
        parts += one_model(mine)
        parts += seeds(mine, [line for line in many if line["model"] == model])
        parts += sets([line for line in own if "together" in line])
    parts += imagenet([line for line in lines if line.get("data") == "imagenet"])
    parts += costs([line for line in lines if line["method"] == "speed"])
    path.write_text("\n\n".join([*parts, findings()]) + "\n")


def one_model(lines: list[dict[str, Any]]) -> list[str]:
    """Means over classes for each method, on the classes that all methods have, then by class."""
    first = lines[0]
    heading = (
        f"## {first['model']} on {first['data']} ({first['weights']})\n\nRows of all classes from "
        f"{first['images']:,} training images in {first['fit_cpu_seconds']} CPU seconds beyond "
        f"their forward ({first['forward_cpu_seconds']} CPU seconds)."
    )
    bar = {line["forget"] for line in lines if line["method"] == "retrained"}
    every = {line["forget"] for line in lines}
    parts = [heading, means(lines, every, "the classes measured")]
    if bar and bar != every:
        parts.append(means(lines, bar, "classes with a network trained without them"))
    return [*parts, by_class(lines, SHOWN)]


def sets(lines: list[dict[str, Any]]) -> list[str]:
    """The same where several classes are forgotten together, beside one network without them."""
    parts = []
    for together in sorted({tuple(line["together"]) for line in lines}):
        own = [line for line in lines if tuple(line["together"]) == together]
        title = "the classes of one set, forgotten together"
        parts += [means(own, {*together}, title), by_class(own, SHOWN)]
    return parts


def seeds(first: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[str]:
    """Feature rows with noise of several seeds: mean and spread of each figure, class by class."""
    by_class: dict[int, list[dict[str, Any]]] = {}
    for line in others:
        by_class.setdefault(line["forget"], []).append(line)
    if not by_class:
        return []
    for line in first:
        if line["method"] == "row" and line["forget"] in by_class:
            by_class[line["forget"]].append(line)
    rows = []
    for forget, mine in sorted(by_class.items()):
        cells = [
            f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f}"
            for found in ([x[name] for x in mine] for name in VARIED)
        ]
        rows.append(f"| {forget} | {len(mine)} | " + " | ".join(cells) + " |")
    titles = (FIGURES[name] if name != "relearn_10" else "relearn 10" for name in VARIED)
    header = "| class | seeds | " + " | ".join(titles) + " |"
    shown = (
        "Feature rows whose noise has other seeds, mean and standard deviation over them (each "
        "figure is already the mean of three seeds of the attack, where that is random):"
    )
    return ["\n".join([shown, "", header, "|---|---:|" + "---:|" * len(VARIED), *rows])]


def means(lines: list[dict[str, Any]], classes: set[int], title: str) -> str:
    rows = []
    for method, words in METHODS.items():
        mine = [x for x in lines if x["method"] == method and x["forget"] in classes]
        if not mine:
            continue
        if len(mine) < len(classes):
            words += f" (classes {', '.join(str(x['forget']) for x in mine)} only)"
        together = {tuple(x["without"]) for x in mine if len(x.get("without", ())) > 1}
        words += "".join(f" (one lacks {', '.join(map(str, lot))})" for lot in sorted(together))
        cells = [
            f"{statistics.mean(x[k] for x in mine):.1f}" if all(k in x for x in mine) else "-"
            for k in FIGURES
        ]
        rows.append(f"| {words} | " + " | ".join(cells) + " |")
    shown = f"Mean over {title} ({', '.join(map(str, sorted(classes)))}):"
    header = "| method | " + " | ".join(FIGURES.values()) + " |"
    return "\n".join([shown, "", header, "|---|" + "---:|" * len(FIGURES), *rows])


def by_class(lines: list[dict[str, Any]], names: list[str]) -> str:
    """Feature row beside the retrained network, class by class, and how far their routes are."""
    by = {(x["method"], x["forget"]): x for x in lines}
    header = "| class | " + " | ".join(FIGURES[n] for n in names) + " | routes: TV to retrained |"
    rows = []
    for forget in sorted({x["forget"] for x in lines}):
        row, bar = by.get(("row", forget)), by.get(("retrained", forget))
        if row is None:
            continue
        cells = [f"{row[n]:.1f}" + (f" ({bar[n]:.1f})" if bar else "") for n in names]
        apart = f"{total_variation(row['routes'], bar['routes']):.2f}" if bar else "-"
        rows.append(f"| {forget} | " + " | ".join(cells) + f" | {apart} |")
    shown = "By class, feature row (in brackets the network trained without the class):"
    return "\n".join([shown, "", header, "|---|" + "---:|" * (len(names) + 1), *rows])


def total_variation(p: Sequence[float], q: Sequence[float]) -> float:
    """Half the sum of differences between two shares: 0 alike, 1 disjoint."""
    return sum(abs(a - b) for a, b in zip(p, q)) / 2


def imagenet(lines: list[dict[str, Any]]) -> list[str]:
    if not lines:
        return []
    header = (
        "| network | Acc_r mask | Acc_r row | Acc_f base | Acc_f row | linear probe mask | "
        "linear probe row | nearest mean mask | nearest mean row | fit, CPU s | forward, CPU s | "
        "rows, MB |"
    )
    keys = ("mask_acc_r", "row_acc_r", "base_acc_f", "row_acc_f", "mask_linear_probe")
    keys += ("row_linear_probe", "mask_nearest_mean", "row_nearest_mean", "fit_cpu_seconds")
    keys += ("forward_cpu_seconds", "row_megabytes")
    rows = [f"| {x['model']} | " + " | ".join(f"{x[k]:.2f}" for k in keys) + " |" for x in lines]
    title = (
        "## ImageNet, 1,000 classes, three images of each for rows and probes\n\n"
        f"Figures of k0, means over {lines[0]['classes']} rows drawn at random; probes are fitted "
        "on all 1,000 classes under the row. torchvision's ResNet-18 here is a compressed and "
        "fine-tuned one."
    )
    return ["\n".join([title, "", header, "|---|" + "---:|" * len(keys), *rows])]


def costs(lines: list[dict[str, Any]]) -> list[str]:
    """What rows add to a mixed batch in time, and to a checkpoint."""
    told = [
        f"- {x['model']}, a mixed batch of {x['batch_size']}{drawn_anew(x)}: CPU time with rows "
        f"over without, in turn, median of {x['repeats']} ratios {x['ratio_median']:.3f}, ratio of "
        f"the medians {x['ratio_of_medians']:.3f}{by_parts(x)}. Rows: {x['row_megabytes']} MB."
        for x in lines
    ]
    return ["## Cost", "\n".join(told)] if told else []


def by_parts(line: dict[str, Any]) -> str:
    """What was timed by itself, and the ratio that it makes."""
    if "ratio_by_parts" not in line:
        return ""
    return (
        f"; by its parts, which scatter less, {line['ratio_by_parts']:.4f}: the edit "
        f"{line['edit_milliseconds']:.2f} ms and the calls around it "
        f"{line['around_milliseconds']:.2f} ms beside {line['milliseconds']} ms"
    )


def drawn_anew(line: dict[str, Any]) -> str:
    """How many of the batch are drawn anew; older lines made a draw for each and kept few."""
    if "own" not in line:
        return " (first version)"
    return ", each forgetting what it shows" if line["own"] else ""


def findings() -> str:
    path = Path(__file__).parent / "results/feature_rows_findings.txt"
    return path.read_text().strip() if path.exists() else ""


INTRODUCTION = """# Feature rows

Made by `python benchmarks/feature_rows.py table` from `feature_rows.jsonl`, where each line has its
command. Every attack is trained on features under the row it attacks; a figure is the share of the
forgotten class's test images that it finds, in percent (AUC: one against the rest). The bar is the
network trained without the class. MIA conf.: judged non-members; MIA entr.: judged members. Who
knows the rows measures each image in units of the covariance it would be drawn with. Relearning
trains the layers after the backbone, on so many images of the class and 500 others; folded rows are
trained with the head."""
