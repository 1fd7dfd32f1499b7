"""The house keeps its order: what a file may import is decided by its folder."""

import ast
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import wfilter

PACKAGE = Path(wfilter.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Imports point to folders further left, or to the same one.
LAYERS = (
    *("core", "data", "files", "metrics", "untraining", "baselines", "explain", "evaluation"),
    *("plots", "page", "serve", "cli"),
)
# Imports of our own modules inside a function, each with its reason.
HIDDEN = {
    (
        "core/model.py",
        "wfilter.files.checkpoint",
    ): "wf.save, wf.push_to_hub: methods users type",
    ("untraining/history.py", "wfilter.plots"): "history.plot is a method users type",
}
DEFINED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
STARTS_FAST = ("cli/commands/", "cli/options.py")  # `wfilter --help` must not wait for torch


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def layer_of(module: str) -> int | None:
    """The layer of a module by its dotted name; ``None`` for the package itself."""
    parts = module.split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] in LAYERS else None


def module_of(node: ast.ImportFrom, name: str) -> str:
    """The module an imported name is, or is defined in."""
    path = PACKAGE.parent.joinpath(*str(node.module).split("."), name)
    is_module = path.is_dir() or path.with_suffix(".py").exists()
    return f"{node.module}.{name}" if is_module else str(node.module)


def imports(path: Path) -> Iterator[tuple[ast.AST, str, str]]:
    """Our own modules that a file imports: the statement, the module and the name imported."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "wfilter":
            for alias in node.names:
                yield node, module_of(node, alias.name), alias.name
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "wfilter":
                    yield node, alias.name, ""


def at_the_top(path: Path) -> set[int]:
    """Lines of imports that run when a file is imported, `if TYPE_CHECKING` included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.If))]
    return {node.lineno for node in itertools.chain(*blocks)}


def private_reaches(path: Path) -> Iterator[str]:
    """Underscore names of others: imported, or read off anything but ``self`` and ``cls``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {
        node.name if isinstance(node, DEFINED) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, DEFINED)
        or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    }
    own |= {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for _, module, name in imports(path):
        if is_private(name):
            yield f"{module}.{name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield ast.unparse(node)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_imports_a_higher_layer(path):
    layer = layer_of(".".join(("wfilter", *path.relative_to(PACKAGE).parts)))
    if layer is None:
        return  # the package itself, which reads public names from everywhere
    above = [m for _, m, _ in imports(path) if (layer_of(m) or 0) > layer]
    allowed = [module for file, module in HIDDEN if file == name_of(path)]
    assert [module for module in above if module not in allowed] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_import_of_our_own_hides_in_a_function_without_a_reason(path):
    if name_of(path).startswith((*STARTS_FAST, "__init__.py")):
        return
    top = at_the_top(path)
    hidden = {module for node, module, _ in imports(path) if node.lineno not in top}
    assert {module for module in hidden if (name_of(path), module) not in HIDDEN} == set()


def test_every_reason_for_a_hidden_import_is_still_needed():
    hidden = set()
    for path in FILES:
        top = at_the_top(path)
        hidden |= {(name_of(path), m) for node, m, _ in imports(path) if node.lineno not in top}
    assert set(HIDDEN) <= hidden


# Private names of torch and others that have no public twin.
FOREIGN = (
    "torch.",
    "nn.",
    "asyncio.",
    "sys.",
    "os.",
    "ast.",
    "mock.",
    "module._",
    "base._",
    "tensor._",
)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_reaches_into_the_private_names_of_another(path):
    assert [name for name in private_reaches(path) if not name.startswith(FOREIGN)] == []


def test_importing_the_package_loads_none_of_its_folders():
    code = "import sys, wfilter; print([m for m in sys.modules if m.startswith('wfilter.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
