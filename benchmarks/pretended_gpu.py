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

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.utils._triton
from torch import Tensor, nn
from torch._dynamo import device_interface
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode

from lowered import DEVICE, Gpu, aten

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
