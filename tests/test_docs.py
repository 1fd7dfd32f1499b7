"""The pages: their code runs, their links lead somewhere, and the site builds without a warning."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import wfilter

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


def made(target):
    """Whether the build makes this page: the commands, and an example for each script."""
    return target in MADE or (ROOT / target).with_suffix(".py").exists()


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES],
                         ids=lambda p: p.name)  # fmt: skip
def test_links_of_a_page_lead_to_files(page):
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert [target for target in missing if not made(target)] == []


def test_an_example_is_shown_with_its_own_output_only(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import gallery

    name = "own_layer"
    assert "It printed" in gallery.page(name)
    (tmp_path / f"{name}.py").write_text(
        f"{(ROOT / 'examples' / name).with_suffix('.py').read_text()}\n"
    )
    monkeypatch.setattr(gallery, "EXAMPLES", tmp_path)
    assert "It printed" not in gallery.page(name)


@pytest.mark.slow
def test_every_example_was_run_as_it_is_now(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import gallery

    assert [name for name in gallery.names() if gallery.stored_run(name) is None] == []


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs" / "api.rst").read_text(encoding="utf-8")
    missing = [
        name for name in wfilter.__all__ if not re.search(rf":: wfilter\.(\w+\.)?{name}\n", text)
    ]
    assert missing == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= SHORT_AS_TEXT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as its command builds it: a warning is an error."""
    pytest.importorskip("furo")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "docs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


class Anchors(HTMLParser):
    """What a page links to, and the places in it that others can link to."""

    def __init__(self, page):
        super().__init__()
        self.links, self.ids = [], set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        self.links += [given[key] for key in ("href", "src") if given.get(key)]


def test_every_link_of_the_site_leads_to_a_page_and_a_place_in_it(site):
    pages = {page: Anchors(page) for page in site.rglob("*.html")}
    broken = []
    for page, anchors in pages.items():
        for link in anchors.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            found = target.is_file() and (
                not url.fragment
                or target not in pages
                or unquote(url.fragment) in pages[target].ids
            )
            broken += [] if found else [f"{page.name}: {link}"]
    assert len(pages) > 30
    assert broken == []
