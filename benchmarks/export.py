"""Exported files against the model they came from: size, and time of a batch in every engine.

    python benchmarks/export.py                  # ResNet-18 and ViT-T, a quarter of an hour
    python benchmarks/export.py --models wfilter:cnn-digits --rounds 3 --engines onnx --out /tmp

appends to ``benchmarks/results/export.jsonl`` and writes its table, ``export.md``. Every engine
runs every kind of batch once per round, so that a busy machine slows all of them; ratios are
medians over rounds, of processor time where there is one thread. Engines: eager torch,
``torch.compile``, the graph of ``torch.export``, a package compiled ahead of time
(``export(..., aoti=True)``), and onnxruntime, all with the same threads.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wfilter
from common import RESULTS, append_line, origin, read_lines
from wfilter import bench, zoo

SIZES = {"torchvision:resnet18": 64}  # what two cores can time; others at their own size
KINDS = ("plain", "labels", "sets")
ENGINES = ("eager", "compiled", "graph", "aoti", "onnx")


@dataclass
class Run:
    """One kind of batch in one engine, ready to run, and its times in milliseconds."""

    engine: str
    kind: str
    call: Callable[[], Any]
    mebibytes: float | None = None
    difference: float | None = None
    times: list[float] = field(default_factory=list)


def open_file(path: Path, inputs: list[Tensor]) -> Callable[[], Any]:
    """A call that answers the inputs by the exported file."""
    if path.suffix == ".pt2":
        program = wfilter.load_exported(path)
        return lambda: program(*inputs)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    arrays = {name: value.numpy() for name, value in zip(("images", "forget"), inputs)}
    return lambda: session.run(None, arrays)


def make_run(
    engine: str, kind: str, models: dict[str, nn.Module], inputs: list[Tensor], folder: Path
) -> Run:
    """The plain model or the filtered one in an engine."""
    model = models["plain" if kind == "plain" else "filtered"]
    if engine in ("eager", "compiled"):
        model = copy.deepcopy(model)
        if engine == "compiled":
            model.compile()
        return Run(engine, kind, lambda: model(*inputs))
    path = folder / f"{engine}-{kind}{'.onnx' if engine == 'onnx' else '.pt2'}"
    options = {} if kind == "plain" else {"forget": kind}
    written = wfilter.export(
        model, path, example_input=inputs[0][:1], aoti=engine == "aoti", **options
    )
    mebibytes = written.size / 2**20
    return Run(engine, kind, open_file(path, inputs), mebibytes, written.largest_difference)


@torch.no_grad()
def time_runs(runs: list[Run], rounds: int) -> None:
    """In place: interleaved rounds, the first two to warm up."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for number in range(rounds + 2):
        for run in runs:
            began = clock()
            run.call()
            if number > 1:
                run.times.append(1000 * (clock() - began))


def lines(name: str, images: Tensor, runs: list[Run]) -> Iterator[dict[str, Any]]:
    """What is stored of each run; ratios to the plain model in the same engine, and in eager."""
    times = {(run.engine, run.kind): run.times for run in runs}
    for run in runs:
        low, middle, high = statistics.quantiles(run.times, n=4)
        over_plain = _ratio(run.times, times[run.engine, "plain"])
        eager = times.get(("eager", run.kind))
        yield {
            **{"model": name, "batch": len(images), "pixels": images.shape[-1]},
            **{"engine": run.engine, "kind": run.kind, "rounds": len(run.times)},
            **{"mebibytes": run.mebibytes, "largest_difference": run.difference},
            **{"median_ms": middle, "quartiles_ms": [low, high]},
            "over_plain": over_plain,
            "over_eager": None if eager is None else _ratio(run.times, eager),
        }


def _ratio(mine: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, others))


def measure(name: str, args: argparse.Namespace) -> None:
    """All engines and kinds of one model, stored."""
    torch.manual_seed(0)
    inputs = zoo.input_format(name)
    size = SIZES.get(name, inputs.size)
    images = torch.rand(args.batch, inputs.channels, size, size)
    model = zoo.build(name, num_classes=10).eval()
    plain = copy.deepcopy(model)
    wf = bench.randomise(wfilter.apply_weight_filtering(model, example_input=images[:1]))
    forget = {
        "plain": [],
        "labels": [torch.arange(args.batch) % 10],
        "sets": [torch.rand(args.batch, 10) < 0.3],
    }
    models = {"plain": plain, "filtered": wf}
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            make_run(engine, kind, models, [images, *forget[kind]], Path(folder))
            for engine in args.engines
            for kind in KINDS
        ]
        time_runs(runs, args.rounds)
    for line in lines(name, images, runs):
        append_line(args.out / "export.jsonl", {**line, **origin()})
        print(line, flush=True)


HEADER = (
    "| model | images | engine | batch | MiB | median ms | quartiles | x plain | x eager | diff |"
)


def table(stored: list[dict[str, Any]]) -> str:
    """The newest line of each model, engine and kind."""
    newest = {(line["model"], line["engine"], line["kind"]): line for line in stored}
    rows = []
    for line in newest.values():
        low, high = line["quartiles_ms"]
        size, difference = line["mebibytes"], line["largest_difference"]
        over_eager = line["over_eager"]
        cells = (
            line["model"].split(":")[1],
            f"{line['batch']} of {line['pixels']} x {line['pixels']}",
            *(line["engine"], line["kind"], "" if size is None else f"{size:.1f}"),
            *(f"{line['median_ms']:.1f}", f"{low:.1f} to {high:.1f}"),
            f"{line['over_plain']:.2f}",
            "" if over_eager is None else f"{over_eager:.2f}",
            "" if difference is None else f"{difference:.0e}",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([HEADER, "|" + "---|" * HEADER.count(" |"), *rows])


TEXT = """# Exported files: filtered against plain, in every engine

Made by `python benchmarks/export.py`; `export.jsonl` has each line's command, commit and machine.
`labels` and `sets` take what each image forgets as a second input; `plain` is the base model.
Ratios are medians over interleaved rounds: to the plain model in the same engine, and to eager
torch. Files grow by the alphas, `num_classes` numbers for each unit.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = ["torchvision:resnet18", "timm:vit_tiny_patch16_224"]
    parser.add_argument("--models", nargs="+", default=default)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    for name in args.models:
        measure(name, args)
    text = TEXT + table(read_lines(args.out / "export.jsonl")) + "\n"
    (args.out / "export.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
