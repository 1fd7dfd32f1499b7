"""Targets pinned open: a forward skips their gates, so no other alphas may stand there unseen."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from helpers import LABELS, SETS, apply, close, images, tiny
from wfilter.core.oracle import one_at_a_time

FORGETS = [1, {0, 2}, LABELS, SETS]


def pinned():
    """A filtered model with its first and its last target pinned open, used once, and images."""
    x = images(4, 3, 8, 8)
    wf = apply(tiny("cnn"), x)
    wf.pin_open([wf.targets[0].name, wf.targets[-1].name])
    wf(x, forget=LABELS)
    return wf, x


def moved(wf):
    """All alphas, those of the first target no longer open."""
    alphas = wf.alphas.detach().clone()
    alphas[:, : wf.targets[0].units] = -3
    return alphas


def by_functional_call(wf, x, forget):
    return functional_call(wf, {"alphas": moved(wf)}, (x, forget))


def of_a_copy(wf, x, forget):
    fresh = copy.deepcopy(wf)
    fresh(x, forget)
    return functional_call(fresh, {"alphas": moved(wf)}, (x, forget))


def by_data(wf, x, forget):
    wf.alphas.data[:, : wf.targets[0].units] = -3
    return wf(x, forget)


def by_other_data(wf, x, forget):
    wf.alphas.data = moved(wf)
    return wf(x, forget)


def by_another_parameter(wf, x, forget):
    wf.alphas = nn.Parameter(moved(wf))
    return wf(x, forget)


def in_a_block(wf, x, forget):
    wf.alphas.data = moved(wf)
    with wf.forgetting(1):
        return wf.base(x)


@torch.no_grad()
@pytest.mark.parametrize("forget", FORGETS)
@pytest.mark.parametrize(
    "edit",
    [by_functional_call, of_a_copy, by_data, by_other_data, by_another_parameter, in_a_block],
)
def test_pinned_alphas_that_were_edited_are_refused_however_that_was_done(edit, forget):
    wf, x = pinned()
    with pytest.raises(RuntimeError, match=r"stem\.weight is pinned open"):
        edit(wf, x, forget)


@torch.no_grad()
@pytest.mark.parametrize("forget", [LABELS, SETS])
def test_alphas_beside_the_pinned_ones_act_when_edited(forget):
    wf, x = pinned()
    before = wf(x, forget)
    wf.alphas.data[:, wf.targets[0].units : -wf.targets[-1].units] = -1
    assert not torch.allclose(wf(x, forget), before)
    close(wf(x, forget), one_at_a_time(wf, x, forget))


@torch.no_grad()
def test_replicas_that_share_look_at_alphas_as_others_do():
    x = images(4, 3, 8, 8)
    wf = apply(tiny("cnn"), x)
    wf.pin_open([wf.targets[0].name])
    labels = torch.arange(8) % 3
    wf.replicated(x, labels)
    assert wf.pins.shares
    wf.alphas.data[1, -1] = torch.nan
    with pytest.raises(ValueError, match="contain NaN"):
        wf.replicated(x, labels)
    wf.alphas.data = moved(wf).nan_to_num(0)
    with pytest.raises(RuntimeError, match="is pinned open"):
        wf.replicated(x, labels)


@torch.no_grad()
def test_where_no_look_is_free_pinned_alphas_are_looked_at_after_a_change(monkeypatch):
    wf, x = pinned()
    looks = []
    monkeypatch.setattr(
        "wfilter.core.refusals.readable", lambda values: False
    )  # as on a device, where a look waits
    monkeypatch.setattr(wf.pins, "look", lambda wf, alphas: looks.append(alphas))
    for forget in FORGETS:
        wf(x, forget)
    assert len(looks) == 1
    wf.alphas.add_(1)
    wf(x, 1)
    functional_call(wf, {"alphas": wf.alphas.clone()}, (x, 1))
    assert len(looks) == 3


@torch.no_grad()
def test_pinned_alphas_under_vmap_are_refused_as_they_cannot_be_read():
    wf, x = pinned()
    with pytest.raises(RuntimeError):
        torch.vmap(lambda alphas: functional_call(wf, {"alphas": alphas}, (x, 1)))(wf.alphas[None])
