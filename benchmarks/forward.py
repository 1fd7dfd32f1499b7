"""A mixed batch against the base model and against what a user could do instead.

    python benchmarks/forward.py                      # the whole table: hours on two CPU cores
    python benchmarks/forward.py --models resnet18 vit_tiny --batch 64 --compiled
    python benchmarks/forward.py --plot               # the picture, from the stored lines

Lines go to ``benchmarks/results/forward.jsonl`` (or ``--out``) and, as a table, ``forward.md``.
Ratios compare paths within one interleaved run; times of different runs are not comparable.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from pathlib import Path

import torch
from torch import nn

import wfilter
from common import RESULTS
from wfilter import bench
from wfilter.core.compiling import has_compiler

# Input sizes that two CPU cores can time: the ratio, not the size, is the result.
MODELS = {
    "resnet18": ("torchvision", "resnet18", 64),
    "resnet50": ("torchvision", "resnet50", 64),
    "vgg16": ("torchvision", "vgg16", 64),
    "vit_tiny": ("timm", "vit_tiny_patch16_224", 112),
    "vit_small": ("timm", "vit_small_patch16_224", 112),
    "swin_tiny": ("timm", "swin_tiny_patch4_window7_224", 112),
    "convnext_tiny": ("timm", "convnext_tiny", 64),
}


def build(name: str, classes: int) -> tuple[nn.Module, int]:
    source, architecture, size = MODELS[name]
    if source == "timm":
        import timm

        sized = {} if name.startswith("convnext") else {"img_size": size}
        return timm.create_model(architecture, num_classes=classes, **sized), size
    import torchvision

    return torchvision.models.get_model(architecture, num_classes=classes), size


def peft_lora(name: str, classes: int, images: torch.Tensor, labels: int) -> bench.Forward | str:
    """PEFT's mixed batches on the same layers: one LoRA adapter per class, chosen by name."""
    from peft import LoraConfig, get_peft_model

    model, _ = build(name, classes)
    plan = wfilter.find_targets(model, example_input=images[:2])
    layers = sorted({row.name.rsplit(".", 1)[0] for row in plan})
    config = LoraConfig(r=1, target_modules=layers)
    try:
        peft = get_peft_model(model.eval(), config, adapter_name="c0")
        for c in range(1, min(labels, len(images))):
            peft.add_adapter(f"c{c}", config)
        peft.eval()
        names = lambda y: [f"c{int(c)}" for c in y]  # noqa: E731
        forward = lambda x, y: peft(x, adapter_names=names(y))  # noqa: E731
        with torch.no_grad():
            forward(images, torch.arange(len(images)) % min(labels, len(images)))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return forward


def run(args: argparse.Namespace) -> list[bench.Timing]:
    rows = []
    for name in args.models:
        for batch in args.batch:
            for labels in args.labels:
                torch.manual_seed(0)
                classes = max(10, labels)
                model, size = build(name, classes)
                images = torch.rand(batch, 3, args.size or size, args.size or size)
                wf = wfilter.apply_weight_filtering(model, example_input=images[:2])
                bench.randomise(wf)
                wf.inspect(images)
                extra: dict[str, bench.Forward | str] = {}
                if args.peft:
                    extra["PEFT LoRA, adapter_names"] = peft_lora(name, classes, images, labels)
                for compiled in [False, True] if args.compiled else [False]:
                    found = bench.bench(
                        wf,
                        images,
                        name=name,
                        labels=labels,
                        rounds=args.rounds,
                        compiled=compiled,
                        rivals=args.rivals and not compiled,
                        memory=not compiled,
                        extra={} if compiled else extra,
                    )
                    print(bench.format_table(found), flush=True)
                    rows += found
                    with open(args.out, "a") as file:
                        file.write(bench.to_json_lines(found, command=" ".join(sys.argv)))
                    torch._dynamo.reset()
                    gc.collect()
    return rows


def stored(path: Path) -> list[bench.Timing]:
    """The newest line of every path, setting and batch."""
    fields = bench.Timing.__dataclass_fields__
    rows = {}
    for line in map(json.loads, path.read_text().splitlines()):
        given = re.search(r"--size[ =](\d+)", line["command"])
        pixels = given[1] if given else MODELS[line["model"]][2]
        line["model"] = f"{line['model']}, {pixels} px"
        row = bench.Timing(**{k: v for k, v in line.items() if k in fields})
        rows[row.model, row.batch, row.labels, row.compiled, kind(row)] = row
    return list(rows.values())


def kind(row: bench.Timing) -> str:
    """The path without its number of copies."""
    return "baked copies" if row.path.endswith("baked copies") else row.path


OURS = ("forgetting(c)", "mixed labels", "mixed sets")
RIVALS = (
    "loop over classes",
    "baked copies",
    "per-sample weights (vmap)",
    "PEFT LoRA, adapter_names",
)


def cell(row: bench.Timing | None) -> str:
    if row is None:
        return ""
    return f"failed: {row.note}" if row.note else f"{row.ratio:.2f}"


