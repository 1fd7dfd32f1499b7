"""Where samples lie in an output: found from the marks of one of them."""

import pytest
import torch

from wfilter.core.layouts import Layout, find_layout, possible_layouts


def marked(*shape, where):
    output = torch.zeros(shape)
    output[where] = float("nan")
    return output


@pytest.mark.parametrize(
    ("output", "axis", "expected"),
    [
        (marked(5, 7, where=1), -1, Layout(0, "plain")),
        (marked(4, 5, 7, where=(slice(None), 1)), -1, Layout(1, "plain")),
        (marked(15, 7, where=slice(3, 6)), -1, Layout(0, "major", 3)),
        (marked(15, 7, where=slice(1, None, 5)), -1, Layout(0, "minor", 3)),
        (marked(5, 7, where=2), -1, None),
        (marked(5, 7, where=slice(1, 3)), -1, None),
        (marked(5, 7, 5, where=(slice(None), slice(None), 1)), -2, None),
    ],
)
def test_layout_is_where_the_marked_sample_lies(output, axis, expected):
    assert find_layout(output, axis, 5) == expected


def test_an_empty_axis_holds_no_samples():
    assert possible_layouts(torch.Size([0, 4, 8, 8]), -3, 5) == []
    assert possible_layouts(torch.Size([5, 4, 8, 8]), -3, 5) == [Layout(0, "plain")]


def test_layout_prints_what_the_plan_shows():
    assert str(Layout(0, "plain")) == "batch on axis 0"
    assert str(Layout(1, "major")) == "batch on axis 1, folded batch-major"
