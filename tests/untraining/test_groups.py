"""Gates of layers that make the same channel open and close together."""

import dataclasses

import pytest
import torch
from torch import nn

import wfilter
from wfilter.untraining.groups import find_groups

CLASSES, WIDTH = 4, 12


class Stream(nn.Module):
    """Two layers add to one stream; a third has channels of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x).relu()
        return self.head(x + self.second(self.inner(x).relu()))


@pytest.fixture
def wf():
    torch.manual_seed(0)
    targets = ["first.weight", "inner.weight", "second.weight"]
    return wfilter.apply_weight_filtering(Stream().eval(), targets=targets)


def images():
    torch.manual_seed(1)
    return wfilter.InMemory(torch.randn(64, 6), torch.arange(64) % CLASSES, batch_size=16)


def tied(**changes):
    return dataclasses.replace(wfilter.RECIPES["distill"], groups=True, depth=1.0, **changes)


def test_layers_that_add_to_one_stream_are_one_group(wf):
    groups = find_groups(wf, torch.zeros(1, 6))
    alone = torch.arange(3 * WIDTH)
    assert torch.equal(groups[:WIDTH], groups[2 * WIDTH :])
    assert torch.equal(groups[: 2 * WIDTH], alone[: 2 * WIDTH])


def test_tied_gates_stay_equal_and_others_do_not(wf):
    with torch.no_grad():
        wf.alphas.uniform_(0, 2)  # not even where they start from one place
    wfilter.untrain(wf, images(), recipe=tied(), steps=20)
    assert torch.equal(wf.alpha["first.weight"], wf.alpha["second.weight"])
    assert not torch.equal(wf.alpha["first.weight"], wf.alpha["inner.weight"])


def test_what_closes_together_can_be_pruned(wf):
    with torch.no_grad():
        for name in ("first.weight", "second.weight"):
            wf.alpha[name][1, :5] = -1000.0
    assert wf.bake(1, prune=True).head.in_features == WIDTH - 5
    with torch.no_grad():
        wf.alpha["second.weight"][1, :5] = 1000.0
    assert wf.bake(1, prune=True).head.in_features == WIDTH


def test_gates_pinned_open_tie_nothing(wf):
    wf.pin_open(["first.weight"])
    groups = find_groups(wf, torch.zeros(1, 6))
    assert torch.equal(groups, torch.arange(3 * WIDTH))


def test_one_gate_per_element_is_refused():
    wf = wfilter.apply_weight_filtering(
        Stream().eval(), targets=["first.weight", "second.weight"], granularity="element"
    )
    with pytest.raises(ValueError, match="one gate per output channel"):
        wfilter.untrain(wf, images(), recipe=tied(), steps=1)
