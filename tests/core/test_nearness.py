"""Differences are measured so that neither NaN nor logits far below all others hide one."""

import math

import pytest
import torch

from wfilter.core.nearness import gap, size

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("answered", "expected", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([1.0, -INF], [1.25, -INF], 0.25),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0, 2.0], [NAN, 2.0], INF),
        ([NAN], [NAN], INF),
        ([INF], [-INF], INF),
        ([INF], [1.0], INF),
        ([], [], 0.0),
    ],
)
def test_nan_is_far_from_anything_and_equal_infinities_are_alike(answered, expected, apart):
    assert gap(torch.tensor(answered), torch.tensor(expected)) == apart


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([3.0, -4.0], 4.0),
        ([3.0, -103.0], 3.0),  # feature rows
        ([3.0, -1e4], 3.0),  # a folded head
        ([3.0, -INF], 3.0),
        ([NAN, 2.0], 2.0),
        ([-300.0, -200.0], 300.0),
        ([-INF], 0.0),
        ([], 0.0),
    ],
)
def test_the_size_of_logits_leaves_those_out_that_lie_far_below_all_others(logits, expected):
    assert size(torch.tensor(logits)) == expected
