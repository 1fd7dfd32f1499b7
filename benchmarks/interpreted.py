"""Run the GPU code that inductor wrote on CPU tensors: Triton's interpreter instead of a device.

    TRITON_INTERPRET=1 python benchmarks/interpreted.py cnn resnet18 vit swin # minutes

prints, for each model and form of ``forget``, how far the lowered code of ``wf.compile()`` is from
eager. The variable has to be set before triton is imported. Convolutions and matrix products are
torch's own, on the CPU; what is proved is the code around them, in which the gates are.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from triton.runtime.interpreter import interpreter_builder

import wfilter
from lowered import Lowered
from pretended_gpu import pretended_gpu, to_device
from wfilter import bench

# No more than inductor's own largest blocks: it leaves masks out where those divide a size.
LARGEST = {"XBLOCK": 1024, "YBLOCK": 256, "ZBLOCK": 1, "R0_BLOCK": 2048}
LOG1P = """

@triton.jit
def log1p(x):
    return tl.math.log(1.0 + x)
"""


class Kernel:
    """One generated kernel; ``run`` has the interpreter walk through its whole grid."""

    def __init__(self, name: str, source: str):
        text = re.sub(r"@triton_heuristics.*?(?=@triton\.jit)", "", source, flags=re.DOTALL)
        text = text.replace("triton_helpers.set_driver_to_gpu()", "")
        # The device's own library of functions: triton has the same names, but for one.
        text = re.sub(r"\blibdevice\.log1p\b", "log1p", text) + LOG1P
        text = re.sub(r"\blibdevice\.", "tl.math.", text)
        with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
            file.write(text)  # the interpreter reads a kernel's source from its file
        spec = importlib.util.spec_from_file_location(name, file.name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.function = getattr(module, name)
        arguments = re.findall(rf"def {name}\((.*?)\):", text, flags=re.DOTALL)[0].split(",")
        self.arguments = [argument.split(":")[0].strip() for argument in arguments]

    def run(self, *args: Any, stream: Any = None) -> None:
        """Launch on CPU tensors."""
        given = dict(zip((a for a in self.arguments if not a.endswith("BLOCK")), args))
        blocks = {name: self._block(name, given) for name in self.arguments if name not in given}
        sizes = [given.get(f"{axis}numel") for axis in "xyz"]
        each = [blocks.get(f"{axis}BLOCK", 1) for axis in "XYZ"]
        grid = tuple(1 if size is None else -(-size // b) for size, b in zip(sizes, each))
        # On a device inductor switches these assertions on: they refuse bad labels.
        options = dataclasses.replace(interpreter_builder.options, debug=True)
        with mock.patch.object(interpreter_builder, "options", options):
            self.function[grid](*args, **blocks)

    def _block(self, name: str, given: dict[str, Any]) -> int:
        size = int(given[name.lower().replace("block", "numel")])
        return min(LARGEST[name], 1 << max(0, size - 1).bit_length())


class Kernels:
    """Stands for inductor's ``AsyncCompile``."""

    def triton(self, name: str, source: str, device_str: str = "") -> Kernel:
        return Kernel(name, source)

    def wait(self, scope: Any) -> None:
        """All kernels are there already."""


def attention(q: Tensor, k: Tensor, v: Tensor, *more: Any, scale: float | None = None) -> Any:
    """What the device's kernel answers, with its memory layout, by the CPU's."""
    bias = more[0] if more and isinstance(more[0], Tensor) else None  # windows have one
    out = F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
    return [out.transpose(1, 2).contiguous().transpose(1, 2), None, None, None]


