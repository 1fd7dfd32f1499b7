"""The atlas: one static page of every architecture examined, searchable, without the network.

python benchmarks/registry/atlas.py     # results/registry.jsonl -> docs/atlas.html
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[2] / "docs" / "atlas.html"

FRAME = Path(__file__).with_suffix(".html")


def cells(row: Mapping[str, Any]) -> list[str]:
    """What the page shows of one architecture, and the words it is found by."""
    paths = ", ".join(f"{count} {path}" for path, count in row.get("paths", {}).items())
    errors = [row[name] for name in ("labels", "sets") if row.get(name) is not None]
    why = "" if row["status"] == "pass" else " ".join(str(row.get("why", "")).split())[:160]
    return [
        row["key"],
        row.get("family", ""),
        row["status"],
        paths,
        f"{max(errors):.0e}" if errors else "",
        f"{row['ratio']:.2f}" if row.get("ratio") else "",
        why,
    ]


def atlas(rows: list[Mapping[str, Any]]) -> str:
    """The whole page."""
    data = json.dumps([cells(row) for row in rows], separators=(",", ":"))
    # A closing tag inside the data would end the script element that holds it.
    frame = FRAME.read_text(encoding="utf-8").replace("$COUNT", f"{len(rows):,}")
    return frame.replace("$DATA", data.replace("<", "\\u003c"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=Path, default=RESULTS / "registry.jsonl")
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.lines.read_text().splitlines()]
    args.out.write_text(atlas(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
