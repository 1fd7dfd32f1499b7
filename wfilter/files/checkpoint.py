"""Save and load the alphas: one safetensors file, no pickle, written atomically.

The file's header carries what is needed to refuse the wrong base model, and a digest over alphas
and header, so that a changed byte is an error and never a different model.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wfilter import __version__
from wfilter.core.attach import apply_weight_filtering, remove_weight_filtering
from wfilter.core.feature_rows import FeatureRows
from wfilter.core.forgetting import refuse_inside
from wfilter.core.gates import HARD
from wfilter.core.guessing import guess_images
from wfilter.core.model import FilteredModel
from wfilter.core.refusals import refuse_bad_alphas
from wfilter.files import card, hub


class Figures(Protocol):
    """What a model card shows: a report, or anything else that writes itself as markdown."""

    def to_markdown(self) -> str:
        """The figures."""
        ...


FORMAT = 1
WITH_ROWS = 3  # the format with feature rows, which versions of wfilter without them refuse
ROWS = "feature_rows/"  # in front of the names of the tensors of feature rows
ROW_TENSORS = {"means", "factors", "rests", "phases", "mixing", "sureness"}
FILE = "filters.safetensors"
REMEDY = "Copy the file again or write it anew with wf.save(path)."

Shapes = dict[str, tuple[int, ...]]


def fingerprint(model: nn.Module) -> str:
    """A digest of a model's parameters and buffers: names, shapes, dtypes and every byte.

    Example:
        >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> fingerprint(a) == fingerprint(a), fingerprint(a) == fingerprint(b)
        (True, False)
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            _feed(digest, name, tensor)
    return digest.hexdigest()


def save(wf: FilteredModel, path: str | Path, report: Figures | None = None) -> Path:
    """Write the alphas of ``wf``; a path without suffix becomes a folder with a model card.

    An existing file is replaced in one step: a crash leaves the old one or the new one. The card
    shows the figures of ``report``, if there is one.
    """
    from safetensors.torch import save as to_bytes

    refuse_inside(wf.base, "save")
    refuse_bad_alphas(wf)
    path = Path(path)
    if path.suffix == "":
        path.mkdir(parents=True, exist_ok=True)
        figures = "" if report is None else report.to_markdown()
        write_atomically(path / card.NAME, card.model_card(wf, figures=figures).encode())
        path = path / FILE
    alphas = {name: alpha.detach().cpu().contiguous().clone() for name, alpha in wf.alpha.items()}
    header = _header(wf)
    alphas |= _row_tensors(wf)
    header["digest"] = digest_of(header, alphas)
    write_atomically(path, to_bytes(alphas, metadata={"wfilter": json.dumps(header)}))
    return path


def push_to_hub(
    wf: FilteredModel,
    repo_id: str,
    *,
    report: Figures | None = None,
    private: bool | None = None,
    revision: str | None = None,
    message: str = "Add weight filters",
) -> str:
    """See `FilteredModel.push_to_hub`."""
    address = hub.PREFIX + repo_id + (f"@{revision}" if revision else "")
    hub.parse(address)
    with tempfile.TemporaryDirectory() as folder:
        save(wf, Path(folder) / FILE)
        figures = "" if report is None else report.to_markdown()
        text = card.model_card(wf, figures=figures, source=address)
        (Path(folder) / card.NAME).write_text(text, encoding="utf-8")
        return hub.upload(
            Path(folder), repo_id, private=private, revision=revision, message=message
        )


def load(
    path: str | Path, model: nn.Module, *, example_input: Tensor | None = None
) -> FilteredModel:
    """Filters from a file written by ``FilteredModel.save``, on the base model they were made for.

    Args:
        path: The file, its folder, or ``hf://owner/name`` (``@revision``) on the Hugging Face Hub.
        model: The base model, with the weights the filters were made for.
        example_input: As for `apply_weight_filtering`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, of another format, or belongs to another base model. The
            model given is then left as it was.
    """
    if str(path).startswith(hub.PREFIX):
        path = hub.fetch(str(path), FILE)
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Write it with wf.save(path).")
    header, shapes = read_header(path)
    digest = fingerprint(model)
    if digest != header["base"]:
        raise ValueError(
            f"{path} was made for another base model ({header['architecture']}).\n"
            f"  fingerprint in the file: {header['base'][:16]}\n"
            f"  fingerprint of this {type(model).__name__}: {digest[:16]}\n"
            "Load the weights the filters were trained on before attaching them."
        )
    example = guess_images(model) if example_input is None else example_input
    try:
        wf = apply_weight_filtering(
            model,
            header["num_classes"],
            targets=lambda name, module, parameter: name in shapes,
            granularity=header["granularity"],
            class_names=header.get("class_names"),
            example_input=example,
        )
    except ValueError as error:
        raise ValueError(f"{path} does not fit this model: {error}") from error
    try:
        _fill(wf, path, header, shapes)
    except BaseException:
        remove_weight_filtering(wf)
        raise
    return wf


