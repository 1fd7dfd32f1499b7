"""What `benchmarks/house.py` counts of a small package written for it."""

import house

GUIDE = """## Where things are

Imports point up.

| folder | what |
|---|---|
| `low/` | first |
| `high/` | second |

Text with `other/` folders.
"""


def test_docstrings_comments_and_blank_lines_are_no_code():
    text = '"""Two\nlines."""\n\n# why\nx = """kept\nas code"""\n\n\ndef f():\n    """One."""\n'
    assert house.code_lines(text) == 3


def test_imports_down_the_guide_s_table_hidden_and_private_ones_are_counted(tmp_path):
    files = {
        "wfilter/__init__.py": "",
        "wfilter/low/a.py": "def f():\n    from wfilter.high.b import g\n",
        "wfilter/high/b.py": "from wfilter.low.a import _f, f\n\ng = f\n",
        "tests/test_a.py": "def test_one():\n    pass\n",
        "CONTRIBUTING.md": GUIDE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    counts = house.measure(tmp_path)
    assert counts["files"] == 3
    assert counts["imports of our own"] == 3
    assert counts["imports against the order"] == 1
    assert counts["imports hidden in functions"] == 1
    assert counts["imports of underscore names"] == 1
    assert counts["modules loaded by import wfilter"] == 0
    assert counts["tests"] == 1
