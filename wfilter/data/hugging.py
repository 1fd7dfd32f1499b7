"""Image classifiers of transformers by name: a family, a repository of the Hub, or a folder."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any, cast

from torch import nn

from wfilter.core.messages import first_line
from wfilter.data.backbones import InputFormat
from wfilter.data.functions import unknown_name


def families() -> tuple[str, ...]:
    """The families of image classifiers that the installed version knows.

    Example:
        >>> "vit" in families()
        True
    """
    from transformers.models.auto import modeling_auto

    return tuple(sorted(modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES))


def build(name: str, num_classes: int | None, pretrained: bool) -> nn.Module:
    """A classifier of transformers; without ``pretrained`` its weights are random.

    Args:
        name: A family (``vit``), which has its default configuration, or what ``from_pretrained``
            takes: a repository (``google/vit-base-patch16-224``) or a folder.
        num_classes: Outputs of the head; by default the configuration's.
        pretrained: Take the weights of the repository or folder.

    Example:
        >>> build("resnet", 10, False).config.num_labels
        10
    """
    import transformers

    auto = transformers.AutoModelForImageClassification
    if pretrained and name in families():
        raise ValueError(
            f"transformers:{name} names a family, which has no weights of its own. Name a "
            "repository or a folder, such as transformers:google/vit-base-patch16-224."
        )
    config = _configuration(name)
    if num_classes is not None:
        config.num_labels = num_classes
    try:
        if pretrained:
            return cast(nn.Module, auto.from_pretrained(name, config=config))
        return cast(nn.Module, _class_of(config)(config))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"transformers:{name} could not be made: {first_line(error)}") from error


def _configuration(name: str) -> Any:
    """The configuration of a family, or the one stored under a name."""
    import transformers

    if name in families():
        return transformers.AutoConfig.for_model(name)
    if "/" not in name and not name.startswith("."):
        raise ValueError(unknown_name("transformers family", name, families()))
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"transformers:{name} has no configuration here and could not be fetched: "
            f"{first_line(error)}"
        ) from error


def _class_of(config: Any) -> Any:
    """The classifier's class for a configuration; of several, the one it names, or the first."""
    import transformers
    from transformers.models.auto import modeling_auto

    known = modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if known is None:
        raise ValueError(
            f"{config.model_type} is no image classifier. Known are: {', '.join(families())}."
        )
    classes = (known,) if isinstance(known, str) else known
    named = [c for c in config.architectures or () if c in classes]
    return getattr(transformers, (named or list(classes))[0])


def input_format(name: str) -> InputFormat:
    """Image size and normalisation: those of the stored image processor, or its family's.

    Example:
        >>> input_format("vit")
        InputFormat(size=224, channels=3, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    """
    config, processor = _configuration(name), _processor(name)
    seen = getattr(config, "vision_config", config)
    size = getattr(seen, "image_size", None) or getattr(processor, "crop_size", None)
    return InputFormat(
        _edge(size or getattr(processor, "size", None) or 224),
        getattr(seen, "num_channels", 3),
        tuple(processor.image_mean),
        tuple(processor.image_std),
    )


def _processor(name: str) -> Any:
    """The image processor of a model: the one stored with it, or a family's with its defaults."""
    import transformers

    module: Any = import_module("transformers.models.auto.image_processing_auto")
    auto: Any = transformers.AutoImageProcessor
    try:
        if name not in families():
            return auto.from_pretrained(name)
        return getattr(transformers, module.IMAGE_PROCESSOR_MAPPING_NAMES[name]["pil"])()
    except (KeyError, OSError, TypeError) as error:
        raise ValueError(
            f"What transformers:{name} wants to see is not known: give size, channels, mean and "
            "std."
        ) from error


def _edge(size: Any) -> int:
    """One edge in pixels of an image size given as a number, a pair, or named edges."""
    if isinstance(size, (list, tuple)):
        return int(size[0])
    if isinstance(size, int):
        return size
    named: Any = size.get if isinstance(size, dict) else partial(getattr, size)
    return int(named("height", None) or named("shortest_edge", 224))
