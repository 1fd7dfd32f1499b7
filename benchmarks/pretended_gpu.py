"""Lower ``torch.compile``'s code for a CUDA device on a machine that has none, and read it.

    with pretended_gpu() as gpu:                      # fake tensors, answered device queries
        to_device(model, torch.half)                  # in place: parameters without values
        x = torch.empty(64, 3, 224, 224, device="cuda", dtype=torch.half)
        torch.compile(model, backend=gpu.backend)(x)
    gpu.graphs[0].triton, gpu.graphs[0].traffic()

Inductor's own lowering writes the code; nothing is run, and every graph answers with fake tensors.
Attention is assumed to take the kernels PyTorch chooses on such a device (flash attention in half
precision without a mask, the memory-efficient one elsewhere). It leans on torch's insides, written
for torch 2.15: ``why_not`` says in words where they have moved.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import torch._inductor.compile_fx as compile_fx
import torch.utils._triton
from torch import Tensor, nn
from torch._dynamo import device_interface
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
A100 = SimpleNamespace(
    name="NVIDIA A100-SXM4-80GB",
    major=8,
    minor=0,
    multi_processor_count=108,
    total_memory=80 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=166912,
    shared_memory_per_multiprocessor=167936,
    L2_cache_size=40 << 20,
    gcnArchName="",
    is_integrated=False,
    is_multi_gpu_board=False,
    clock_rate=1410000,
    memory_clock_rate=1215000,
    memory_bus_width=5120,
)
# Lines of the wrapper for which the host waits for the device, or copies from it.
WAITS = re.compile(
    r"\.item\(|\.tolist\(|\.cpu\(|_local_scalar_dense|synchronize|nonzero|device_put|\.to\("
)
LIBRARY = re.compile(r"(extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.[\w.]+)\(")


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
    """

    code: str = field(default="", repr=False)
    accesses: list[dict[str, int]] = field(default_factory=list, repr=False)
    shapes: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict, repr=False)
    inputs: set[str] = field(default_factory=set, repr=False)
    refused: list[str] = field(default_factory=list)
    mutated: list[int] = field(default_factory=list)
    captured: int = 0
    backward: bool = False

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
        return output if isinstance(output, (tuple, list)) else (output,)

    def capture(parts: list[Any]) -> None:
        record.captured = len(parts)

    runner = SimpleNamespace(partitions=[], recursively_apply_fns=capture)
    return SimpleNamespace(__file__="/dev/null", key="lowered", runner=runner, call=call)


@contextmanager
def pretended_gpu(*, fake: bool = True, **settings: Any) -> Iterator[Gpu]:
    """Inside, ``cuda`` is an A100 and new tensors are fake; ``settings`` are inductor's."""
    settings = {
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
        "compile_threads": 1,
        "shape_padding": False,  # would time matrix products on the device
        "triton.cudagraphs": True,
        **settings,
    }
    _forget_answers()
    try:
        with ExitStack() as stack:
            for patch in _patches():
                stack.enter_context(patch)
            stack.enter_context(_attention_of_a_gpu())
            stack.enter_context(config.patch(settings))
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
            if fake:
                stack.enter_context(FakeTensorMode())
            yield Gpu()
    finally:
        _forget_answers()


def _forget_answers() -> None:
    """Whether there is a triton for this machine's devices is asked once and kept."""
    torch._dynamo.reset()
    for value in vars(torch.utils._triton).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def _patches() -> list[Any]:
    """Answers to every question that torch and triton ask of the device while they lower."""
    from triton.runtime.driver import driver

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: A100,
        "get_device_capability": lambda device=None: (A100.major, A100.minor),
        "get_device_name": lambda device=None: A100.name,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: None,
        "set_device": lambda device: None,
        "is_current_stream_capturing": lambda: False,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    face = device_interface.CudaInterface
    known = set(answers) & {name for name in dir(face) if not name.startswith("_")}
    of_face = {name: answers[name] for name in known if name != "get_device_capability"}
    of_face |= {"exchange_device": lambda device: 0, "maybe_exchange_device": lambda device: 0}
    of_face |= {"get_raw_stream": lambda device: 0}
    pretended = _triton_driver()
    cuda_allocator = "_cuda_cudaCachingAllocator_is_enabled"
    return [
        *(mock.patch.object(torch.cuda, name, answer) for name, answer in answers.items()),
        *(mock.patch.object(face, n, staticmethod(answer)) for n, answer in of_face.items()),
        mock.patch.object(driver, "_active", pretended),
        mock.patch.object(driver, "_default", pretended),
        mock.patch.object(FakeTensorMode, "avoid_device_init", property(lambda self: True)),
        mock.patch.object(torch.accelerator, "is_available", _no),
        mock.patch.dict(device_interface.caching_worker_device_properties, {"cuda": [A100]}),
        mock.patch.dict(device_interface.caching_worker_current_devices, {"cuda": 0}),
        mock.patch.object(torch._C, cuda_allocator, _yes, create=True),
        _folding_on_the_cpu(),
    ]


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


