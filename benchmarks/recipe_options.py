"""``--set margin=2``: a recipe with settings changed, for every script that untrains."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from wfilter import Recipe
from wfilter.cli.settings import make_recipe, parse_changes


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], help="recipe setting, name=value")


def changed(recipe: str, settings: Sequence[str]) -> Recipe:
    """The recipe of that name with ``name=value`` settings, as on wfilter's command line."""
    return make_recipe(recipe, parse_changes(settings))
