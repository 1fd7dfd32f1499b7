"""Settings of a run as TOML: read from a file, changed by options, printed back in full."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from wfilter.untraining.objectives import Recipe
from wfilter.untraining.recipes import get_recipe
from wfilter.untraining.stored import own_settings

FILE = "settings.toml"
MOST_BYTES = 2**20
NONE = "none"  # stands for None, for which TOML has no word


def read(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file; a relative ``weights`` path starts at the file's folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.toml").write_text('model = "wfilter:cnn-digits"')
        ...     read(Path(folder, "a.toml"))
        {'model': 'wfilter:cnn-digits'}
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file. Give the path of a TOML file.")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES} bytes: it is no settings file.")
    settings = _parse(path.read_bytes().decode("utf-8", errors="replace"), str(path))
    weights = settings.get("weights")
    if isinstance(weights, str) and weights not in ("", "data"):
        settings["weights"] = str(path.parent.absolute() / weights)
    return settings


def write(settings: Mapping[str, Any]) -> str:
    """Settings as TOML, tables last; `read` gives them back.

    Example:
        >>> print(write({"steps": 3, "recipe": {"gates": "soft", "start": None}}))
        steps = 3
        <BLANKLINE>
        [recipe]
        gates = "soft"
        start = "none"
        <BLANKLINE>
    """
    plain = {k: v for k, v in settings.items() if not isinstance(v, Mapping)}
    tables = {k: v for k, v in settings.items() if isinstance(v, Mapping)}
    text = "".join(f"{key} = {_value(value)}\n" for key, value in plain.items())
    for name, table in tables.items():
        text += f"\n[{name}]\n" + "".join(f"{k} = {_value(v)}\n" for k, v in table.items())
    return text


def parse_changes(changes: Iterable[str]) -> dict[str, Any]:
    """``["steps=3", "gates=soft"]`` as a dictionary, values as TOML reads them.

    Example:
        >>> parse_changes(["learning_rate=0.2", "gates=soft"])
        {'learning_rate': 0.2, 'gates': 'soft'}
    """
    parsed = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"--set {change!r} is not KEY=VALUE, such as learning_rate=0.2.")
        try:
            parsed[key.strip()] = _parse(f"value = {text}", change)["value"]
        except ValueError:  # a word without quotes, such as soft
            parsed[key.strip()] = text.strip()
    return parsed


def make_recipe(name: str, changes: Mapping[str, Any]) -> Recipe:
    """A named recipe with some of its settings changed.

    Example:
        >>> make_recipe("paper", {"lambda_forget": 100}).lambda_forget
        100
    """
    recipe = get_recipe(name)
    known = {field.name: field.type for field in dataclasses.fields(recipe)}
    plain = {key: None if value == NONE else value for key, value in changes.items()}
    values: dict[str, Any] = {}
    for key, value in own_settings(type(recipe), plain).items():
        if key not in known:
            closest = difflib.get_close_matches(key, known, 3, cutoff=0.3) or sorted(known)[:3]
            raise ValueError(
                f"recipe {name!r} has no setting {key!r}. Closest names: {', '.join(closest)}."
            )
        values[key] = value
        if not _fits(value, str(known[key])):
            raise ValueError(f"recipe setting {key}={value!r} is not {known[key]}.")
    return dataclasses.replace(recipe, **values)


def _fits(value: object, kind: str) -> bool:
    """Whether a value fits a field annotated ``bool``, ``str``, ``int``, ``float [| None]``."""
    if value is None:
        return "None" in kind
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    allowed = {"str": str, "int": int}.get(kind, (int, float))
    return isinstance(value, allowed)


def _value(value: Any) -> str:
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{source} is not valid TOML: {error}.") from None
    except RecursionError:
        raise ValueError(f"{source} is not valid TOML: too deeply nested.") from None
    return settings
