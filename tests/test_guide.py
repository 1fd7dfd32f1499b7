"""What CONTRIBUTING.md and docs/design.md claim about the code is so."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from test_layers import FILES, LAYERS, PACKAGE, name_of

ROOT = Path(__file__).parents[1]
GUIDE, DESIGN = ROOT / "CONTRIBUTING.md", ROOT / "docs" / "design.md"
FILE = re.compile(r"`((?:[\w.-]+/)+(?:[\w.-]+)?)`")
WHERE = re.compile(r"`(\w+)`\s+\(`([\w/]+\.py)`\)")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
LONGEST_FILE, LONGEST_FUNCTION = 400, 40


def section(page: Path, title: str) -> str:
    return page.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_cells(table: str) -> list[str]:
    return [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize("page", [GUIDE, DESIGN], ids=lambda page: page.name)
def test_every_file_that_the_page_names_is_there(page):
    named = set(FILE.findall(page.read_text(encoding="utf-8"))) - {"wfilter/"}
    assert len(named) > 15
    assert [n for n in named if not ((PACKAGE / n).exists() or (ROOT / n).exists())] == []


def test_every_function_that_the_design_places_in_a_file_is_defined_there():
    placed = WHERE.findall(DESIGN.read_text(encoding="utf-8"))
    assert len(placed) > 25
    for name, file in placed:
        text = (PACKAGE / file).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), (name, file)


def test_the_table_of_folders_is_the_order_of_the_layers():
    cells = first_cells(section(GUIDE, "Where things are").split("Inside `core/`")[0])
    assert tuple(re.findall(r"`(\w+)/`", " ".join(cells))) == LAYERS


def test_every_file_of_core_has_its_step_in_the_reading_order():
    order = section(GUIDE, "Where things are").split("Inside `core/`")[1]
    files = [row.split("|")[2] for row in order.splitlines() if row.startswith("|")][2:]
    named = re.findall(r"`(\w+)`", " ".join(files))
    assert sorted(named) == sorted(p.stem for p in (PACKAGE / "core").glob("[!_]*.py"))


def test_the_list_of_files_is_the_first_line_of_each_files_docstring():
    guide = GUIDE.read_text(encoding="utf-8")
    files = module_at(ROOT / "docs" / "files.py")
    assert files.folders_of(guide) == list(LAYERS)
    assert [p for p in FILES if not files.first_line(p).endswith((".", "?"))] == []
    assert files.rewritten(guide, list(LAYERS)) == guide, "run python docs/files.py"


def test_tests_have_the_folders_of_the_package():
    assert [layer for layer in LAYERS if not list((ROOT / "tests" / layer).glob("test_*.py"))] == []


def test_no_class_name_stands_for_two_things():
    names = [
        node.name
        for path in FILES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_the_glossary_has_fifteen_to_twenty_words():
    assert 15 <= len(first_cells(section(GUIDE, "Words"))) <= 20


def test_the_glossary_of_the_docs_is_that_table_alone():
    text = (ROOT / "docs" / "glossary.md").read_text()
    start, end = re.findall(r':(?:start-after|end-before): "(.*)"', text)
    included = GUIDE.read_text().split(f"{start}\n")[1].split(end)[0]
    assert included.strip() == section(GUIDE, "Words").strip()


def test_every_rival_plot_and_command_is_listed_where_the_guide_says():
    for folder in ("baselines", "plots", "cli/commands"):
        listed = (PACKAGE / folder / "__init__.py").read_text()
        helpers = ("batches", "edits", "finetune", "tuning", "figure")
        files = [p.stem for p in (PACKAGE / folder).glob("[!_]*.py") if p.stem not in helpers]
        assert [name for name in files if not re.search(rf"\b{name}\b", listed)] == []


def test_every_page_of_the_docs_is_in_its_index():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "index"]
    assert [page for page in pages if not re.search(rf"\b{page}(\.md)?\b", index)] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_are_short_enough_to_read(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_FILE
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, FUNCTIONS)]
    assert [node.name for node in functions if lines_below_docstring(node) > LONGEST_FUNCTION] == []


def lines_below_docstring(node: FUNCTIONS) -> int:
    rest = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return node.end_lineno - rest[0].lineno + 1 if rest else 0