def program(graph: Lowered) -> Callable[[list[Any]], Any]:
    """The wrapper's own function, with every launch going to the interpreter."""
    replaced = {
        r"AsyncCompile\(\)": "KERNELS",
        r"with torch\.cuda\._DeviceGuard\(0\):": "if True:",
        r"torch\.cuda\.set_device\(0\)": "pass",
        r"raw_stream0 = get_raw_stream\(0\)": "raw_stream0 = None",
        r"^from torch\._C import _cuda_getCurrentRawStream.*$": "",
        r"^empty_strided_cuda = .*$": "empty_strided_cuda = empty_strided_cpu",
        r"torch\.ops\.aten\._scaled_dot_product_\w+_attention\.default": "ATTENTION",
    }
    code = graph.code.replace("empty_strided_cpu =", "empty_strided_cpu = EMPTY #")
    for pattern, text in replaced.items():
        code = re.sub(pattern, text, code, flags=re.MULTILINE)
    empty = torch._C._dynamo.guards._empty_strided_cpu
    space = {"__name__": "generated", "KERNELS": Kernels(), "ATTENTION": attention, "EMPTY": empty}
    exec(compile(code, "generated", "exec"), space)
    call: Callable[[list[Any]], Any] = space["call"]  # type: ignore[assignment]
    return call


@torch.no_grad()
def lowered_answer(wf: wfilter.FilteredModel, images: Tensor, forget: Tensor) -> Tensor:
    """The logits by the code that ``wf.compile()`` would run on a device."""
    there = copy.deepcopy(wf)
    there.alphas.requires_grad_(False)
    values = [value.detach() for value in chain(wf.parameters(), wf.buffers())]
    with pretended_gpu() as gpu:
        to_device(there)
        kept = list(zip(chain(there.parameters(), there.buffers()), values))
        given = images, forget
        fakes = [torch.empty(v.shape, dtype=v.dtype, device="cuda") for v in given]
        kept += list(zip(fakes, given))
        there.compile(backend=gpu.backend, fullgraph=True)
        there(fakes[0], forget=fakes[1])
    real = {id(fake): value for fake, value in kept}
    for graph in gpu.graphs:  # one makes the gates, another is the forward
        (call,) = graph.calls
        answers = program(graph)([_real(value, real) for value in call[0]])
        real |= {id(fake): value for fake, value in zip(call[1], answers)}
    logits: Tensor = answers[0]
    return logits


def _real(value: Any, real: dict[int, Any]) -> Any:
    return real[id(value)] if isinstance(value, Tensor) else value


def small_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, 2, 1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(16, 10),
    )


def make(name: str) -> tuple[wfilter.FilteredModel, Tensor]:
    """A filtered model with random gates, and three images."""
    import timm

    makers: dict[str, Callable[[], nn.Module]] = {
        "cnn": small_cnn,
        "resnet18": lambda: timm.create_model("resnet18", num_classes=10),
        "vit": lambda: timm.create_model(
            "vit_tiny_patch16_224", num_classes=10, img_size=32, depth=2
        ),
        "swin": lambda: timm.create_model(  # two blocks, the second with shifted windows
            "swin_tiny_patch4_window7_224",
            num_classes=10,
            img_size=32,
            window_size=4,
            depths=(2,),
            embed_dim=32,
            num_heads=(2,),
        ),
    }
    torch.manual_seed(0)
    images = torch.rand(3, 3, 32, 32)
    wf = wfilter.apply_weight_filtering(makers[name]().eval(), example_input=images)
    bench.randomise(wf)
    wf(images, forget=torch.tensor([0, 1, -1]))
    return wf, images


def differences(name: str) -> dict[str, dict[str, float]]:
    """For each form of ``forget``, the largest differences, as shares of the largest logit."""
    wf, images = make(name)
    labels = torch.tensor([3, -1, 9])
    forms = {"labels": labels, "sets": torch.rand(3, 10) < 0.4}  # one class runs as labels
    found = {}
    for form, forget in forms.items():
        with torch.no_grad():
            eager, base = wf(images, forget=forget), wf(images)
        answer, scale = lowered_answer(wf, images, forget), eager.abs().max()
        others = {"from eager": eager, "from the base model": base}
        found[form] = {k: float((answer - v).abs().max() / scale) for k, v in others.items()}
    return found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, json.dumps(differences(name)), flush=True)
