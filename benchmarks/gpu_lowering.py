"""The GPU code of a mixed batch against the base model's: lowered, not run.

    python benchmarks/gpu_lowering.py                           # what is not stored yet: an hour
    python benchmarks/gpu_lowering.py --models resnet18 --dtypes float16 --steps forward
    python benchmarks/gpu_lowering.py --table                   # the table, from the stored lines
    python benchmarks/gpu_lowering.py --block                   # the calls of one block of a ViT-T

No GPU is needed: see ``pretended_gpu.py``. Lines go to ``benchmarks/results/gpu_lowering.jsonl``
and, as a table, ``gpu_lowering.md``; those calls to ``gpu_vit_block.md``. Ratios are of bytes
moved, not of times.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wfilter
from lowered import Lowered, Outside
from pretended_gpu import pretended_gpu, templates_chosen, to_device
from wfilter import bench
from wfilter.files.export import traced_graph

RESULTS = Path(__file__).parent / "results"
MODELS = {
    "resnet18": ("torchvision", "resnet18"),
    "resnet50": ("torchvision", "resnet50"),
    "vgg16": ("torchvision", "vgg16"),
    "vit_tiny": ("timm", "vit_tiny_patch16_224"),
    "vit_small": ("timm", "vit_small_patch16_224"),
    "convnext_tiny": ("timm", "convnext_tiny"),
    "swin_tiny": ("timm", "swin_tiny_patch4_window7_224"),
    "torchvision_vit": ("torchvision", "vit_b_16"),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FORMATS = ("contiguous", "channels_last")
STEPS = ("forward", "training")
# How a user compiles: the method, torch's function around the filtered model, or to a file.
WAYS = ("wf.compile()", "torch.compile(wf)", "wfilter export --aoti")
PACKAGE = WAYS[2]
MODES = ("default", "max-autotune")
CLASSES = 10
CONVOLUTIONAL = ("resnet18", "resnet50", "vgg16", "convnext_tiny")


@dataclass(frozen=True)
class Setting:
    """One lowering of the base model and of the mixed batches against it."""

    model: str
    dtype: str = "float16"
    memory_format: str = "contiguous"
    step: str = "forward"
    way: str = "wf.compile()"
    mode: str = "default"
    batch: int = 64
    pixels: int = 224


@dataclass
class Row:
    """One forward (or forward and backward) as the device would run it."""

    forget: str  # "base", "labels", "sets" or "one row"
    kernels: int
    library_calls: int
    bytes_moved: int
    ratio: float  # of bytes_moved to the base model's
    host_reads: int
    mutated_inputs: int
    refused_by_cuda_graphs: list[str]
    captured: bool  # all of it in CUDA graphs, one for each graph
    kernels_outside: int
    waits_outside: int


def build(name: str, **options: Any) -> nn.Module:
    source, architecture = MODELS[name]
    if source == "timm":
        import timm

        return timm.create_model(architecture, num_classes=CLASSES, **options)
    import torchvision

    return torchvision.models.get_model(architecture, num_classes=CLASSES, **options)


def apply(model: nn.Module, pixels: int) -> wfilter.FilteredModel:
    """Filters on a model, inspected at the size that is to be lowered."""
    image = torch.rand(2, 3, pixels, pixels)
    wf = wfilter.apply_weight_filtering(model, example_input=image)
    wf(image, forget=torch.tensor([0, -1]))
    return wf


def inputs(setting: Setting, **where: Any) -> tuple[Tensor, dict[str, Any]]:
    """Images, and every form of what is to be forgotten."""
    shape = setting.batch, 3, setting.pixels, setting.pixels
    images = torch.empty(shape, dtype=DTYPES[setting.dtype], **where)
    if setting.memory_format == "channels_last":
        images = images.to(memory_format=torch.channels_last)
    labels = torch.zeros(setting.batch, dtype=torch.int64, **where)
    sets = torch.zeros(setting.batch, CLASSES, dtype=torch.bool, **where)
    return images, {"labels": labels, "sets": sets, "one row": 3}


def lower(setting: Setting, wf: wfilter.FilteredModel) -> list[Row]:
    """All rows of one setting; ``wf`` itself stays as it is."""
    wf = copy.deepcopy(wf)
    if setting.step == "training":
        return _training(setting, wf)
    options = {"max_autotune_gemm": True} if setting.mode == "max-autotune" else {}
    with pretended_gpu(**options) as gpu, templates_chosen(), torch.no_grad():
        wf.alphas.requires_grad_(False)
        last = setting.memory_format == "channels_last"
        to_device(wf, DTYPES[setting.dtype], channels_last=last)
        images, wanted = inputs(setting, device="cuda")
        forward: Callable[..., Any] = wf
        if setting.way == "wf.compile()":
            wf.compile(backend=gpu.backend, fullgraph=True)
        elif setting.way == PACKAGE:
            forward = _packaged(wf, gpu.backend)
        else:
            forward = torch.compile(wf, backend=gpu.backend, fullgraph=True)
        rows = [_watched("base", lambda: forward(images), None)]
        for forget, value in wanted.items():
            if isinstance(value, int) and forward is not wf:
                continue  # a Python number is a constant of that graph, or none of its inputs
            call = lambda: forward(images, forget=value)  # noqa: E731, B023
            rows.append(_watched(forget, call, wf.alphas.shape[1]))
    return _against_the_first(rows)


def _packaged(wf: wfilter.FilteredModel, backend: Any) -> Callable[..., Any]:
    """The graphs that ``wfilter.export(..., aoti=True)`` traces, in inductor's hands.

    AOTInductor lowers them alike, and writes what launches the kernels in C++.
    """
    made: dict[torch.dtype | None, Callable[..., Any]] = {}

    def forward(images: Tensor, forget: Tensor | None = None) -> Any:
        kind = None if forget is None else forget.dtype
        inputs = (images,) if forget is None else (images, forget)
        if kind not in made:
            graph = traced_graph(wf.base if forget is None else wf, *inputs)
            made[kind] = torch.compile(graph, backend=backend, fullgraph=True)
        return made[kind](*inputs)

    return forward


def _watched(forget: str, call: Callable[[], Any], units: int | None) -> Row:
    """The graphs that one call runs, and what it does outside of the forward's, the last one."""
    call()
    with Outside() as outside:
        call()
    row = _row(forget, outside.graphs, units, outside)
    before = outside.graphs[:-1]  # a graph of its own makes the gates
    made = sum(len(graph.triton) + len(graph.library) for graph in before)
    row.kernels, row.library_calls = len(outside.graphs[-1].triton), len(outside.graphs[-1].library)
    row.kernels_outside += made
    return row


