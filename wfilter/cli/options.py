"""What commands have in common: options, settings from a file, and how results are printed."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from wfilter.core.messages import first_line


def _use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Let a TOML file stand for options not given; a name in it that is no option is an error."""
    if path is None:
        return None
    from wfilter.cli import settings

    stored = {name.replace("-", "_"): value for name, value in settings.read(path).items()}
    recipe = stored.pop("recipe", None)
    if isinstance(recipe, dict):
        context.meta["recipe"] = recipe
        recipe = recipe.get("name")
    known = {str(parameter.name) for parameter in context.command.params}
    unknown = sorted(set(stored) - known)
    if unknown:
        words = ", ".join(sorted(known - {"config", "debug", "quiet", "as_json", "help"}))
        raise ValueError(
            f"{path} has a setting {unknown[0]!r} that is unknown. Known are: {words}."
        )
    for parameter in context.command.params:
        name = str(parameter.name)
        value = stored.get(name)
        if getattr(parameter, "multiple", False) and isinstance(value, str):
            stored[name] = [value]  # a plain string in the file stands for a list of one
        if isinstance(value, bool) and not getattr(parameter, "is_flag", False):
            raise ValueError(
                f"{path} has {name} = {str(value).lower()}, but {name} takes a value, not a switch."
            )
    context.default_map = {**(context.default_map or {}), **stored}
    if recipe is not None:
        context.default_map["recipe"] = recipe
    return path


def _check_device(device: str | None) -> str | None:
    """Raise before any work if a device cannot be used."""
    if device is None:
        return None
    import torch

    try:
        torch.empty(0, device=device)
    except Exception as error:  # each backend of torch raises a class of its own
        reason = first_line(error).rstrip(".")
        raise ValueError(
            f"--device {device} cannot be used: {reason}. Use --device cpu."
        ) from error
    return device


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Config = Annotated[
    Path | None,
    typer.Option(callback=_use_config, is_eager=True, help="Settings from a TOML file."),
]
NOT_MET = 3  # exit code of `untrain --strict` where a row fell short
MODEL = "timm:NAME, torchvision:NAME, transformers:NAME, wfilter:NAME or package.module:function."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL, show_default=False)]
SameModel = Annotated[str | None, typer.Option(help=f"{MODEL} By default as untrained.")]
Weights = Annotated[
    str | None,
    typer.Option(help="A safetensors file, or 'data': the one in the data folder."),
]
Pretrained = Annotated[bool, typer.Option(help="Use timm's or torchvision's own weights.")]
Classes = Annotated[int | None, typer.Option("--num-classes", help="Outputs of the head.")]
Dataset = Annotated[
    str | None,
    typer.Option(help="digits, mnist, cifar10, imagenet or imagefolder:PATH."),
]
Data = Annotated[str | None, typer.Option(help="The data folder; by default $WFILTER_DATA.")]
Size = Annotated[int | None, typer.Option(help="Pixels; by default what the model wants.")]
Download = Annotated[bool, typer.Option(help="Fetch a missing dataset by torchvision.")]
Device = Annotated[
    str | None,
    typer.Option(callback=_check_device, help="cpu, cuda, ...; by default cuda if present."),
]
Targets = Annotated[
    list[str] | None,
    typer.Option(help="What to filter: a glob over parameter names, or a 're:' pattern; repeat."),
]
Exclude = Annotated[list[str] | None, typer.Option(help="What not to filter; repeat.")]
Granularity = Annotated[str, typer.Option(help="One gate per 'out' unit, or per 'element'.")]


def _old_classes(classes: list[str] | None) -> list[str] | None:
    """Tell who still writes --forget that this command now calls it --classes."""
    if classes:
        print("--forget is now --classes here: each class is forgotten in turn.", file=sys.stderr)
    return classes


OldClasses = Annotated[
    list[str] | None, typer.Option("--forget", hidden=True, callback=_old_classes)
]
FiltersAt = Annotated[
    Path, typer.Argument(metavar="FILTERS", help="The folder that untrain or demo wrote.")
]


@dataclass(frozen=True)
class Network:
    """Options for the model that filters were made for, where it is not as they were untrained."""

    model: SameModel = None
    weights: Weights = None
    pretrained: Pretrained = False
    size: Size = None


@dataclass(frozen=True)
class Images:
    """Options that say which images a command reads."""

    dataset: Dataset = None
    data: Data = None
    download: Download = False


@dataclass(frozen=True)
class Talk:
    """Options of every command: settings from a file, and what is printed."""

    config: Config = None
    quiet: Quiet = False
    as_json: Json = False
    debug: Debug = False

    @property
    def output(self) -> Output:
        """What prints the command's notes and its result, as these options ask."""
        return Output(self.quiet, self.as_json)


@dataclass(frozen=True)
class Output:
    """Where a command's words go: notes for people, one result for people or programs."""

    quiet: bool = False
    json: bool = False

    def note(self, text: str) -> None:
        """Say how things are going."""
        if not (self.quiet or self.json):
            print(text, flush=True)

    def result(self, text: object, values: object) -> None:
        """Give what the command was called for, in words or as JSON; colours only on a terminal."""
        if self.json:
            print(json.dumps(values, default=str), flush=True)
        elif not self.quiet and sys.stdout.isatty() and hasattr(text, "__rich__"):
            import rich

            rich.print(text)
        elif not self.quiet:
            print(text, flush=True)

    @property
    def progress(self) -> bool | None:
        """``False``, no progress bars, when quiet or as JSON; else ``None``: on a terminal only."""
        return False if self.quiet or self.json else None
