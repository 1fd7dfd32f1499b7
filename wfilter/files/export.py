"""Export a filtered model as one graph whose inputs are the images and what each is to forget."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wfilter.core.compiling import has_compiler
from wfilter.core.forget import as_sets
from wfilter.core.forgetting import refuse_inside
from wfilter.core.gates import packaging
from wfilter.core.guessing import guess_images
from wfilter.core.messages import first_line
from wfilter.core.model import FilteredModel
from wfilter.core.nearness import gap, size
from wfilter.core.outputs import logits_of
from wfilter.core.refusals import check_values
from wfilter.files.exported import NOTE, Program, Takes, load_exported

# Batches an exported graph is checked on: one image, the traced number, and another.
TRACED, CHECKED = 3, (1, 3, 5)


@dataclass(frozen=True)
class Exported:
    """What was written: the file, its size, and how far its logits are from the model's."""

    path: Path
    inputs: tuple[str, ...]
    size: int
    largest_difference: float

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.size / 2**20:.1f} MiB, inputs {', '.join(self.inputs)}; "
            f"largest difference from the model {self.largest_difference:.1e}"
        )


def export(
    model: nn.Module,
    path: str | Path,
    *,
    forget: str = "labels",
    example_input: Tensor | None = None,
    aoti: bool = False,
) -> Exported:
    """Write a filtered or plain model as a graph, and check the file against the model.

    The graph takes ``images`` and ``forget``, any number of them; a plain model, such as a baked
    one, only images. Labels out of range stop the graph, with an error of its runtime.

    Args:
        model: A `FilteredModel`, or any module that maps images to logits.
        path: ``.pt2`` for `torch.export`, ``.onnx`` for ONNX (needs onnx and onnxscript).
        forget: ``"labels"``, int64 ``(batch,)`` with -1 for nothing, or ``"sets"``, bool
            ``(batch, num_classes)``.
        example_input: Images of the size to export for, where it cannot be guessed.
        aoti: Compile the graph ahead of time, by AOTInductor, for the device the model is on: the
            ``.pt2`` file then holds machine code for processors like this one. It takes a C++
            compiler and half a minute or more. Open it with `load_exported`.

    Returns:
        The file, its inputs and its size. Its logits were compared with the model's on batches of
        three sizes.

    Raises:
        ValueError: The suffix or ``forget`` is unknown, or the model cannot be traced or compiled.
        RuntimeError: The written graph's logits are not the model's.

    Example:
        >>> import tempfile, wfilter
        >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export(wf, f"{folder}/model.pt2").inputs
        ('images', 'forget')
    """
    path = Path(path)
    if path.suffix not in _WRITERS:
        raise ValueError(f"{path} ends in neither .pt2 nor .onnx: the suffix chooses the format.")
    if forget not in ("labels", "sets"):
        raise ValueError(f"forget={forget!r} is unknown. Use 'labels' or 'sets'.")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a folder. Make it first.")
    if aoti:
        _refuse_compiling(path)
    network, make_inputs = _as_graph(model, forget, _image(model, example_input))
    write = _write_package if aoti else _WRITERS[path.suffix]
    with _quiet(), torch.no_grad():
        write(network, make_inputs(TRACED), path)
        difference = _compare(network, _read(path), make_inputs)
    names = ("images", "forget")[: len(make_inputs(1))]
    return Exported(path, names, path.stat().st_size, difference)


class _Graph(nn.Module):
    """What is traced: the filtered model without its checks, which would fix the batch size."""

    def __init__(self, wf: FilteredModel):
        super().__init__()
        self.wf = wf

    def forward(self, images: Tensor, forget: Tensor) -> Any:
        sets = as_sets(forget, self.wf.num_classes)
        return logits_of(self.wf.run_gated(images, self.wf.mixed_gates(forget), sets=sets))


class _Plain(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        return logits_of(self.model(images))


def _as_graph(
    model: nn.Module, forget: str, image: Tensor
) -> tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]:
    """The module to trace, and a function that makes inputs for a number of images."""
    generator = torch.Generator().manual_seed(0)

    def images(count: int) -> Tensor:
        drawn = torch.rand(count, *image.shape[1:], generator=generator)
        return drawn.to(image.device, image.dtype)

    if not isinstance(model, FilteredModel):
        return _Plain(model).eval(), lambda count: (images(count),)
    refuse_inside(model.base, "export")
    classes = model.num_classes
    check_values(model, tuple(range(classes)))
    model.inspect(image)

    def wanted(count: int) -> Tensor:
        if forget == "sets":
            return torch.rand(count, classes, generator=generator) < 0.4
        return torch.randint(-1, classes, (count,), generator=generator)

    return _Graph(model).eval(), lambda n: (images(n), wanted(n).to(image.device))


