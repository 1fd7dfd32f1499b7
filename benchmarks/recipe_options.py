"""``--set margin=2``: a recipe with settings changed, for every script that untrains."""

from __future__ import annotations

import argparse
import ast
import dataclasses
from collections.abc import Sequence

import wfilter


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], help="recipe setting, name=value")


def changed(recipe: str, settings: Sequence[str]) -> wfilter.Recipe:
    """The recipe of that name with ``name=value`` settings, values as Python writes them."""
    values = dict(setting.split("=", 1) for setting in settings)
    changes = {name: ast.literal_eval(value) for name, value in values.items()}
    return dataclasses.replace(wfilter.RECIPES[recipe], **changes)
