"""The docs' figures, from stored lines: what features still know, and what tenants cost.

    python benchmarks/figures.py                      # results/*.jsonl -> docs/figures/*.svg
    WFILTER_DATA=... python benchmarks/figures.py --units RUN --forget cat

The second command draws the units that one class closes in the last filtered layer of RUN, a folder
that `wfilter untrain` wrote, with the test images that excite each of them most
(`docs/figures/units.png`).

Every SVG is written twice, with dark text and, as ``NAME-dark.svg``, with light text; the site
shows the one that fits. Methods differ in colour and in shape, so that the figures can be read
without colour and in print. Methods are compared on the classes that all of them were measured on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from common import RESULTS, read_lines
from wfilter.plots.figure import GREY, INK, PALETTE, WIDTH, drawing

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
LIGHT = "#d6dae0"  # text and axes on a dark ground
NAMES = {"row": "feature rows", "mask": "logit mask", "folded": "feature row, baked",
         "logit_mask": "logit mask", "wfilter": "the default"}  # fmt: skip
STYLES = {  # colour, shape: ours filled, the bar a star, everything else hollow
    "retrained": (INK, "*"),
    "original": (GREY, "o"),
    "the default": (PALETTE[0], "s"),
    "feature rows": (PALETTE[1], "D"),
    "feature row, baked": (PALETTE[1], "d"),
    "logit mask": (PALETTE[2], "^"),
    "projection": (PALETTE[4], "v"),
}
OTHERS = [(c, m) for m in "<>pXP" for c in (PALETTE[3], PALETTE[5], PALETTE[6], PALETTE[9])]
FILLED = ("retrained", "the default", "feature rows")
LEAST_POINTS = 3  # of Acc_r, from the lower to the upper end of its axis
SERVERS = {
    "ours": ("one filtered model for all", PALETTE[0], "s"),
    "multiplexed": ("one baked model each", PALETTE[1], "o"),
    "single": ("filtered, one request at a time", GREY, "^"),
}


@dataclass
class Points:
    """One picture: accuracies in % of each method, a value for each class it was measured on."""

    name: str
    caption: str
    retain: dict[str, dict[int, float]] = field(default_factory=dict)
    probe: dict[str, dict[int, float]] = field(default_factory=dict)

    def add(self, method: str, row: int, retain: float, probe: float) -> None:
        """One method on one class; a later line replaces an earlier one."""
        method = NAMES.get(method, method.replace("_", " "))
        self.retain.setdefault(method, {})[row] = retain
        self.probe.setdefault(method, {})[row] = probe

    @property
    def classes(self) -> set[int]:
        """Those that every method was measured on: only there can methods be compared."""
        return set.intersection(*(set(rows) for rows in self.retain.values()))

    def point(self, method: str) -> tuple[float, float]:
        """Where a method lies: probe and Acc_r, means over the classes."""
        both = (self.probe[method], self.retain[method])
        return tuple(mean(values[row] for row in self.classes) for values in both)  # type: ignore


def short(rows: set[int]) -> str:
    ordered = sorted(rows)
    whole = len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1))
    return f"{ordered[0]}-{ordered[-1]}" if whole else ", ".join(map(str, ordered))


def audits(results: Path) -> Iterator[Points]:
    """A picture of each audit, `benchmarks/audit.py`."""
    for path in sorted(results.glob("audit_*.jsonl")):
        lines = read_lines(path)
        of = f"`{lines[0]['network']}`" if lines else ""
        caption = f"{of}, audited: `python benchmarks/audit.py`, lines in `{path.name}`"
        points = Points(f"probe-{path.stem.removeprefix('audit_')}", caption)
        for line in lines:
            row, cells = line["class"], line["report"]["rows"][line["method"]]
            if "probe f" in cells and "Acc_r" in cells:
                retain, probe = (cells[c]["by_class"][str(row)] for c in ("Acc_r", "probe f"))
                points.add(line["method"], row, 100 * retain, 100 * probe)
        yield points


def feature_rows(results: Path) -> Iterator[Points]:
    """A picture of each network of `benchmarks/feature_rows.py`."""
    found: dict[str, Points] = {}
    for line in read_lines(results / "feature_rows.jsonl"):
        if line.get("linear_probe") is None or "forget" not in line or "acc_r" not in line:
            continue
        model = line["model"].rpartition(":")[2]
        what = "feature rows"
        if "together" in line:  # Acc_r is of fewer classes: no picture with single ones
            model, what = f"{model}-together", f"{what}, the classes forgotten together"
        caption = (
            f"`{line['model'].rpartition(':')[2]}`, {what}: `python benchmarks/feature_rows.py`"
        )
        points = found.setdefault(model, Points(f"probe-rows-{model}", caption))
        points.add(line["method"], line["forget"], line["acc_r"], line["linear_probe"])
    yield from found.values()


def probe_plot(points: Points, path: Path) -> Path:
    """Accuracy on the other classes against what a linear probe finds of the forgotten one."""
    spare = iter(OTHERS)
    methods = sorted(points.retain, key=lambda m: [*STYLES, m].index(m))
    with drawing(path, WIDTH, 3.9 + 0.1 * len(methods)) as (figure, axes):
        for method in methods:
            colour, shape = STYLES.get(method) or next(spare)
            inside = colour if method in FILLED else "none"
            style = {"mec": colour, "mfc": inside, "mew": 1.8, "linestyle": "none"}
            size = 15 if method == "retrained" else 9
            axes.plot(*points.point(method), shape, ms=size, label=method, clip_on=False, **style)
        axes.set(xlim=(-2, 103), ylabel="other classes right, %  (Acc_r)")
        axes.set_xlabel("forgotten class found by a linear probe, %")
        axes.margins(y=0.25)
        low, high = axes.get_ylim()
        wider = max(0, LEAST_POINTS - (high - low)) / 2  # a tenth of a point is to look small
        top = min(high + wider, 100.3)  # no accuracy is higher; the mark of one at 100 is whole
        axes.set_ylim(min(low - wider, top - LEAST_POINTS), top)
        axes.grid(alpha=0.25)
        word = "class" if len(points.classes) == 1 else "classes"
        title = f"forgetting {word} {short(points.classes)}"
        figure.legend(loc="outside lower center", title=title, ncols=2, fontsize=10)
    return path


def shown(points: Points) -> str:
    """A figure and its caption as Markdown, for the page that shows them all."""
    alt = "accuracy on the other classes against what a linear probe finds of the forgotten one"
    light, dark = (f"![{alt}](figures/{points.name}{end}.svg)" for end in ("", "-dark"))
    return f"{light}{{.only-light}}{dark}{{.only-dark}}\n\n*{points.caption}.*\n"


def tenants_plot(lines: list[dict[str, Any]], path: Path) -> Path:
    """Computing and memory of three servers against the number of tenants."""
    with drawing(path, WIDTH, 5.4, rows=2, sharex=True) as (figure, (computing, memory)):
        for server, (label, colour, shape) in SERVERS.items():
            mine = sorted((x for x in lines if x["server"] == server), key=lambda x: x["tenants"])
            counts = [x["tenants"] for x in mine]
            style = {"color": colour, "marker": shape, "ms": 7, "lw": 2}
            computing.plot(counts, [x["cpu_ms"] for x in mine], label=label, **style)
            memory.plot(counts, [x["memory_mib"] for x in mine], **style)
        computing.set(ylabel="a request, CPU ms")
        memory.set(ylabel="a replica, MiB", xlabel="tenants")
        for axes in (computing, memory):
            axes.set(xscale="log")
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.minorticks_off()
            axes.grid(alpha=0.25)
        figure.legend(loc="outside lower center", fontsize=10)
    return path


def in_dark(path: Path) -> Path:
    """The same picture with light text and axes."""
    dark = path.with_name(f"{path.stem}-dark.svg")
    dark.write_text(path.read_text(encoding="utf-8").replace(INK, LIGHT), encoding="utf-8")
    return dark


def draw_all(results: Path, out: Path) -> list[Path]:
    """Every figure that the stored lines allow."""
    out.mkdir(exist_ok=True)
    for old in out.glob("*.svg"):
        old.unlink()
    every = [*audits(results), *feature_rows(results)]
    drawn = [points for points in every if len(points.retain) > 1 and points.classes]
    made = [probe_plot(points, out / f"{points.name}.svg") for points in drawn]
    (out / "probe.md").write_text("\n".join(map(shown, drawn)), encoding="utf-8")
    lines = read_lines(results / "serve.jsonl")
    made.append(tenants_plot(lines, out / "tenants.svg"))
    return made + [in_dark(path) for path in made]


def units_plot(run: Path, forget: str, out: Path, units: int = 5, images: int = 2000) -> Path:
    """The units that a class closes in the last layer, and the test images that excite each."""
    import torch

    from wfilter import explain, plots
    from wfilter.cli import jobs

    opened = jobs.open_filters(run)
    wf, test = opened.wf, opened.job.images("test")
    pixels, labels = test.batch(torch.arange(images))
    layer = explain.default_layers(wf)[-1]
    top = explain.top_units(wf, forget, layer=layer, k=units)
    responses = explain.unit_responses(wf, layer, pixels)
    shown = torch.cat([responses[:, unit.index].topk(8).indices for unit in top])
    captions = [test.class_names[label] for label in labels[shown].tolist()]
    lines = [f"unit {unit.index}\ngate {unit.gate:.2f}" for unit in top]
    path = out / "units.png"
    return plots.pictures(test.images[shown] / 255, path, captions, columns=8, lines=lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FIGURES)
    parser.add_argument("--units", type=Path, metavar="RUN", help="draw the units of this run only")
    parser.add_argument("--forget", default="cat", help="whose units; a class by name")
    args = parser.parse_args()
    if args.units:
        made = [units_plot(args.units, args.forget, args.out)]
    else:
        made = draw_all(RESULTS, args.out)
    print(*made, sep="\n")


if __name__ == "__main__":
    main()
