"""Blocks: which row is in force, what they leave behind, and threads kept apart."""

import copy
import pickle
import threading

import pytest
import torch

import reference
import wfilter
from helpers import (
    apply,
    assert_same_state,
    close,
    images,
    run_in_threads,
    shuffle_alphas,
    snapshot,
    tiny,
)

LABELS = torch.tensor([3, -1, 0, 1])


@torch.no_grad()
def test_blocks_nest_and_end_and_an_argument_wins(wf, x):
    plain, one, two = wf(x), wf(x, forget=1), wf(x, forget=2)
    with wf.forgetting(1):
        close(wf(x), one)
        close(wf.base(x), one)
        with wf.forgetting({2}):
            close(wf(x), two)
            with wf.forgetting(None):
                assert torch.equal(wf(x), plain)
            close(wf(x, forget=LABELS), reference_mixed(wf, x))
        close(wf(x), one)
        close(wf(x, forget=2), two)
    assert torch.equal(wf(x), plain)


def reference_mixed(wf, x):
    """The reference on an equal model outside the block (a base in a block is parametrized)."""
    return reference.logits(apply(tiny("cnn"), x), x, LABELS)


@torch.no_grad()
def test_block_that_raises_leaves_nothing_behind(wf, x):
    before = snapshot(wf.base)
    plain = wf(x)
    with pytest.raises(KeyError, match="mine"), wf.forgetting(1), wf.forgetting(2):
        raise KeyError("mine")
    with pytest.raises(ValueError, match="outside"), wf.forgetting(1):
        wf(x, forget=torch.tensor([0, 9, 1, 1]))
    assert_same_state(wf.base, before)
    assert all(type(m).__module__.startswith(("torch.nn", "helpers")) for m in wf.base.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in wf.base.modules())
    assert torch.equal(wf(x), plain)


@torch.no_grad()
def test_block_follows_the_alphas(wf, x):
    with wf.forgetting(1):
        before = wf(x)
        shuffle_alphas(wf, seed=9)
        after = wf(x)
    assert (before - after).abs().max() > 1e-6
    close(after, wf(x, forget=1))


def test_block_takes_no_labels(wf):
    with (
        pytest.raises(TypeError, match="forgetting takes one class or one set of classes"),
        wf.forgetting(LABELS),
    ):
        pass


@pytest.mark.parametrize(
    ("what", "action"),
    [
        ("bake", lambda wf: wf.bake(1)),
        ("verify", lambda wf: wf.verify(images(1, 3, 8, 8), 1)),
        ("save", lambda wf: wf.save("never.safetensors")),
        ("state_dict", lambda wf: wf.state_dict()),
        ("remove_weight_filtering", wfilter.remove_weight_filtering),
        ("copying or pickling", copy.deepcopy),
        ("copying or pickling", pickle.dumps),
    ],
)
def test_what_needs_plain_weights_is_refused_inside_a_block(wf, what, action):
    with (
        wf.forgetting(1),
        pytest.raises(RuntimeError, match=f"{what} inside a forgetting block. Leave the block"),
    ):
        action(wf)


@pytest.mark.parametrize("granularity", ["out", "element"])
def test_eight_threads_with_different_forget_are_all_right(granularity, tiny_cnn, x):
    wf = apply(tiny_cnn, x, granularity=granularity)
    forgets = [None, 2, *(torch.roll(LABELS, i) for i in range(4)), {1, 3}, torch.eye(4).bool()]
    with torch.no_grad():
        expected = [wf(x, forget=forget) for forget in forgets]

    def work(index):
        with torch.no_grad():
            for _ in range(20):
                close(wf(x, forget=forgets[index]), expected[index])

    run_in_threads(work)


def test_block_of_another_thread_is_refused(wf, x):
    with (
        wf.forgetting(1),
        pytest.raises(RuntimeError, match=r"another thread is inside wf\.forget"),
    ):
        run_in_threads(lambda index: wf(x, forget=2), count=1)
    run_in_threads(lambda index: wf(x, forget=2), count=2)


def test_a_forward_does_not_touch_the_filters_of_a_block_opened_since_it_began(wf, x, monkeypatch):
    entered, done, enabled = threading.Event(), threading.Event(), []

    def hold_a_block():
        with wf.forgetting(2):
            entered.set()
            done.wait(10)

    other = threading.Thread(target=hold_a_block)

    def open_it(*_):
        other.start()
        assert entered.wait(10)

    def look(*_):
        if threading.current_thread() is not other:
            enabled.extend(kept.enabled for kept in wf._blocks.scope.filters)

    monkeypatch.setattr(wf, "_refuse_recomputation", open_it)
    monkeypatch.setattr(wf, "_check_values", look)
    with pytest.raises(RuntimeError, match="another thread is inside"):
        wf(x, forget=1)
    done.set()
    other.join()
    assert enabled
    assert all(enabled)
