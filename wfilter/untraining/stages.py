"""Which stages ``recipe="auto"`` tries, one after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from wfilter.untraining.objectives import Distill

EXPANSION = 4  # pairs of each image in a step
MANY = 256  # classes, from which on rows are not learned in steps
WIDE = 100  # units for each class, from which on exact gates have enough to choose from
SHARES = (0.2, 0.5, 1.0)
WITHOUT_STEPS = ("linear", "reroute")


@dataclass(frozen=True)
class Stage:
    """One thing to try: exact or soft gates, on the last ``share`` of the filtered layers.

    Example:
        >>> Stage.parse("hard 0.2, soft 1.0")[1]
        Stage(gates='soft', share=1.0)
    """

    gates: str
    share: float = 1.0

    @staticmethod
    def parse(text: str) -> list[Stage]:
        """The stages that a recipe lists."""
        stages = []
        for word in text.split(","):
            gates, _, share = word.strip().partition(" ")
            try:
                stage = Stage(gates, float(share or 1))
            except ValueError:
                stage = Stage("", 0)
            if stage.gates not in ("hard", "soft", *WITHOUT_STEPS) or not 0 < stage.share <= 1:
                raise ValueError(
                    f"stages={text!r} has {word.strip()!r}. Give 'hard 0.2', 'soft 1.0', with a "
                    "share of the layers, 'linear' or 'reroute', separated by commas."
                )
            stages.append(stage)
        return stages

    def __str__(self) -> str:
        return self.gates if self.gates in WITHOUT_STEPS else f"{self.gates} {self.share:g}"

    def recipe(self) -> Distill:
        """The settings of its steps."""
        if self.gates == "hard":
            return Distill(
                str(self), optimiser="row_adam", learning_rate=0.15, start=1.0, **_COMMON
            )
        return Distill(str(self), optimiser="adam", learning_rate=0.3, start=2.0, **_COMMON)


_COMMON: dict[str, Any] = {"expansion": EXPANSION, "set_share": 0.5, "blend": 0.6, "margin": 5.0}


@dataclass(frozen=True)
class Outline:
    """What stages are chosen by: the size and kind of the filters.

    Attributes:
        units: Of each filtered layer, in the order of the model.
        classes: How many rows there are.
        element: Whether each element has a gate of its own.
        reroutes: Whether feature rows have a place in the model and in its data.
    """

    units: tuple[int, ...]
    classes: int
    element: bool = False
    reroutes: bool = True


def choose_stages(outline: Outline) -> tuple[list[Stage], str]:
    """What to try, and why.

    Example:
        >>> stages, why = choose_stages(Outline((32, 64, 64), classes=10))
        >>> [str(stage) for stage in stages]
        ['soft 0.5', 'reroute']
        >>> why[:71]
        '3 filtered layers: the last 50% have 13 units for each class, so soft g'
    """
    layers, classes = len(outline.units), outline.classes
    if classes > MANY and outline.reroutes:
        return [Stage("reroute")], f"{classes} classes: feature rows, which take no steps"
    if classes > MANY and not outline.element:
        return [Stage("linear")], f"{classes} classes: rows are solved, not learned in steps"
    shares = [s for s in SHARES if s == 1 or s * layers >= 1]
    text = f"{layers} filtered layers: "
    if not outline.reroutes:
        stages = [Stage(gates, share) for share in shares for gates in ("hard", "soft")]
        return stages, f"{text}exact and soft gates, from the last {shares[0]:.0%} of them to all"
    each = sum(outline.units[layers - moving_layers(shares[0], layers) :]) / classes
    kind, name = ("hard", "exact") if each >= WIDE else ("soft", "soft")
    why = (
        f"{text}the last {shares[0]:.0%} have {each:.0f} units for each class, so {name} gates; "
        "feature rows if these fall short"
    )
    return [Stage(kind, shares[0]), Stage("reroute")], why


def moving_layers(share: float, layers: int) -> int:
    """How many of the layers a stage moves.

    Example:
        >>> moving_layers(0.5, 3)
        2
    """
    return max(1, math.ceil(share * layers))
