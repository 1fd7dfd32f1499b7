"""The command ``wfilter`` itself, which every command joins."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from wfilter import __version__

app = typer.Typer(
    name="wfilter",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: wfilter demo",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"wfilter {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Filters that make an image classifier forget any class, chosen at run time."""


def command(**settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that registers a command, whose parameters may be groups: see `spread`."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        app.command(**settings)(spread(function))
        return function

    return register


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """The function with each group, a dataclass of options, spread into single options for typer.

    Example:
        >>> @dataclasses.dataclass
        ... class Where:
        ...     host: str = "here"
        >>> def go(times: int, where: Where) -> None:
        ...     print(times, where.host)
        >>> print(inspect.signature(spread(go)))
        (*, times: int, host: str = 'here') -> None
        >>> spread(go)(times=2, host="there")
        2 there
    """
    signature = inspect.signature(function, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if dataclasses.is_dataclass(parameter.annotation)
    }

    # No functools.wraps: typer would follow it back to the function with the groups.
    def called(**options: Any) -> None:
        for name, kind in groups.items():
            own = [field.name for field in dataclasses.fields(kind)]
            options[name] = kind(**{key: options.pop(key) for key in own})
        function(**options)

    single: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        group = groups.get(name)
        options = [parameter] if group is None else _options_of(group)
        # By keyword, so that an option without a default may follow one that has one.
        single += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    called.__name__, called.__doc__ = function.__name__, function.__doc__
    called.__annotations__ = {}
    called.__signature__ = signature.replace(parameters=single)  # type: ignore[attr-defined]
    return called


def _options_of(group: Any) -> list[inspect.Parameter]:
    kinds, by_keyword = get_type_hints(group, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(option.name, by_keyword, default=option.default, annotation=kind)
        for option, kind in zip(dataclasses.fields(group), kinds.values())
    ]