def _fill(wf: FilteredModel, path: Path, header: dict[str, Any], shapes: Shapes) -> None:
    """In place: fill in the alphas of a file, read only if their shapes fit the model."""
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith(ROWS)}
    expected = {name: tuple(alpha.shape) for name, alpha in wf.alpha.items()}
    if expected != shapes:
        missing, extra = sorted(set(expected) - set(shapes)), sorted(set(shapes) - set(expected))
        raise ValueError(
            f"{path} does not fit this model: missing {missing[:3]}, unexpected {extra[:3]}, or "
            "shapes differ."
        )
    tensors = _read_tensors(path, header)
    rows = {n.removeprefix(ROWS): t for n, t in tensors.items() if n.startswith(ROWS)}
    alphas = {name: tensor for name, tensor in tensors.items() if not name.startswith(ROWS)}
    if rows:
        wf.feature_rows = FeatureRows(**rows, head=header["feature_rows"]).to(wf.alphas.device)
        wf.feature_rows.head_of(wf.base)  # refuses a head that is not there
    with torch.no_grad():
        for name, alpha in alphas.items():
            wf.alpha[name].copy_(alpha)
    wf.pin_open(name for name, alpha in alphas.items() if bool((alpha == HARD).all()))
    wf.hard = header.get("hard", False)


def read_header(path: Path) -> tuple[dict[str, Any], Shapes]:
    """The header of a file and the shapes of its alphas, whose values are not read yet."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            shapes = {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118
            header = json.loads((file.metadata() or {})["wfilter"])
            version, _ = header["format"], header["digest"]
    except KeyError:
        raise ValueError(
            f"{path} is not a wfilter file: it carries no filter facts. "
            "Give the folder or file that wf.save or wfilter untrain wrote."
        ) from None
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({error}). {REMEDY}") from None
    if version == 2:
        raise ValueError(
            f"{path} has feature rows of an earlier kind, which moved features instead of drawing "
            "them anew. Make the rows again: wfilter.untrain(wf, images, recipe='reroute')."
        )
    if version not in (FORMAT, WITH_ROWS):
        raise ValueError(
            f"{path} has format {version}, this wfilter reads formats {FORMAT} and {WITH_ROWS}."
        )
    if not _sensible(header, shapes):
        raise ValueError(f"{path} does not hold filters that wfilter would write. {REMEDY}")
    alphas = [name for name in shapes if not name.startswith(ROWS)]
    if sorted(alphas) != header.get("targets"):
        listed = header.get("targets") or []
        missing, extra = sorted(set(listed) - set(alphas)), sorted(set(alphas) - set(listed))
        raise ValueError(
            f"{path} is damaged: missing {missing[:3]}, unexpected {extra[:3]}. {REMEDY}"
        )
    return header, shapes


def _read_tensors(path: Path, header: dict[str, Any]) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        alphas = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if digest_of({k: v for k, v in header.items() if k != "digest"}, alphas) != header["digest"]:
        raise ValueError(f"{path} is damaged: its digest does not match its content. {REMEDY}")
    if not all(a.is_floating_point() and bool(a.isfinite().all()) for a in alphas.values()):
        raise ValueError(f"{path} holds alphas that are no finite numbers. {REMEDY}")
    return alphas


def _sensible(header: dict[str, Any], shapes: Shapes) -> bool:
    """Whether the header is whole and of the right kinds, and the alphas have a row per class."""
    kinds = {"num_classes": int, "granularity": str, "architecture": str, "base": str}
    lists = [header.get("class_names"), header.get("targets")]
    return (
        all(type(header.get(key)) is kind for key, kind in kinds.items())
        and type(header.get("hard", False)) is bool
        and all(n is None or (type(n) is list and all(type(s) is str for s in n)) for n in lists)
        and all(
            n.startswith(ROWS) or (len(s) == 2 and s[0] == header["num_classes"])
            for n, s in shapes.items()
        )
        and _rows_fit(header, {n.removeprefix(ROWS) for n in shapes if n.startswith(ROWS)})
    )


def _rows_fit(header: dict[str, Any], names: set[str]) -> bool:
    """Whether a file has the feature rows that its format asks for: none, or whole ones.

    Whole are all tensors of feature rows, and the name of the head they stand before.
    """
    if header["format"] == FORMAT:
        return not names and "feature_rows" not in header
    whole = names in (ROW_TENSORS, ROW_TENSORS - {"sureness"})  # earlier rows had no such factors
    return whole and type(header.get("feature_rows")) is str


def _row_tensors(wf: FilteredModel) -> dict[str, Tensor]:
    if wf.feature_rows is None:
        return {}
    rows = dict(wf.feature_rows.named_buffers())
    return {ROWS + name: tensor.cpu().contiguous().clone() for name, tensor in rows.items()}


def _header(wf: FilteredModel) -> dict[str, Any]:
    rows = wf.feature_rows
    return {
        "format": FORMAT if rows is None else WITH_ROWS,
        **({} if rows is None else {"feature_rows": rows.head}),
        "version": __version__,
        "num_classes": wf.num_classes,
        "class_names": None if wf.class_names is None else list(wf.class_names),
        "granularity": wf.granularity,
        "hard": wf.hard,
        "targets": sorted(target.name for target in wf.targets),
        "architecture": type(wf.base).__name__,
        "base": fingerprint(wf.base),
    }


def digest_of(header: dict[str, Any], alphas: dict[str, Tensor]) -> str:
    """A digest over the header and tensors of a file, names, shapes and dtypes included."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(alphas):
        _feed(digest, name, alphas[name])
    return digest.hexdigest()


def _feed(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one step, the content safely on disk first."""
    try:
        _write_and_replace(path, content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(
            error.errno,
            f"{path} was not written ({reason}); what was there before is untouched. Free space, "
            "or choose a folder that can be written to",
        ) from error


def _write_and_replace(path: Path, content: bytes) -> None:
    # Not by tempfile: only the owner could read its files, whatever the umask says.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