def tables(rows: list[bench.Timing]) -> str:
    """Ours, eager and compiled, then what else a user could do; all as ratios to the base model."""
    found = {(r.model, r.batch, r.labels, r.compiled, kind(r)): r for r in rows}
    keys = list(dict.fromkeys((r.model, r.batch, r.labels) for r in rows))
    keys.sort(key=lambda key: (list(MODELS).index(key[0].split(",")[0]), *key))
    ours = [
        "| model | batch | labels | base, ms | forgetting(c) | mixed labels | mixed sets "
        "| base compiled, ms | mixed labels, compiled | mixed sets, compiled | compile s, base "
        "and ours | peak MiB, base and ours | largest difference |",
        "|---|" + "---:|" * 12,
    ]
    rivals = [
        "| model | batch | labels | mixed labels | " + " | ".join(RIVALS) + " |",
        "|---|" + "---:|" * (3 + len(RIVALS)),
    ]
    for key in keys:
        eager = {path: found.get((*key, False, path)) for path in ("base", *OURS, *RIVALS)}
        compiled = {path: found.get((*key, True, path)) for path in ("base", *OURS)}
        first = f"| {' | '.join(map(str, key))} | "
        cells = [
            "" if eager["base"] is None else f"{eager['base'].median_ms:.0f}",
            *(cell(eager[path]) for path in OURS),
            "" if compiled["base"] is None else f"{compiled['base'].median_ms:.0f}",
            *(cell(compiled[path]) for path in OURS[1:]),
            both(compiled, "compile_seconds"),
            both(eager, "peak_mib"),
            worst(eager["mixed labels"], compiled["mixed labels"]),
        ]
        ours.append(first + " | ".join(cells) + " |")
        if any(eager[path] for path in RIVALS):
            cells = [cell(eager["mixed labels"]), *(cell(eager[path]) for path in RIVALS)]
            rivals.append(first + " | ".join(cells) + " |")
    return "\n".join([*ours, "", "## What else a user could do", "", *rivals, ""])


def both(rows: dict[str, bench.Timing | None], field: str) -> str:
    """A field of the base model's row and of the mixed labels' row."""
    pair = [rows["base"], rows["mixed labels"]]
    values = [getattr(row, field) for row in pair if row is not None]
    return ", ".join(f"{value:.0f}" for value in values if value is not None)


def worst(*rows: bench.Timing | None) -> str:
    values = [r.largest_difference for r in rows if r and r.largest_difference is not None]
    return f"{max(values):.0e}" if values else ""


def plot(rows: list[bench.Timing], path: Path) -> None:
    """Ratio to the base model against the number of different labels, eager paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4))
    paths = {
        "mixed labels": "wfilter, mixed labels",
        "loop over classes": "loop over classes",
        "per-sample weights (vmap)": "per-sample weights (vmap)",
        "baked": "one baked copy per class",
        "PEFT LoRA, adapter_names": "PEFT LoRA, adapter_names",
    }
    for key, label in paths.items():
        points = sorted(
            (r.labels, r.ratio)
            for r in rows
            if key in r.path
            and not r.compiled
            and not r.note
            and r.model == "resnet18, 64 px"
            and r.batch == 64
        )
        if points:
            axes.plot(*zip(*points), marker="o", label=label)
    axes.axhline(1.0, color="grey", linewidth=1, linestyle="--", label="base model")
    axes.set(xscale="log", yscale="log", xlabel="different classes forgotten in the batch of 64")
    axes.set_ylabel("time / base model")
    axes.set_title("ResNet-18, 64 x 64 pixels, eager, CPU")
    axes.set_xticks([1, 2, 4, 10, 64], labels=["1", "2", "4", "10", "64"])
    axes.set_yticks([1, 2, 5, 10, 20], labels=["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--labels", nargs="*", type=int, default=[1, 10, 100, 1000])
    parser.add_argument("--size", type=int, help="pixels, instead of the model's own in MODELS")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compiled", action="store_true", help="also with torch.compile")
    parser.add_argument("--rivals", action="store_true", help="also what a user could do instead")
    parser.add_argument("--peft", action="store_true", help="also PEFT's mixed adapters")
    parser.add_argument("--out", type=Path, default=RESULTS / "forward.jsonl")
    parser.add_argument("--plot", action="store_true", help="only draw, from the stored lines")
    args = parser.parse_args()
    if not args.plot:
        if args.compiled and not has_compiler():
            print("torch.compile needs a C++ compiler on a CPU and finds none: eager only.")
            args.compiled = False
        run(args)
    rows = stored(args.out)
    args.out.with_suffix(".md").write_text(
        "# A mixed batch against the base model\n\nRebuilt by `python benchmarks/forward.py "
        "--plot` from `forward.jsonl`, which has each row's command and environment. All figures "
        "without a unit are times as ratios to the base model, eager to eager and compiled to "
        "compiled: medians over rounds in which every path runs once. Peak memory is what one call "
        "allocates at most; the difference is that of the logits from the one-sample-at-a-time "
        "oracle.\n\n" + tables(rows)
    )
    plot(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
