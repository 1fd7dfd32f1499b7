"""The pages: their code runs, their links lead somewhere, and the site builds without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
MADE = ("command-line.md", "examples.md")  # by the build
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
SHORT_AS_TEXT = 9000


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in MADE], ids=lambda p: p.name)
def test_code_of_a_page_runs_in_order(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    for source in BLOCK.findall(page.read_text(encoding="utf-8")):
        exec(compile(source, page.name, "exec"), space)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES],
                         ids=lambda p: p.name)  # fmt: skip
def test_links_of_a_page_lead_to_files(page):
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert [target for target in missing if target not in MADE] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= SHORT_AS_TEXT


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("furo")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "index.html").exists()
