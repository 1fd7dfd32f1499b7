"""Blocks: which row is in force, what they leave behind, and threads kept apart."""

import asyncio
import copy
import pickle
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

import reference
import wfilter
from helpers import (
    apply,
    assert_same_state,
    close,
    images,
    randomise,
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
    """The reference on an equal model outside the block."""
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
    assert not any("forward" in vars(module) for module in wf.base.modules())
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


# ---- each context its own -----------------------------------------------------------------------


@torch.no_grad()
def test_another_thread_never_sees_a_block(wf, x):
    plain, two = wf(x), wf(x, forget=2)

    def work(index):
        with torch.no_grad():
            assert torch.equal(wf(x), plain)
            assert torch.equal(wf.base(x), plain)
            close(wf(x, forget=2), two)
            close(copy.deepcopy(wf)(x, forget=2), two)
            wf.state_dict()
            wf.bake(2)

    with wf.forgetting(1):
        run_in_threads(work, count=2)


async def serve(wf, x, forget, expected, pauses):
    """One request: opens a block, lets others run, and looks at its answers now and then."""
    with wf.forgetting(forget):  # no torch.no_grad(): that belongs to the thread
        for pause in range(pauses):
            await asyncio.sleep(0.0005 * ((pause * 7 + (forget or 0)) % 3))
            close((wf, wf.base)[pause % 2](x), expected)
    assert torch.equal(wf(x), wf.base(x))


def right_answers(wf, x):
    with torch.no_grad():
        return {forget: wf(x, forget=forget) for forget in (None, 0, 1, 2, 3)}


async def serve_all(wf, x, right, tasks, pauses):
    forgets = [(None, 0, 1, 2, 3)[task % 5] for task in range(tasks)]
    await asyncio.gather(*(serve(wf, x, f, right[f], pauses) for f in forgets))


@torch.no_grad()
def test_two_hundred_asyncio_tasks_on_one_thread_keep_their_blocks(wf, x):
    asyncio.run(serve_all(wf, x, right_answers(wf, x), tasks=200, pauses=3))
    assert wf.open_blocks == 0


def test_eight_threads_with_tasks_in_each_keep_their_blocks(wf, x):
    right = right_answers(wf, x)
    run_in_threads(lambda index: asyncio.run(serve_all(wf, x, right, tasks=12, pauses=3)))
    assert wf.open_blocks == 0


@torch.no_grad()
def test_interleaved_generators_keep_their_blocks(wf, x):
    right = right_answers(wf, x)

    def answers(forget):
        with wf.forgetting(forget):
            for _ in range(3):
                yield wf(x), wf.base(x)

    for one, two in zip(answers(1), answers(2)):
        for answer in one:
            close(answer, right[1])
        for answer in two:
            close(answer, right[2])
        assert torch.equal(wf(x), right[None])
        assert torch.equal(wf.base(x), right[None])


@torch.no_grad()
def test_a_generator_that_is_half_of_a_with_statement_lends_its_block(wf, x):
    @contextmanager
    def serving(forget):
        with wf.forgetting(forget):
            yield

    with serving(1), ExitStack() as stack:
        close(wf(x), wf(x, forget=1))
        stack.enter_context(wf.forgetting(2))
        close(wf(x), wf(x, forget=2))
    assert torch.equal(wf(x), wf.base(x))


@torch.no_grad()
def test_tasks_and_threads_started_inside_inherit_the_block_while_it_is_open(wf, x):
    one = wf(x, forget=1)

    async def look():
        close(wf(x), one)
        close(await asyncio.to_thread(wf, x), one)

    async def outlive(started):
        await started.wait()
        with pytest.raises(RuntimeError, match=r"has ended since.*Pass forget= to the call"):
            wf(x)
        close(wf(x, forget=1), one)
        with wf.forgetting(None):
            assert torch.equal(wf(x), wf.base(x))

    async def main():
        started = asyncio.Event()
        with wf.forgetting(1):
            await asyncio.gather(look(), look())
            task = asyncio.create_task(outlive(started))
            await asyncio.sleep(0)
        started.set()
        await task

    asyncio.run(main())


@torch.no_grad()
def test_a_thread_started_by_a_generator_in_its_block_is_refused(wf, x):
    async def stream():
        with wf.forgetting(1):
            yield await asyncio.to_thread(wf, x)

    async def main():
        with pytest.raises(RuntimeError, match=r"belongs to a generator.*Pass forget="):
            async for _ in stream():
                pass

    asyncio.run(main())


def test_a_block_that_is_never_entered_warns(wf):
    with pytest.warns(RuntimeWarning, match="was not entered and did nothing"):
        wf.forgetting(3)


@torch.no_grad()
def test_a_block_serves_as_decorator(wf, x):
    @wf.forgetting(1)
    def answer():
        return wf(x)

    close(answer(), wf(x, forget=1))
    close(answer(), wf(x, forget=1))


@torch.no_grad()
def test_a_decorated_coroutine_or_generator_forgets_whenever_it_runs(wf, x):
    @wf.forgetting(1)
    async def later():
        await asyncio.sleep(0)
        return wf(x)

    @wf.forgetting(1)
    def piecewise():
        sent = yield wf(x)
        yield wf(sent)

    async def beside():
        task = asyncio.create_task(later())
        await asyncio.sleep(0)
        return wf(x), await task

    plain, forgotten = asyncio.run(beside())
    close(forgotten, wf(x, forget=1))
    assert torch.equal(plain, wf(x))
    pieces = piecewise()
    close(next(pieces), wf(x, forget=1))
    assert torch.equal(wf(x), plain)
    close(pieces.send(2 * x), wf(2 * x, forget=1))


def test_a_decorated_asynchronous_generator_is_refused(wf, x):
    async def stream():
        yield wf(x)

    with pytest.raises(TypeError, match="asynchronous generator"):
        wf.forgetting(1)(stream)


# ---- what model code sees -----------------------------------------------------------------------


class Curious(torch.nn.Module):
    """Reads its parameters in every way but the plain one, and asks for types."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.list = torch.nn.Linear(4, 4)
        self.dict = torch.nn.Linear(4, 4)
        self.stack = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self.stack.register_parameter("extra", torch.nn.Parameter(torch.ones(4)))
        self.head = torch.nn.Linear(4, 4)

    def forward(self, x):
        assert type(self.conv) is torch.nn.Conv2d
        x = self.conv(x).mean((2, 3))
        weight, bias = self.list.parameters()
        x = torch.nn.functional.linear(x, weight, bias).tanh()
        named = dict(self.dict.named_parameters())
        x = torch.nn.functional.linear(x, named["weight"], self.dict._parameters["bias"])
        for child in self.stack.children():
            x = child(x)
        return self.head(x * self.stack.extra)


@torch.no_grad()
def test_model_code_that_reads_parameters_and_types_is_right_in_a_block(x):
    wf = apply(randomise(Curious()), x, targets="*")
    before = wf.base.state_dict()
    expected = wf.bake(1)(x)
    with wf.forgetting(1):
        for answer in (wf(x), wf.base(x), wf.base.forward(x)):
            close(answer, expected)
        assert list(wf.base.state_dict()) == list(before)
        assert_same_state(wf.base, before)


@torch.no_grad()
def test_parts_and_other_methods_of_the_base_model_forget_too(x):
    class Parts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)
            self.scale = torch.nn.Parameter(torch.rand(4))
            self.head = torch.nn.Linear(4, 4)

        def forward_features(self, x):
            return self.conv(x).mean((2, 3)) * self.scale

        def forward(self, x):
            return self.head(self.forward_features(x))

    wf = apply(randomise(Parts()), x, targets="*")
    baked = wf.bake(1)
    with wf.forgetting(1):
        close(wf.base.forward_features(x), baked.forward_features(x))
        close(wf.base.conv(x), baked.conv(x))
        close(wf.base(x=x), baked(x))


@torch.no_grad()
def test_gates_in_a_block_are_never_stale(wf, x):
    with wf.forgetting(1):
        wf(x)
        wf.alphas.data.mul_(-0.5)
        close(wf(x), wf(x, forget=1))
        wf.base.stem.weight.data.mul_(2)
        close(wf(x), wf(x, forget=1))
        wf.hard = True
        close(wf(x), wf(x, forget=1))
        wf.hard = False
        other = {"alphas": torch.zeros_like(wf.alphas)}
        found = torch.func.functional_call(wf, other, (x,))
    wf.alphas.data.zero_()
    close(found, wf(x, forget=1))
    with torch.nn.utils.parametrize.cached():
        for row in (1, 2):
            with wf.forgetting(row):
                close(wf(x), wf(x, forget=row))


@torch.no_grad()
def test_two_models_that_share_a_backbone_do_not_share_blocks(x):
    backbone = randomise(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten()))
    heads = [randomise(torch.nn.Linear(144, 4), seed) for seed in (1, 2)]
    one, two = (apply(torch.nn.Sequential(backbone, head), x) for head in heads)
    plain, forgot = two(x), one(x, forget=1)
    with one.forgetting(1):
        assert torch.equal(two(x), plain)
        close(one(x), forgot)
        with two.forgetting(2):
            close(two(x), two(x, forget=2))
            close(one(x), forgot)
    assert torch.equal(two(x), plain)


class Chosen(nn.Module):
    """Keeps one of its methods as ``forward``, and has none of that name, as FasterNet does."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.forward = self.convolve

    def convolve(self, x):
        return self.conv(x)


def test_a_method_that_the_model_keeps_as_its_forward_stays_its_forward(x):
    model = randomise(nn.Sequential(Chosen(), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    wf = apply(model, x)
    with wf.forgetting(2):
        inside = wf(x)
    copied = copy.deepcopy(wf)
    close(inside, reference.logits(wf, x, torch.full((len(x),), 2)))
    close(wf.bake(2)(x), inside)
    close(copied(x, forget=2), inside)