def _image(model: nn.Module, example: Tensor | None) -> Tensor:
    """One image the model takes: the one given, or the first guess that works."""
    base = model.base if isinstance(model, FilteredModel) else model
    if example is not None:
        first = next(base.parameters())
        return example[:1].to(first.device, first.dtype)
    return guess_images(base)


def traced_graph(model: nn.Module, *inputs: Tensor) -> nn.Module:
    """What AOTInductor is given of a model, filtered or not, as a module for any batch size."""
    network = _Graph(model) if isinstance(model, FilteredModel) else _Plain(model)
    with packaging():
        graph: nn.Module = _trace(network.eval(), inputs).module()
    return graph


def _trace(network: nn.Module, inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """The graph for any batch size; by dynamo where plain tracing would fix it, as at len(x)."""
    batch = torch.export.Dim("batch")
    shapes = tuple({0: batch} for _ in inputs)
    try:
        return torch.export.export(network, inputs, dynamic_shapes=shapes, strict=False)
    except Exception:
        pass
    try:
        return torch.export.export(network, inputs, dynamic_shapes=shapes, strict=True)
    except Exception as error:
        reason = first_line(error)
        raise ValueError(
            f"torch.export cannot trace this model with a batch of any size: {reason} Look for "
            "Python code in its forward that depends on values or on the batch size."
        ) from error


def _write_pt2(network: nn.Module, inputs: tuple[Tensor, ...], path: Path) -> None:
    torch.export.save(_trace(network, inputs), path)


def _refuse_compiling(path: Path) -> None:
    if path.suffix != ".pt2":
        raise ValueError(f"aoti=True writes a .pt2 package, not {path.name}.")
    if not has_compiler():
        raise ValueError(
            "aoti=True needs a C++ compiler and finds none. Install g++ or clang++, or set CXX."
        )


def _write_package(network: nn.Module, inputs: tuple[Tensor, ...], path: Path) -> None:
    """Machine code with all weights and alphas in it; frozen, since nothing in it can change."""
    takes = _takes(network, *inputs)
    settings = {
        "aot_inductor.metadata": {NOTE: takes.write()},
        "aot_inductor.check_lowerbound": False,  # traced with two images, to be called with one
        "freezing": takes.device == "cpu",
    }
    with packaging():
        program = _trace(network, inputs)
    try:
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path.absolute()), inductor_configs=settings
        )
    except Exception as error:
        reason = first_line(error)
        raise ValueError(
            f"AOTInductor cannot compile this model: {reason} Export it without aoti, as a graph."
        ) from error


def _takes(network: nn.Module, images: Tensor, *forget: Tensor) -> Takes:
    images_taken = tuple(images.shape[1:]), str(images.dtype), images.device.type
    if not isinstance(network, _Graph):
        return Takes(*images_taken)
    return Takes(*images_taken, network.wf.num_classes, forget[0].dtype == torch.bool)


def _write_onnx(network: nn.Module, inputs: tuple[Tensor, ...], path: Path) -> None:
    try:
        import onnxscript  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(
            "ONNX needs more packages: pip install onnx onnxscript onnxruntime."
        ) from None
    torch.onnx.export(
        _trace(network, inputs),
        (),
        path,
        dynamo=True,
        input_names=["images", "forget"][: len(inputs)],
        output_names=["logits"],
        external_data=False,
        verbose=False,
    )


_WRITERS: dict[str, Callable[..., None]] = {".pt2": _write_pt2, ".onnx": _write_onnx}


def _read(path: Path) -> Program | None:
    """The file as a function, or ``None`` where there is no onnxruntime to run it."""
    if path.suffix == ".onnx" and importlib.util.find_spec("onnxruntime") is None:
        return None
    return load_exported(path)


def _compare(
    network: nn.Module, program: Program | None, make_inputs: Callable[[int], tuple[Tensor, ...]]
) -> float:
    """Largest difference of the logits; more than rounding explains is an error."""
    if program is None:
        return float("nan")
    worst = 0.0
    for count in CHECKED:
        inputs = make_inputs(count)
        expected, exported = network(*inputs).cpu(), program(*inputs).cpu()
        if bool(expected.isnan().any()):
            raise ValueError("the logits of this model contain NaN. Load its weights again.")
        worst = max(worst, gap(exported, expected))
        if worst > 1e-3 * max(1.0, size(expected)):
            raise RuntimeError(
                f"the exported graph differs from the model by {worst:.1e} on {count} images. "
                "Do not use the file; please report the model."
            )
    return worst


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' warnings, which are about their own insides."""
    names = "torch.onnx", "onnxscript", "torch.export", "torch._inductor", "torch.utils"
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