def _triton_driver() -> Any:
    """What triton asks its driver while kernels are written."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import ty_to_cpp

    capability = A100.major, A100.minor
    return SimpleNamespace(
        launcher_cls=None,
        get_current_target=lambda: GPUTarget("cuda", 10 * A100.major + A100.minor, A100.warp_size),
        get_current_device=lambda: 0,
        get_device_capability=lambda device=0: capability,
        get_active_torch_device=lambda: DEVICE,
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True,
        map_python_to_cpp_type=ty_to_cpp,
    )


def _folding_on_the_cpu() -> Any:
    """Inductor evaluates constants such as ``full(1.0)`` on their device; here, on the CPU."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder

    real = Folder._deduce_value

    def deduce(self: Any, node: Any) -> Any:
        if node.target is torch.ops.prims.device_put.default:
            return self.env[node.args[0]]
        kept = node.kwargs
        if "device" not in kept or torch.device(kept["device"] or "cpu").type == "cpu":
            return real(self, node)
        node.kwargs = {**kept, "device": torch.device("cpu")}
        try:
            return real(self, node)
        finally:
            node.kwargs = kept

    return mock.patch.object(Folder, "_deduce_value", deduce)


@contextmanager
def _attention_of_a_gpu() -> Iterator[None]:
    """CUDA's choice of an attention kernel asks the driver; without one it is plain products."""
    op = aten.scaled_dot_product_attention.default
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    before = op.py_kernels.get(key)
    op.py_kernels[key] = _attention
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        op._dispatch_cache.clear()
        if before is None:
            del op.py_kernels[key]
        else:
            op.py_kernels[key] = before


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is None and q.dtype in (torch.float16, torch.bfloat16):
        flash = aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]
    needs_sum = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if attn_mask is not None:
        last = attn_mask.shape[-1]  # the kernel wants this axis padded to 16 bytes, as eager does
        padded = nn.functional.pad(attn_mask, (0, -last % 8))[..., :last]
        attn_mask = padded.expand(*q.shape[:3], k.shape[2])
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask, needs_sum, dropout_p, is_causal, scale=scale)[0]


@contextmanager
def templates_chosen() -> Iterator[None]:
    """Inside, ``max-autotune`` takes the first Triton template; a device would time them all."""
    from torch._inductor.select_algorithm import AlgorithmSelectorCache, TritonTemplateCaller

    def choose(self: Any, name: str, choices: list[Any], *args: Any, **kwargs: Any) -> Any:
        templates = [c for c in choices if isinstance(c, TritonTemplateCaller)]
        choice = (templates or choices)[0]
        return choice.output_node(), choice

    with mock.patch.object(AlgorithmSelectorCache, "__call__", choose):
        yield


def to_device(
    module: nn.Module,
    dtype: torch.dtype | None = None,
    *,
    channels_last: bool = False,
    device: str = "cuda",
) -> nn.Module:
    """In place, inside ``pretended_gpu``: parameters and buffers without values on the device.

    ``alphas`` keep their float32, as ``apply_weight_filtering`` makes them.
    """
    moved: dict[int, Tensor] = {}
    for part in module.modules():
        for kept in (part._parameters, part._buffers):
            for name, old in kept.items():
                if old is None:
                    continue
                if id(old) not in moved:
                    cast = old.is_floating_point() and name != "alphas"
                    moved[id(old)] = _without_values(old, dtype if cast else None, device)
                    if channels_last and old.ndim == 4:
                        strided = moved[id(old)].detach().to(memory_format=torch.channels_last)
                        moved[id(old)] = _like(old, strided)
                kept[name] = moved[id(old)]  # type: ignore[assignment]
    return module


def _without_values(old: Tensor, dtype: torch.dtype | None, device: str) -> Tensor:
    new = torch.empty_strided(old.shape, old.stride(), dtype=dtype or old.dtype, device=device)
    return _like(old, new)


def _like(old: Tensor, new: Tensor) -> Tensor:
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def why_not() -> str | None:
    """Why nothing can be lowered here, or ``None``; tries the smallest graph."""
    if torch.cuda.is_available():
        return "there is a real device: lowering for a pretended one would disturb it"
    try:
        with pretended_gpu() as gpu, torch.no_grad():
            torch.compile(lambda x: x * 2 + 1, backend=gpu.backend)(torch.empty(64, device="cuda"))
        (graph,) = gpu.graphs
        found = len(graph.triton), graph.traffic(), graph.captured
    except Exception as error:
        return f"torch {torch.__version__} lowers otherwise: {type(error).__name__}: {error}"[:300]
    if found != (1, 512, 1):
        return f"torch {torch.__version__} lowers otherwise: x * 2 + 1 gave {found}"
    return None