def _training(setting: Setting, wf: wfilter.FilteredModel) -> list[Row]:
    """Forward and backward: of all weights in the base model, of the alphas in ours."""
    images, wanted = inputs(setting)
    units = wf.alphas.shape[1]
    plain = copy.deepcopy(wf.base).requires_grad_(True)
    rows = []
    with pretended_gpu(fake=False) as gpu:
        tuned = torch.compile(plain, backend=gpu.training_backend, fullgraph=True)
        wf.compile(backend=gpu.training_backend, fullgraph=True)
        calls = {"base": lambda: tuned(images)}
        for forget in ("labels", "sets"):
            calls[forget] = lambda value=wanted[forget]: wf(images, forget=value)
        for forget, call in calls.items():
            already = len(gpu.graphs)
            call().sum().backward()
            graphs = gpu.graphs[already:] or gpu.graphs[-2:]
            rows.append(_row(forget, graphs, None if forget == "base" else units, None))
    return _against_the_first(rows)


def _row(forget: str, graphs: list[Lowered], units: int | None, outside: Outside | None) -> Row:
    return Row(
        forget=forget,
        kernels=sum(len(graph.triton) for graph in graphs),
        library_calls=sum(len(graph.library) for graph in graphs),
        bytes_moved=sum(graph.traffic(units) for graph in graphs),
        ratio=1.0,
        host_reads=sum(len(graph.host_reads) for graph in graphs),
        mutated_inputs=sum(len(graph.mutated) for graph in graphs),
        refused_by_cuda_graphs=[reason for graph in graphs for reason in graph.refused],
        captured=bool(graphs) and all(graph.captured == 1 for graph in graphs),
        kernels_outside=0 if outside is None else len(outside.kernels),
        waits_outside=0 if outside is None else len(outside.waits),
    )


