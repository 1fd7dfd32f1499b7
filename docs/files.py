"""The list of files at the end of CONTRIBUTING.md: the first line of each file's docstring.

python docs/files.py    # writes it anew; `tests/test_guide.py` says when that is needed
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, GUIDE = ROOT / "wfilter", ROOT / "CONTRIBUTING.md"
HEADING = "## Every file, in its own words\n"


def first_line(path: Path) -> str:
    """The first line of a file's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n")[0].replace("``", "`")


def list_of_files(folders: list[str]) -> str:
    """A line for each file of the package, folder after folder."""
    files = [path for folder in folders for path in sorted((PACKAGE / folder).rglob("[!_]*.py"))]
    return "\n".join(f"- `{path.relative_to(PACKAGE)}`: {first_line(path)}" for path in files)


def rewritten(guide: str, folders: list[str]) -> str:
    """The guide with this list in place of the one it has."""
    before, after = guide.split(HEADING)
    intro, following = after.split("\n\n- `")[0], after.split("\n\n## ", 1)[1]
    return f"{before}{HEADING}{intro}\n\n{list_of_files(folders)}\n\n## {following}"


def folders_of(guide: str) -> list[str]:
    """The folders of the first table under "Where things are", in its order."""
    table = guide.split("## Where things are")[1].split("|---|---|\n")[1].split("\n\n")[0]
    cells = " ".join(row.split("|")[1] for row in table.splitlines())
    return [cell.removesuffix("/") for cell in cells.replace(",", " ").replace("`", " ").split()]


if __name__ == "__main__":
    text = GUIDE.read_text(encoding="utf-8")
    GUIDE.write_text(rewritten(text, folders_of(text)), encoding="utf-8")
