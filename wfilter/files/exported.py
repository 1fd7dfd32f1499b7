"""Read what ``export`` wrote back as a function of images and of what each is to forget."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wfilter.core.forget import check_per_sample

Program = Callable[..., Tensor]

# The metadata key under which a compiled package notes what inputs it takes: its code does not
# check them.
NOTE = "wfilter"


@dataclass(frozen=True)
class Takes:
    """What a compiled package takes: it reads memory as if its inputs were these.

    Attributes:
        image: Shape of one image.
        dtype: Of the images, as torch writes it.
        device: Type of the device that the code is for.
        classes: Number of rows; ``None`` for a plain model, which takes images alone.
        sets: Whether ``forget`` is a set for each image, not a label.
    """

    image: tuple[int, ...]
    dtype: str
    device: str
    classes: int | None = None
    sets: bool = False

    @classmethod
    def read(cls, note: str) -> Takes:
        """The inputs described by the text that ``write`` gave."""
        values = json.loads(note)
        return cls(**{**values, "image": tuple(values["image"])})

    def write(self) -> str:
        """The inputs as text, for the package's metadata."""
        return json.dumps(asdict(self))

    def checked(self, images: Tensor, *forget: Tensor) -> tuple[Tensor, ...]:
        """The inputs as the code reads them; stops where shape, dtype or device does not fit."""
        if tuple(images.shape[1:]) != self.image or str(images.dtype) != self.dtype:
            raise ValueError(
                f"images have shape {tuple(images.shape)} and dtype {images.dtype}.\n"
                f"This package takes (batch, {', '.join(map(str, self.image))}) and {self.dtype}: "
                "convert them, or export again with example_input=images."
            )
        if len(forget) != (self.classes is not None):
            names = "images alone" if self.classes is None else "images and forget"
            raise TypeError(f"this package takes {names}, but got {1 + len(forget)} inputs.")
        for wanted in forget:
            self._check_forget(wanted, len(images))
        inputs = images, *forget
        if any(value.device.type != self.device for value in inputs):
            raise ValueError(f"this package runs on {self.device}. Move its inputs there.")
        return tuple(value.detach().contiguous() for value in inputs)

    def _check_forget(self, forget: Tensor, batch: int) -> None:
        if (forget.dtype == torch.bool) != self.sets:
            raise TypeError(
                f"forget has dtype {forget.dtype}, but this package was exported for "
                + ("bool sets (batch, num_classes)." if self.sets else "int64 labels (batch,).")
            )
        check_per_sample(forget, batch, self.classes or 0)


def load_exported(path: str | Path) -> Program:
    """The function ``(images, forget) -> logits`` in a file that ``export`` wrote.

    No code of the model is needed. A compiled package (``export(..., aoti=True)``) gets its inputs
    checked and made contiguous here: its code reads memory without a look at shapes, dtypes and
    strides. Torch's own loaders skip the checks unless ``AOTI_RUNTIME_CHECK_INPUTS=1`` is set.

    Args:
        path: A ``.pt2`` or ``.onnx`` file. Packages hold machine code: open only your own.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is of another kind.

    Example:
        >>> import tempfile, wfilter
        >>> wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="*")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     program = load_exported(wfilter.export(wf, f"{folder}/model.pt2").path)
        >>> program(torch.ones(2, 4), torch.tensor([2, -1])).shape
        torch.Size([2, 3])
    """
    path = Path(path)
    if path.suffix not in _READERS:
        raise ValueError(f"{path} ends in neither .pt2 nor .onnx: export writes such files.")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Write it with wfilter export.")
    return _READERS[path.suffix](path)


def is_compiled(path: Path) -> bool:
    """Whether a ``.pt2`` file holds machine code rather than a graph."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any("/aotinductor/" in name for name in archive.namelist())


def _read_pt2(path: Path) -> Program:
    if is_compiled(path):
        return _read_package(path)
    graph = torch.export.load(path).module()

    def program(*inputs: Tensor) -> Tensor:
        with torch.no_grad():
            answer: Tensor = graph(*inputs)
        return answer

    return program


def _read_package(path: Path) -> Program:
    package: Any = torch._inductor.aoti_load_package(str(path))
    note = package.loader.get_metadata().get(NOTE)
    if note is None:
        raise ValueError(
            f"{path} was not written by wfilter, so what its code takes is not known. Open it with "
            "torch._inductor.aoti_load_package."
        )
    takes = Takes.read(note)

    def program(*inputs: Tensor) -> Tensor:
        checked = takes.checked(*inputs)
        answer: Tensor = package(*checked)
        return answer

    return program


def _read_onnx(path: Path) -> Program:
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise ValueError(f"{path} needs onnxruntime: pip install onnxruntime.") from None
    session: Any = onnxruntime.InferenceSession(  # type: ignore[attr-defined]
        str(path), providers=["CPUExecutionProvider"]
    )
    names = [entry.name for entry in session.get_inputs()]

    def program(*inputs: Tensor) -> Tensor:
        fed = {name: value.detach().cpu().numpy() for name, value in zip(names, inputs)}
        return torch.from_numpy(session.run(None, fed)[0])

    return program


_READERS: dict[str, Callable[[Path], Program]] = {".pt2": _read_pt2, ".onnx": _read_onnx}
