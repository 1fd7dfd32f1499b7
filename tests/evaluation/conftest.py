"""A filtered network of digits, and digits to measure it on."""

import copy
from dataclasses import replace
from functools import cache

import pytest

import digits
import wfilter


@cache
def _filtered():
    wf = wfilter.apply_weight_filtering(copy.deepcopy(digits.trained_cnn()))
    recipe = replace(wfilter.RECIPES["distill"], depth=1.0, set_share=0.0)
    wfilter.untrain(wf, wfilter.InMemory(*digits.data()[0]), steps=60, recipe=recipe)
    return wf


@pytest.fixture
def wf():
    return copy.deepcopy(_filtered())


@pytest.fixture
def test():
    images, labels = digits.data()[1]
    return images[:200], labels[:200]


@pytest.fixture
def train():
    return digits.data()[0]
