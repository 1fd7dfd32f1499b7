"""Exported filtered graphs against the plain model's export: size of the file, time of a batch.

    python benchmarks/export.py                  # ResNet-18 and ViT-T, minutes on two cores
    python benchmarks/export.py --models wfilter:cnn-digits --rounds 3 --out /tmp

writes ``benchmarks/results/export.md``. Every graph runs once per round, so that a busy machine
slows all of them; ratios are to the plain model's graph of the same format. ``.pt2`` programs run
as torch.export gives them back, ``.onnx`` graphs in onnxruntime, all with the same threads.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wfilter
from common import RESULTS
from wfilter import bench, zoo
from wfilter.files.export import Exported

SIZES = {"torchvision:resnet18": 64}  # what two cores can time; others at their own size
GRAPHS = ("plain", "labels", "sets")
HEADER = "| model | images | format | graph | MiB | median ms | quartiles | x plain | max diff |"


@dataclass
class Graph:
    """One exported file, ready to run, and its times."""

    kind: str
    written: Exported
    run: Callable[[], Any]
    times: list[float] = field(default_factory=list)


def open_graph(path: Path, inputs: dict[str, Tensor]) -> Callable[[], Any]:
    """A call that answers the inputs by the graph in the file."""
    if path.suffix == ".pt2":
        program = torch.export.load(path).module()
        return lambda: program(*inputs.values())
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    arrays = {name: value.numpy() for name, value in inputs.items()}
    return lambda: session.run(None, arrays)


def make_graphs(
    plain: nn.Module, wf: wfilter.FilteredModel, images: Tensor, folder: Path, suffix: str
) -> list[Graph]:
    """The plain model and both kinds of filtered graph, written and opened."""
    classes = wf.num_classes
    forget = {
        "labels": torch.arange(len(images)) % classes,
        "sets": torch.rand(len(images), classes) < 3 / classes,
    }
    graphs = []
    for kind in GRAPHS:
        model = plain if kind == "plain" else wf
        options = {} if kind == "plain" else {"forget": kind}
        path = folder / f"{kind}{suffix}"
        written = wfilter.export(model, path, example_input=images[:1], **options)
        inputs = {"images": images, **({} if kind == "plain" else {"forget": forget[kind]})}
        graphs.append(Graph(kind, written, open_graph(path, inputs)))
    return graphs


@torch.no_grad()
def time_graphs(graphs: list[Graph], rounds: int) -> None:
    """In place: interleaved rounds, the first two to warm up."""
    for number in range(rounds + 2):
        for graph in graphs:
            began = time.perf_counter()
            graph.run()
            if number > 1:
                graph.times.append(1000 * (time.perf_counter() - began))


def table_lines(name: str, images: Tensor, suffix: str, graphs: list[Graph]) -> list[str]:
    """The graphs' lines of the table."""
    shape = f"{len(images)} of {images.shape[-1]} x {images.shape[-1]}"
    lines = []
    for graph in graphs:
        low, middle, high = statistics.quantiles(graph.times, n=4)
        pairs = zip(graph.times, graphs[0].times)
        ratio = statistics.median(mine / plain for mine, plain in pairs)
        cells = (
            *(name, shape, suffix, graph.kind, f"{graph.written.size / 2**20:.2f}"),
            *(f"{middle:.1f}", f"{low:.1f} to {high:.1f}", f"{ratio:.2f}"),
            f"{graph.written.largest_difference:.0e}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def measure(name: str, batch: int, rounds: int) -> list[str]:
    """All formats of one model."""
    torch.manual_seed(0)
    facts = zoo.input_facts(name)
    size = SIZES.get(name, facts.size)
    images = torch.rand(batch, facts.channels, size, size)
    model = zoo.build(name, num_classes=10)
    plain = copy.deepcopy(model)
    wf = bench.randomise(wfilter.apply_weight_filtering(model, example_input=images[:1]))
    lines = []
    for suffix in (".pt2", ".onnx"):
        with tempfile.TemporaryDirectory() as folder:
            graphs = make_graphs(plain, wf, images, Path(folder), suffix)
            time_graphs(graphs, rounds)
        lines += table_lines(name, images, suffix, graphs)
        print("\n".join(lines[-len(GRAPHS) :]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = ["torchvision:resnet18", "timm:vit_tiny_patch16_224"]
    parser.add_argument("--models", nargs="+", default=default)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    lines = [line for name in args.models for line in measure(name, args.batch, args.rounds)]
    command = f"python benchmarks/export.py --batch {args.batch} --rounds {args.rounds}"
    machine = ", ".join(f"{key} {value}" for key, value in bench.environment().items())
    text = f"""# Exported graphs: filtered against plain

Made by `{command}` ({machine}). `labels` and `sets` take what each image forgets as a second
input; `plain` is the base model's own export. Ratios are medians over interleaved rounds. The file
grows by the alphas, `num_classes` numbers for each unit.

{HEADER}
|{" --- |" * HEADER.count(" |")}
"""
    (args.out / "export.md").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
