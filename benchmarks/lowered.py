"""What inductor lowered for a device: kernels, library calls, bytes moved, what stops CUDA graphs.

``Gpu`` is a backend for ``torch.compile`` that keeps each graph as ``Lowered`` instead of running
it, inside ``pretended_gpu``; ``Outside`` watches what happens beside those graphs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import torch._inductor.compile_fx as compile_fx
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
# Lines of the wrapper for which the host waits for the device, or copies from it.
WAITS = re.compile(
    r"\.item\(|\.tolist\(|\.cpu\(|_local_scalar_dense|synchronize|nonzero|device_put|\.to\("
)
LIBRARY = re.compile(r"(extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.[\w.]+)\(")
LAUNCH = re.compile(rf"(triton_\w+)\.run\(|{LIBRARY.pattern}")


@dataclass
class Lowered:
    """One graph as inductor would run it on the device.

    Attributes:
        code: The wrapper and all Triton kernels.
        accesses: For each kernel, the bytes it moves of each buffer, by inductor's count.
        shapes: Shape and bytes of an entry of each of those buffers.
        inputs: Names of the buffers that the graph is given.
        refused: Why CUDA graphs would skip this graph.
        mutated: Inputs that the graph writes to.
        captured: The parts a CUDA graph would record; anything but 1 leaves something outside.
        calls: Inputs and outputs of each call, fake tensors all; see ``interpreted.py``.
    """

    code: str = field(default="", repr=False)
    accesses: list[dict[str, int]] = field(default_factory=list, repr=False)
    shapes: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict, repr=False)
    inputs: set[str] = field(default_factory=set, repr=False)
    refused: list[str] = field(default_factory=list)
    mutated: list[int] = field(default_factory=list)
    captured: int = 0
    backward: bool = False
    calls: list[tuple[list[Any], Any]] = field(default_factory=list, repr=False)

    @property
    def wrapper(self) -> str:
        """The host's code: without the kernels' sources and without comments."""
        text = re.sub(
            r"async_compile\.triton\(.*?''', device_str='cuda'\)", "", self.code, flags=16
        )
        text = text.split("def get_args")[0].split("def benchmark_compiled_module")[0]
        lines = text[text.index("async_compile = ") :].splitlines()
        return "\n".join(line for line in lines if not line.lstrip().startswith("#"))

    @property
    def triton(self) -> list[str]:
        """Triton kernels, in the order of their launches."""
        return re.findall(r"(triton_\w+)\.run\(", self.wrapper)

    @property
    def library(self) -> list[str]:
        """Calls of cuDNN, cuBLAS and attention kernels, in order."""
        found = map(LIBRARY.search, self.wrapper.splitlines())
        return [match[1] for match in found if match is not None]

    @property
    def launches(self) -> list[str]:
        """Triton kernels and library calls together, in order."""
        found = map(LAUNCH.search, self.wrapper.splitlines())
        return [match[1] or match[2] for match in found if match is not None]

    @property
    def host_reads(self) -> list[str]:
        """Lines for which the host would wait for the device."""
        return [line.strip() for line in self.wrapper.splitlines() if WAITS.search(line)]

    def traffic(self, units: int | None = None) -> int:
        """Bytes moved to and from the device's memory.

        Every kernel reads each of its inputs and writes each of its outputs once; what stays inside
        a kernel moves nothing. A table whose last axis has ``units`` entries (gates, alphas) is
        counted once for the whole graph: inductor would charge all of it to each kernel that reads
        the slice of one target. A table that the graph makes itself counts twice, written and read.
        """
        total, tables = 0, set()
        for kernel in self.accesses:
            for name, size in kernel.items():
                if units is not None and self._is_table(name, units):
                    tables.add(name)
                else:
                    total += size
        for name in tables:
            shape, width = self.shapes[name]
            total += torch.Size(shape).numel() * width * (1 if name in self.inputs else 2)
        return total

    def _is_table(self, name: str, units: int) -> bool:
        shape = self.shapes.get(name, ((), 0))[0]
        return len(shape) == 2 and shape[-1] == units


class Outside(TorchDispatchMode):
    """Operations on the device outside compiled graphs: kernels, and copies the host waits for.

    ``graphs`` are those that ran meanwhile.
    """

    in_graph = False  # a lowered graph answers: its operations are not outside
    watching: ClassVar[list[Outside]] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo runs nothing compiled inside a mode that is not."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.waits: list[str] = []
        self.graphs: list[Lowered] = []

    def __enter__(self) -> Outside:
        Outside.watching.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Outside.watching.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Outside.in_graph:
            return func(*args, **kwargs)
        self._note(func, args, kwargs)
        output = func(*args, **kwargs)
        leaves = [t for t in (output, *args) if isinstance(t, Tensor)]
        free = func.is_view or func.name().startswith(("prim::", "aten::empty"))
        if not free and any(leaf.device.type == "cuda" for leaf in leaves):
            self.kernels.append(func.name().removeprefix("aten::"))
        return output

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        there = kwargs.get("device")
        if func is aten._to_copy.default and there is not None:
            moved = torch.device(there).type != args[0].device.type
            if moved and not kwargs.get("non_blocking"):
                self.waits.append(f"{args[0].device.type} to {there}, {tuple(args[0].shape)}")
        if func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default):
            self.waits.append(func.name())


@contextmanager
def _answering(graph: Lowered) -> Iterator[None]:
    for watcher in Outside.watching:
        watcher.graphs.append(graph)
    Outside.in_graph = True
    try:
        yield
    finally:
        Outside.in_graph = False


class Gpu:
    """A backend for ``torch.compile`` that keeps what it lowers."""

    def __init__(self) -> None:
        self.graphs: list[Lowered] = []

    def backend(self, graph: Any, inputs: Any, **_: Any) -> Any:
        """Lower a forward of fake tensors on the device."""
        return compile_fx.compile_fx(graph, inputs, inner_compile=self._lower)

    def training_backend(self, graph: Any, inputs: Any, **_: Any) -> Any:
        """Lower both graphs of a training step of real tensors on the *CPU*, moved to the device.

        The autograd engine asks the CUDA driver for streams, even for fake tensors. The graphs
        answer with tensors of the right shapes that nobody has filled.
        """
        return compile_fx.compile_fx(graph, inputs, inner_compile=self._lower_moved)

    def _lower(self, graph: Any, inputs: Any, **options: Any) -> Any:
        record = Lowered(backward=bool(options.get("is_backward")))
        with _recording(record, copy.deepcopy(graph)):
            lowered = compile_fx.compile_fx_inner(graph, inputs, **options)
        record.mutated = sorted(getattr(lowered, "mutated_input_idxs", []))
        self.graphs.append(record)
        return lowered

    def _lower_moved(self, graph: Any, inputs: Any, **options: Any) -> Any:
        from torch.fx.passes.fake_tensor_prop import FakeTensorProp

        (out,) = [node for node in graph.graph.nodes if node.op == "output"]
        answers = [getattr(node, "meta", {}).get("val") for node in out.args[0]]
        holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        values = [node.meta["val"] for node in holders]
        mode = next(value.fake_mode for value in values if hasattr(value, "fake_mode"))
        with mode:
            moved = [_elsewhere(value) for value in values]
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": DEVICE}
        graph.recompile()
        answers = [_described(value) for value in answers]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*moved)
        self._lower(graph, moved, **options)

        def call(args: list[Any]) -> Any:
            args.clear()
            return [None if facts is None else _empty(*facts) for facts in answers]

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _described(value: Any) -> Any:
    """Shape, strides and dtype of an output, before its node is moved."""
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else None


def _empty(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def _elsewhere(value: Any) -> Any:
    """A tensor like this one on the device."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)


