"""Lines: the course of untraining, insertion and deletion."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wfilter.explain import ClassCurves, mean_curve
from wfilter.plots.figure import BLUE, GREY, ORANGE, PALETTE, WIDTH, drawing

if TYPE_CHECKING:
    from wfilter.untraining.history import History


def history_plot(history: History, path: str | Path) -> Path:
    """Loss, accuracies and the share of closed gates against steps.

    Example:
        >>> import tempfile
        >>> from wfilter.untraining.history import History, Record
        >>> records = [Record(i, 0, 0.0, 1 / i, 0.9, 0.1, 0.05) for i in (1, 2, 3)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     history_plot(History({"name": "distill"}, 0, records), f"{folder}/a.png").name
        'a.png'
    """
    records = history.records
    if not records:
        raise ValueError("the history has no records: untrain for a step or more before plotting.")
    steps = [record.step for record in records]
    with drawing(path, WIDTH, 4.6, rows=2, sharex=True) as (_, (loss, shares)):
        loss.plot(steps, [record.loss for record in records], color=BLUE, label="loss")
        checked = [r for r in records if r.validation is not None]
        if checked:
            values = [r.validation for r in checked]
            loss.plot([r.step for r in checked], values, "o-", color=ORANGE, label="validation")
        loss.set_ylabel("loss")
        loss.legend(loc="upper right")
        for name, label, colour in (
            ("retain_accuracy", "retain accuracy", PALETTE[2]),
            ("forget_accuracy", "forget accuracy", PALETTE[3]),
            ("closed", "closed gates", GREY),
        ):
            shares.plot(steps, [getattr(r, name) for r in records], color=colour, label=label)
        shares.set(xlabel="step", ylabel="share", ylim=(-0.03, 1.03))
        _legend_below(shares, 3)
    return Path(path)


def _legend_below(axes: Any, columns: int) -> None:
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=columns, fontsize=9, columnspacing=1
    )


def curves_plot(curves: Mapping[int, ClassCurves], path: str | Path, *, title: str = "") -> Path:
    """Insertion and deletion: the mean over classes, each class thinly, and the random control.

    Example:
        >>> import tempfile
        >>> from wfilter.metrics import Curve
        >>> up, down = Curve((0.0, 1.0), (0.0, 1.0)), Curve((0.0, 1.0), (1.0, 0.0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     curves_plot({0: ClassCurves(up, down, up, down)}, f"{folder}/a.png").name
        'a.png'
    """
    with drawing(path, WIDTH, 5.0, rows=2, sharex=True, sharey=True) as (_, pair):
        for axes, kind, verb in zip(pair, ("insertion", "deletion"), ("opened", "closed")):
            for name, colour, label in (
                (kind, BLUE, "most closed gate first"),
                (f"random_{kind}", GREY, "random order"),
            ):
                each = [getattr(of_class, name) for of_class in curves.values()]
                for curve in each if len(each) > 1 else ():
                    axes.plot(curve.shares, curve.values, color=colour, lw=0.8, alpha=0.5)
                mean = mean_curve(each)
                text = f"{label}: area {mean.auc:.3f}"
                axes.plot(mean.shares, mean.values, color=colour, lw=2.4, label=text)
            axes.set_ylabel("relative confidence")
            axes.legend(
                title=f"{kind}: units {verb}", title_fontsize=12, alignment="left",
                loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderpad=0,
            )  # fmt: skip
        pair[1].set_xlabel(f"share of the units of every layer{', ' + title if title else ''}")
        pair[0].set_ylim(-0.05, 1.15)
    return Path(path)