def _against_the_first(rows: list[Row]) -> list[Row]:
    for row in rows:
        row.ratio = row.bytes_moved / rows[0].bytes_moved
    return rows


def settings(args: argparse.Namespace) -> list[Setting]:
    """What the table has, what matters most first.

    Left out: training in half precision (untraining runs in float32, or under autocast, whose
    graphs are those of the forward's dtypes), channels_last where hardly a layer is a convolution,
    and, beyond float16, the other ways to compile and the other mode.
    """
    found = [
        *(Setting(model) for model in args.models),
        *(Setting(model, way="torch.compile(wf)") for model in args.models),
        *(Setting(model, way=PACKAGE) for model in args.models),
        *(Setting(m, mode="max-autotune") for m in args.models if m not in CONVOLUTIONAL),
        *(
            Setting(m, way="torch.compile(wf)", mode="max-autotune")
            for m in args.models
            if m not in CONVOLUTIONAL
        ),
        *(Setting(m, memory_format="channels_last") for m in args.models if m in CONVOLUTIONAL),
        *(Setting(model, "float32", step="training", batch=8) for model in args.models),
        *(Setting(model, "float32") for model in args.models),
        *(Setting(model, "bfloat16") for model in args.models),
        *(
            Setting(model, dtype, "channels_last")
            for dtype in ("float32", "bfloat16")
            for model in args.models
            if model in CONVOLUTIONAL
        ),
    ]
    return [
        s
        for s in found
        if s.dtype in args.dtypes and s.memory_format in args.formats and s.step in args.steps
    ]


def run(args: argparse.Namespace) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS
    ).stdout.strip()
    facts = {"command": " ".join(sys.argv), "commit": commit, **bench.environment()}
    facts |= {"gpu": "A100 properties: lowered, not run"}
    current, wf = None, None
    done = set() if args.again else {_key(line)[:-1] for line in stored(args.out)}
    for setting in settings(args):
        if tuple(asdict(setting).values()) in done:
            continue
        if setting.model != current or wf is None:
            torch.manual_seed(0)
            current, wf = setting.model, apply(build(setting.model).eval(), setting.pixels)
        began = time.process_time()
        rows = lower(setting, wf)
        lines = [{**asdict(setting), **asdict(row), **facts} for row in rows]
        with open(args.out, "a", encoding="utf-8") as file:  # all rows of a setting, or none
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        print(*asdict(setting).values(), *rows, sep="\n  ")
        print(f"{time.process_time() - began:.0f} s of processor time", flush=True)
        gc.collect()


