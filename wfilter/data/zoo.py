"""Models by name: our own backbones, and anyone else's classifier."""

from __future__ import annotations

import inspect
import urllib.error
import urllib.request
import warnings
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from wfilter.core.messages import first_few, first_line
from wfilter.data import hugging
from wfilter.data.backbones import BACKBONES, InputFormat
from wfilter.data.formats import cache_folder, data_root
from wfilter.data.functions import find_function, unknown_name

WEIGHTS_FILE = "model.safetensors"  # as timm names it on the hub
REACH_SECONDS = 5.0
# Sources whose names choose among installed code; such a name never runs code of the user's.
TRUSTED = ("timm", "torchvision", "transformers", "wfilter")


def names() -> tuple[str, ...]:
    """The names `create` knows.

    Example:
        >>> names()[:2]
        ('cnn-digits', 'vit-digits')
    """
    return tuple(BACKBONES)


def create(name: str, num_classes: int = 10) -> nn.Module:
    """A backbone by name, freshly initialised from torch's random state, in eval mode.

    Args:
        name: One of `names`: ``cnn-digits`` and ``vit-digits`` (8 x 8, for demonstrations), or
            ``vgg16``, ``resnet18``, ``vit_tiny``, ``vit_small``, ``cnn`` (which trains within
            minutes on a CPU) with ``-mnist`` (28 x 28, grey) or ``-cifar`` (32 x 32, colour), or
            the narrower ``cnn_small-cifar``.
        num_classes: Outputs of its head.

    Example:
        >>> import torch
        >>> create("cnn-digits")(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    if name not in BACKBONES:
        raise ValueError(unknown_name("model", name, BACKBONES))
    _check_classes(num_classes)
    make, inputs = BACKBONES[name]
    return make(inputs, num_classes).eval()


def build(
    spec: str,
    *,
    num_classes: int | None = None,
    pretrained: bool = False,
    weights: str | Path | None = None,
) -> nn.Module:
    """A model by its full name, in eval mode.

    Args:
        spec: ``timm:NAME``, ``torchvision:NAME``, ``wfilter:NAME``, ``transformers:NAME`` (a
            family, a repository of the Hub or a folder), or ``package.module:function``, a function
            that returns the model; the working directory is searched too.
        num_classes: Outputs of the head; by default the library's own number.
        pretrained: Take the library's own weights, which may need the network.
        weights: A safetensors file to load into it.

    Raises:
        ValueError: No such model, or the weights do not fit; the closest names are listed.

    Example:
        >>> type(build("torchvision:resnet18", num_classes=10)).__name__
        'ResNet'
    """
    source, _, name = spec.partition(":")
    if not name:
        raise ValueError(_without_source(spec))
    make = _SOURCES.get(source, partial(_call_function, source))
    if pretrained and source not in ("timm", "torchvision", "transformers"):
        raise ValueError(
            f"pretrained=True works for timm:, torchvision: and transformers:, not {spec!r}. "
            "Pass weights= with a safetensors file."
        )
    if num_classes is not None:
        _check_classes(num_classes)
    model = make(name, num_classes, pretrained).eval()
    return model if weights is None else load_weights(model, weights)


def _check_classes(num_classes: int) -> None:
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes} is not a number of classes: pass 1 or more.")


def input_format(spec: str) -> InputFormat:
    """The image size, channels and normalisation that the model called ``spec`` wants.

    Example:
        >>> input_format("timm:vit_tiny_patch16_224")
        InputFormat(size=224, channels=3, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    """
    source, _, name = spec.partition(":")
    if source == "wfilter" and name in BACKBONES:
        return BACKBONES[name][1]
    if source == "timm":
        return _timm_format(name)
    if source == "torchvision":
        return _torchvision_format(name)
    if source == "transformers":
        return hugging.input_format(name)
    raise ValueError(f"What {spec!r} wants to see is not known: give size, channels, mean and std.")


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """In place, give ``model`` the weights of a safetensors file; each keeps the model's dtype.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no safetensors file, or its tensors are not the model's.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file(nn.Linear(3, 2).half().state_dict(), f"{folder}/a.safetensors")
        ...     load_weights(nn.Linear(3, 2), f"{folder}/a.safetensors").weight.dtype
        torch.float32
    """
    stored, wanted = _read_safetensors(Path(path)), model.state_dict()
    lacking, foreign = sorted({*wanted} - {*stored}), sorted({*stored} - {*wanted})
    if lacking or foreign:
        raise ValueError(
            f"{path} does not fit {type(model).__name__}.\n"
            f"Only in the model: {first_few(lacking, 3) or 'nothing'}\n"
            f"Only in the file: {first_few(foreign, 3) or 'nothing'}\n"
            "Load it into the model it was saved from."
        )
    for name, tensor in wanted.items():
        if tensor.shape != stored[name].shape:
            raise ValueError(
                f"{name} is {tuple(stored[name].shape)} in {path}\n"
                f"and {tuple(tensor.shape)} in the model: check num_classes and the model's name."
            )
    model.load_state_dict({name: stored[name].to(wanted[name].dtype) for name in wanted})
    return model


def weights_path(spec: str, root: str | Path | None = None) -> Path:
    """Where the data folder, or the cache, keeps the weights of the model called ``spec``.

    Args:
        spec: As in `build`.
        root: The data folder; by default the environment variable ``WFILTER_DATA``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     Path(root, "weights").mkdir()
        ...     Path(root, "weights", "timm-resnet18.safetensors").touch()
        ...     weights_path("timm:resnet18", root).name
        'timm-resnet18.safetensors'
    """
    place = Path("weights", f"{spec.replace(':', '-')}.safetensors")
    folders = [folder for folder in (data_root(root), cache_folder()) if folder is not None]
    for folder in folders:
        if (folder / place).is_file():
            return folder / place
    looked = " or ".join(str(folder / place) for folder in folders)
    raise FileNotFoundError(
        f"there are no weights for {spec}: {looked} does not exist. Put them there (the data "
        "folder is root=, --data or WFILTER_DATA), or pass your own file."
    )


def _from_wfilter(name: str, num_classes: int | None, pretrained: bool) -> nn.Module:
    return create(name) if num_classes is None else create(name, num_classes)


def _from_timm(name: str, num_classes: int | None, pretrained: bool) -> nn.Module:
    import timm

    if not timm.is_model(name.split(".")[0]):
        raise ValueError(unknown_name("timm model", name, timm.list_models()))
    try:
        if pretrained:
            _refuse_out_of_reach(name)
        return timm.create_model(name, pretrained=pretrained, num_classes=num_classes)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"timm:{name} could not be made: {first_line(error)}") from error


def _refuse_out_of_reach(name: str) -> None:
    """Stop in seconds if weights cannot be fetched; huggingface_hub would retry for a minute."""
    import timm
    from huggingface_hub import constants, try_to_load_from_cache

    config: Any = timm.models.get_pretrained_cfg(name)
    place = config.hf_hub_id if config else None
    if not place or isinstance(try_to_load_from_cache(place, WEIGHTS_FILE), str):
        return  # the weights come from elsewhere, or are in the cache already
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        return  # an error page is an answer: the hub can be reached
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ValueError(
            f"timm:{name} has its weights at {constants.ENDPOINT}, which cannot be reached "
            f"({reason}). Check the network, or pass weights= (--weights) with a safetensors file."
        ) from error


def _from_torchvision(name: str, num_classes: int | None, pretrained: bool) -> nn.Module:
    models = _torchvision_models()
    _check_torchvision(name)
    settings = {} if num_classes is None else {"num_classes": num_classes}
    if pretrained and num_classes is not None:
        raise ValueError(
            f"torchvision's weights of {name} have a head of their own: leave num_classes out."
        )
    try:
        model = models.get_model(name, weights="DEFAULT" if pretrained else None, **settings)
    except OSError as error:
        raise ValueError(f"torchvision:{name} could not be fetched: {error}. Check the network, "
                         "or pass weights= (--weights).") from error  # fmt: skip
    return cast(nn.Module, model)


def _torchvision_models() -> Any:
    import torchvision

    return torchvision.models


def _call_function(module: str, name: str, num_classes: int | None, pretrained: bool) -> nn.Module:
    function = find_function(module, name, "timm, torchvision, transformers or wfilter")
    settings = {} if num_classes is None else {"num_classes": num_classes}
    try:
        inspect.signature(function).bind(**settings)
    except TypeError as error:
        passed = "num_classes alone" if settings else "no arguments"
        raise ValueError(f"{module}:{name} cannot be called with {passed}: {error}.") from error
    model = function(**settings)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{module}:{name} returned {type(model).__name__}. Expected an nn.Module.")
    return model


_SOURCES = {
    "timm": _from_timm,
    "torchvision": _from_torchvision,
    "transformers": hugging.build,
    "wfilter": _from_wfilter,
}


def _timm_format(name: str) -> InputFormat:
    import timm

    if not timm.is_model(name.split(".")[0]):
        raise ValueError(unknown_name("timm model", name, timm.list_models()))
    config: Any = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    channels, size, _ = config.input_size
    return InputFormat(size, channels, tuple(config.mean), tuple(config.std))


def _torchvision_format(name: str) -> InputFormat:
    models = _torchvision_models()
    _check_torchvision(name)
    preset = models.get_model_weights(name)["DEFAULT"].transforms()
    return InputFormat(preset.crop_size[0], 3, tuple(preset.mean), tuple(preset.std))


def _check_torchvision(name: str) -> None:
    models = _torchvision_models()
    known = models.list_models(module=models)
    if name not in known:
        raise ValueError(unknown_name("torchvision model", name, known))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file. Give the path of a safetensors file.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file, or it is cut short ({error}). "
            "Save weights with safetensors.torch.save_file."
        ) from error


def _without_source(spec: str) -> str:
    if spec in BACKBONES:
        return f"model={spec!r} lacks its source. Write wfilter:{spec}."
    return (
        f"model={spec!r} lacks its source. Write timm:{spec}, torchvision:{spec}, "
        f"transformers:{spec}, wfilter:NAME or package.module:function."
    )


_OLD_NAMES = {"InputFacts": "InputFormat", "input_facts": "input_format"}


def __getattr__(name: str) -> Any:
    """`InputFormat` and `input_format` by their old names."""
    if name in _OLD_NAMES:
        new = _OLD_NAMES[name]
        warnings.warn(f"zoo.{name} is now zoo.{new}.", DeprecationWarning, stacklevel=2)
        return globals()[new]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
