"""The page of all architectures is that of the stored lines, and carries them safely."""

import json
import re

from common import read_lines
from registry import atlas

LINES = read_lines(atlas.RESULTS / "registry.jsonl")


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_stored_page_has_a_row_for_every_architecture_examined():
    stored = atlas.PAGE.read_text(encoding="utf-8")
    assert stored == atlas.atlas(LINES), "python benchmarks/registry/atlas.py"
    assert [row[0] for row in data_of(stored)] == [line["key"] for line in LINES]


def test_a_reason_cannot_end_the_script_that_holds_it():
    row = {"key": "timm/a", "status": "refused", "why": "</script><b>\n mixes"}
    page = atlas.atlas([row])
    assert page.count("</script>") == atlas.atlas([]).count("</script>")
    assert data_of(page)[0][-1] == "</script><b> mixes"


def test_the_page_asks_nothing_of_the_network():
    assert not re.search(r"https?://|src=", atlas.atlas(LINES))
