"""What ``recipe="auto"`` tries, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wfilter.untraining.recipes import Distill

EXPANSION = 4  # pairs of each image in a step
MANY = 256  # classes, from which on rows are solved
SHARES = (0.2, 0.5, 1.0)


@dataclass(frozen=True)
class Stage:
    """One thing to try: exact or soft gates, on the last ``share`` of the filtered layers.

    Example:
        >>> Stage.parse("hard 0.2, soft 1.0")[1]
        Stage(gates='soft', share=1.0)
    """

    gates: str
    share: float

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
            if stage.gates not in ("hard", "soft", "linear") or not 0 < stage.share <= 1:
                raise ValueError(
                    f"stages={text!r} has {word.strip()!r}. Give 'hard 0.2', 'soft 1.0', with a "
                    "share of the layers, or 'linear', separated by commas."
                )
            stages.append(stage)
        return stages

    def __str__(self) -> str:
        return self.gates if self.gates == "linear" else f"{self.gates} {self.share:g}"

    def recipe(self) -> Distill:
        """The settings of its steps."""
        if self.gates == "hard":
            return Distill(
                str(self), optimiser="row_adam", learning_rate=0.15, start=1.0, **_COMMON
            )
        return Distill(str(self), optimiser="adam", learning_rate=0.3, start=2.0, **_COMMON)


_COMMON: dict[str, Any] = {"expansion": EXPANSION, "set_share": 0.5, "blend": 0.6, "margin": 5.0}


def choose_stages(layers: int, classes: int, element: bool) -> tuple[list[Stage], str]:
    """What to try, and why.

    Example:
        >>> [str(stage) for stage in choose_stages(3, 10, False)[0]]
        ['hard 0.5', 'soft 0.5', 'hard 1', 'soft 1']
    """
    if classes > MANY and not element:
        return [Stage("linear", 1.0)], f"{classes} classes: rows are solved, not learned in steps"
    shares = [s for s in SHARES if s == 1 or s * layers >= 1]
    stages = [Stage(gates, share) for share in shares for gates in ("hard", "soft")]
    return stages, f"{layers} filtered layers: from the last {shares[0]:.0%} of them to all"