def stored(path: Path) -> list[dict[str, Any]]:
    """The newest line of every setting and form of ``forget``."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return list({_key(line): line for line in map(json.loads, text.splitlines())}.values())


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in (*Setting.__dataclass_fields__, "forget"))


def table(lines: list[dict[str, Any]]) -> str:
    """One line for each setting: counts of the base model and of labels, ratios of all forms."""
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for line in lines:
        key = tuple(line[name] for name in Setting.__dataclass_fields__)
        groups.setdefault(key, {})[line["forget"]] = line
    head = (
        *("model", "dtype", "memory", "step", "compiled by", "mode"),
        *("kernels, base / labels", "library calls", "GB, base", "labels", "sets", "one row"),
        *("kernels outside", "stops CUDA graphs, waits"),
    )
    text = ["| " + " | ".join(head) + " |", "|" + "---|" * 6 + "---:|" * 8]
    order = {name: i for i, name in enumerate(MODELS)}
    for key, rows in sorted(groups.items(), key=lambda g: (order[g[0][0]], STEPS.index(g[0][3]))):
        text.append("| " + " | ".join([*map(str, key[:6]), *_cells(rows)]) + " |")
    return "\n".join(text)


def _cells(rows: dict[str, dict[str, Any]]) -> list[str]:
    base, labels = rows["base"], rows["labels"]
    ratios = [f"{rows[f]['ratio']:.3f}" if f in rows else "" for f in ("labels", "sets", "one row")]
    mixed = [row for forget, row in rows.items() if forget != "base"]
    outside = [str(row["kernels_outside"]) for row in mixed]
    stops = sum(
        row["host_reads"]
        + row["mutated_inputs"]
        + len(row["refused_by_cuda_graphs"])
        + row["waits_outside"]
        + (not row["captured"])
        for row in mixed
    )
    return [
        f"{base['kernels']} / {labels['kernels']}",
        f"{base['library_calls']} / {labels['library_calls']}",
        f"{base['bytes_moved'] / 1e9:.2f}",
        *ratios,
        ", ".join(outside) if labels["step"] == "forward" else "",
        str(stops) if stops else "none",
    ]


# ---- one block, read off the code -----------------------------------------------------------


def block() -> str:
    """What the host launches in the second of three blocks of a ViT-T: base model and labels."""
    setting = Setting("vit_tiny")
    torch.manual_seed(0)
    wf = apply(build(setting.model, depth=3).eval(), setting.pixels)
    with pretended_gpu() as gpu, torch.no_grad():
        wf.alphas.requires_grad_(False)
        to_device(wf, DTYPES[setting.dtype], channels_last=False)
        images, wanted = inputs(setting, device="cuda")
        wf.compile(backend=gpu.backend, fullgraph=True)
        wf(images)
        wf(images, forget=wanted["labels"])
        base, mixed = _between(gpu.graphs[0].launches), _between(gpu.graphs[-1].launches)
    parts = [BLOCK, "## Base model", *_listed(base), "## Labels", *_listed(mixed)]
    return "\n".join(parts) + "\n"


def _between(launches: list[str]) -> list[str]:
    """From after the first attention to the second, which ends a block."""
    ends = [place for place, name in enumerate(launches) if "attention" in name]
    return launches[ends[0] + 1 : ends[1] + 1]


def _listed(launches: list[str]) -> list[str]:
    return ["", *(f"{place}. `{name}`" for place, name in enumerate(launches, 1)), ""]


BLOCK = """# One block of a ViT-T as a GPU would run it: lowered, not run

Made by `python benchmarks/gpu_lowering.py --block`: float16, 64 images, default mode. What the host
launches from after one block's attention to the next one's, in order, in the code that inductor
wrote. `addmm`, `mm` and attention are library calls, which take nothing in but what they are for.
"""
TEXT = """# The GPU code of a mixed batch: lowered, not run

Rebuilt by `python benchmarks/gpu_lowering.py --table` from `gpu_lowering.jsonl`, which has each
row's command, commit and environment. Nothing here is a time: `torch.compile` wrote the code for an
A100 on a machine without one, and the code was counted. `docs/gpu.md` says how.

Ratios are bytes moved by the mixed batch over bytes moved by the base model, compiled the same way.
In training steps the base model trains all its weights, the filtered one its alphas.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--steps", nargs="*", default=list(STEPS), choices=STEPS)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_lowering.jsonl")
    parser.add_argument("--again", action="store_true", help="also what is stored already")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--block", action="store_true", help="only list the calls of a block")
    args = parser.parse_args()
    if args.block:
        (RESULTS / "gpu_vit_block.md").write_text(block(), encoding="utf-8")
        return
    if not args.table:
        run(args)
    text = TEXT + table(stored(args.out)) + "\n"
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