@contextmanager
def _recording(record: Lowered, answers: Callable[..., Any]) -> Iterator[None]:
    """Inside, lowering ends with the code; the graph then answers by ``answers``."""
    skipped = "log_cudagraph_skip_and_bump_counter"
    note = record.refused.append

    def module(graph: GraphLowering) -> Any:
        _read(graph, record)
        return _module(record, answers)

    with (
        mock.patch.object(GraphLowering, "compile_to_module", module),
        mock.patch(f"torch._inductor.output_code.{skipped}", note),
        mock.patch(f"torch._inductor.compile_fx.{skipped}", note),
        mock.patch("torch._inductor.compile_fx.cudagraphify", lambda model, *a, **k: model),
    ):
        yield


def _read(graph: GraphLowering, record: Lowered) -> None:
    """In place: what inductor knows of the graph it has written."""
    record.code = graph.codegen()[0].value
    for node in graph.scheduler.nodes:
        record.accesses.append(node.get_read_write_buffer_accesses(True, True))
    hint = graph.sizevars.optimization_hint
    known = {**graph.name_to_buffer, **graph.graph_inputs}
    for name in {name for kernel in record.accesses for name in kernel}:
        try:
            sizes, dtype = known[name].get_size(), known[name].get_dtype()
        except NotImplementedError:  # several outputs at once, as attention has
            continue
        record.shapes[name] = tuple(hint(size, fallback=0) for size in sizes), dtype.itemsize
    record.inputs = set(graph.graph_inputs)


def _module(record: Lowered, answers: Callable[..., Any]) -> Any:
    """What stands for the compiled module: the graph's own operations, and no code."""

    def call(args: list[Any]) -> Any:
        with _answering(record):
            output = answers(*args)
        record.calls.append((list(args), output))
        return output if isinstance(output, (tuple, list)) else (output,)

    def capture(parts: list[Any]) -> None:
        record.captured = len(parts)

    runner = SimpleNamespace(partitions=[], recursively_apply_fns=capture)
    return SimpleNamespace(__file__="/dev/null", key="lowered", runner=runner, call=call)
