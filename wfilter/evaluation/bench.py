"""Time a mixed batch against the base model and against what a user could do instead.

First all paths must give equal outputs. Then they run in interleaved rounds, each path once per
round, so that a busy machine slows all of them; each figure is a ratio to the base model in the
same run.
"""

from __future__ import annotations

import copy
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.profiler import ProfilerActivity, profile

from wfilter.core.gates import label_gates
from wfilter.core.messages import first_line
from wfilter.core.model import FilteredModel
from wfilter.core.oracle import gated_weights, one_at_a_time
from wfilter.data.running import synchronise

Forward = Callable[[Tensor, Tensor], Any]


@dataclass
class Timing:
    """One row of the table: a path, eager or compiled, at one batch size and number of labels."""

    model: str
    path: str
    compiled: bool
    batch: int
    labels: int
    median_ms: float
    spread_ms: float
    ratio: float
    peak_mib: float | None
    largest_difference: float | None
    compile_seconds: float | None
    note: str = ""


def environment() -> dict[str, object]:
    """The versions and the machine that the figures depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def bench(
    wf: FilteredModel,
    images: Tensor,
    *,
    name: str = "model",
    labels: int = 10,
    rounds: int = 9,
    compiled: bool = False,
    rivals: bool = False,
    memory: bool = False,
    extra: Mapping[str, Forward | str] | None = None,
    seed: int = 0,
) -> list[Timing]:
    """Time all paths on one batch; the first row is the base model, the yardstick.

    Args:
        wf: The filtered model; its alphas are used as they are.
        images: The batch.
        name: What to call the model in the table.
        labels: How many different classes the batch forgets.
        rounds: Timed rounds, after two that warm up.
        compiled: Compile the base model and the mixed forwards.
        rivals: Also time what a user could do without wfilter.
        memory: Also measure the peak memory of a call; torch's profiler, which does it on a CPU,
            writes to stderr.
        extra: Further paths by name, timed but not compared; a string is the reason it cannot run.
        seed: Of the labels.

    Example:
        >>> import wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="*")
        >>> [row.path for row in bench(wf, torch.rand(8, 4), labels=3, rounds=1)]
        ['base', 'forgetting(c)', 'mixed labels', 'mixed sets']
    """
    generator = torch.Generator().manual_seed(seed)
    distinct = min(labels, wf.num_classes, len(images))
    forget = torch.arange(len(images)) % distinct
    forget = forget[torch.randperm(len(images), generator=generator)].to(images.device)
    with ExitStack() as stack:
        paths = dict(_paths(wf, forget, generator, compiled, stack))
        if rivals:
            paths |= _rivals(wf, forget)
        paths |= {path: forward for path, forward in (extra or {}).items() if callable(forward)}
        rows = _measure(wf, images, forget, paths, name, distinct, rounds, compiled, extra or {})
        for row in rows:
            if memory and not row.note:
                row.peak_mib = _peak_memory(paths[row.path], images, forget)
    for path, reason in (extra or {}).items():
        if isinstance(reason, str):
            blank = Timing(name, path, compiled, len(images), distinct, 0, 0, 0, None, None, None)
            rows.append(replace(blank, note=reason))
    return rows


def _paths(
    wf: FilteredModel, forget: Tensor, generator: torch.Generator, compiled: bool, stack: ExitStack
) -> Iterator[tuple[str, Forward]]:
    """The ways wfilter itself runs a batch; closing ``stack`` ends the ``forgetting`` one."""
    base: Callable[[Tensor], Any] = wf.base
    mixed = wf
    if compiled:
        base, mixed = torch.compile(copy.deepcopy(wf.base)), copy.deepcopy(wf).compile()
    yield "base", lambda x, y: base(x)
    if not compiled:
        inside = stack.enter_context(copy.deepcopy(wf).forgetting(0))
        yield "forgetting(c)", lambda x, y: inside(x)
    yield "mixed labels", lambda x, y: mixed(x, y)
    sets = torch.rand(len(forget), wf.num_classes, generator=generator) < 3 / wf.num_classes
    sets = sets.to(forget.device)
    yield "mixed sets", lambda x, y: mixed(x, sets)


def _rivals(wf: FilteredModel, forget: Tensor) -> dict[str, Forward]:
    """What a user could do instead, with the same result."""
    classes = sorted(set(forget.tolist()))
    copies = {c: wf.bake(c).eval().requires_grad_(False) for c in classes}

    def loop(x: Tensor, y: Tensor, run: Callable[[int, Tensor], Any]) -> Tensor:
        out = x.new_empty(len(x), wf.num_classes)
        for c in classes:
            out[y == c] = run(c, x[y == c])
        return out

    def one_class(c: int, x: Tensor) -> Any:
        return functional_call(wf.base, gated_weights(wf, wf.base, [c]), (x,), tie_weights=False)

    return {
        "per-sample weights (vmap)": lambda x, y: per_sample_weights(wf, x, y),
        "loop over classes": lambda x, y: loop(x, y, one_class),
        f"{len(classes)} baked copies": lambda x, y: loop(x, y, lambda c, part: copies[c](part)),
    }


def per_sample_weights(wf: FilteredModel, x: Tensor, forget: Tensor) -> Tensor:
    """The textbook way: ``vmap`` over ``functional_call``, every sample with weights of its own."""
    gates = label_gates(wf.alphas, forget)
    start, spans = 0, {}
    for target in wf.targets:
        spans[target.name] = slice(start, start + target.units)
        start += target.units
    originals = {t.name: wf.base.get_parameter(t.name) for t in wf.targets}

    def one(image: Tensor, gate: Tensor) -> Any:
        weights = {t.name: originals[t.name] * t.spread(gate[spans[t.name]]) for t in wf.targets}
        return functional_call(wf.base, weights, (image.unsqueeze(0),)).squeeze(0)

    return vmap(one, randomness="different")(x, gates)  # type: ignore[no-any-return]


@torch.no_grad()
def _measure(
    wf: FilteredModel,
    images: Tensor,
    forget: Tensor,
    paths: dict[str, Forward],
    name: str,
    distinct: int,
    rounds: int,
    compiled: bool,
    extra: Mapping[str, object],
) -> list[Timing]:
    expected = one_at_a_time(wf, images[:8], forget[:8])
    rows = {}
    for path, forward in paths.items():
        row = Timing(name, path, compiled, len(images), distinct, 0, 0, 0, None, None, None)
        rows[path] = row
        try:
            began = time.perf_counter()
            output = _clock(forward, images, forget)[1]
            row.compile_seconds = time.perf_counter() - began if compiled else None
            if path not in ("base", "forgetting(c)", "mixed sets", *extra):
                row.largest_difference = float((output[:8] - expected).abs().max())
        except Exception as error:  # a failure is a row, not a skip
            row.note = f"{type(error).__name__}: {first_line(error)[:80]}"
    alive = [path for path in paths if not rows[path].note]
    times: dict[str, list[float]] = {path: [] for path in alive}
    for number in range(rounds + 1):
        for path in alive:
            seconds, _ = _clock(paths[path], images, forget)
            if number:
                times[path].append(1000 * seconds)
    for path in alive:
        rows[path].median_ms = statistics.median(times[path])
        rows[path].spread_ms = _quartile_range(times[path])
        pairs = zip(times[path], times["base"])
        rows[path].ratio = statistics.median(mine / base for mine, base in pairs)
    return list(rows.values())


def _clock(forward: Forward, images: Tensor, forget: Tensor) -> tuple[float, Tensor]:
    """Seconds of one call, and its output.

    One thread on a CPU is timed by what the processor gave it, which a busy machine changes little.
    """
    alone = images.device.type == "cpu" and torch.get_num_threads() == 1
    now = time.process_time if alone else time.perf_counter
    synchronise(images)
    began = now()
    output = forward(images, forget)
    synchronise(images)
    return now() - began, output


@torch.no_grad()
def _peak_memory(forward: Forward, images: Tensor, forget: Tensor) -> float:
    """Peak memory of one call in MiB, less what was in use before it."""
    if images.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _clock(forward, images, forget)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _clock(forward, images, forget)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return float(max(accumulate((size for _, size in changes), initial=0))) / 2**20


def _quartile_range(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    quartiles = statistics.quantiles(values, n=4)
    return quartiles[2] - quartiles[0]


def format_table(rows: list[Timing]) -> str:
    """The rows as text, one line each."""
    head = (
        "model",
        "path",
        "batch",
        "labels",
        "median ms",
        "iqr",
        "x base",
        "peak MiB",
        "max diff",
        "compile s",
    )
    lines = [head]
    for row in rows:
        path = f"{row.path} (compiled)" if row.compiled else row.path
        first = (row.model, path, str(row.batch), str(row.labels))
        if row.note:
            lines.append((*first, row.note, "", "", "", "", ""))
            continue
        difference, seconds = row.largest_difference, row.compile_seconds
        lines.append(
            (
                *first,
                f"{row.median_ms:.1f}",
                f"{row.spread_ms:.1f}",
                f"{row.ratio:.2f}",
                "-" if row.peak_mib is None else f"{row.peak_mib:.0f}",
                "-" if difference is None else f"{difference:.0e}",
                "-" if seconds is None else f"{seconds:.0f}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


def to_json_lines(rows: list[Timing], command: str = "") -> str:
    """One JSON object per row, with the command and the environment."""
    origin = {"command": command, **environment()}
    return "".join(json.dumps({**asdict(row), **origin}) + "\n" for row in rows)


def randomise(wf: FilteredModel, seed: int = 0) -> FilteredModel:
    """In place: alphas that differ from row to row, so that a wrong row would show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        noise = torch.randn(wf.alphas.shape, generator=generator)
        wf.alphas.copy_(3 + 2 * noise.to(wf.alphas.device))
    return wf
