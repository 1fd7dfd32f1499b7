"""Threads that share a filtered model, and batches without end."""

import gc
import os
import random
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import wfilter
from helpers import CLASSES, apply, close, images, run_in_threads

# ---- threads ------------------------------------------------------------------------------------


def forgets():
    labels = torch.tensor([3, -1, 0, 1])
    return [None, 2, *(labels.roll(i) for i in range(4)), {1, 3}, torch.eye(4).bool()]


@pytest.mark.parametrize("granularity", ["out", "element"])
def test_eight_threads_share_a_compiled_model(granularity, tiny_cnn, x):
    torch._dynamo.reset()
    wf = apply(tiny_cnn, x, granularity=granularity)
    with torch.no_grad():
        expected = [wf(x, forget=forget) for forget in forgets()]
    wf.compile(backend="eager")

    def work(index):
        with torch.no_grad():
            for _ in range(10):
                close(wf(x, forget=forgets()[index]), expected[index])

    run_in_threads(work)
    torch._dynamo.reset()


def test_a_compilation_in_another_thread_is_not_taken_for_our_own(tiny_cnn, x, monkeypatch):
    wf = apply(tiny_cnn, x)
    expected = wf(x, forget=1)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # one flag for all threads
    close(wf(x, forget=1), expected)
    with pytest.raises(ValueError, match="outside"):
        wf(x, forget=torch.tensor([0, 1, 2, 99]))


class Waiting(nn.Module):
    """Waits between its two layers until told to go on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def forward(self, x):
        x = self.first(x)
        self.reached.set()
        assert self.go_on.wait(30)
        return self.second(x)


@torch.no_grad()
@pytest.mark.parametrize("forget", [None, 0, torch.tensor([0, 1])])
@pytest.mark.parametrize("closes", [True, False])
def test_a_block_opened_during_another_threads_forward_does_not_change_it(forget, closes):
    model = Waiting()
    wf = wfilter.apply_weight_filtering(model, targets="*", example_input=torch.zeros(1, 3))
    expected = wf(torch.ones(2, 3), forget=forget)
    model.reached.clear()
    model.go_on.clear()
    answers = []

    def work():
        with torch.no_grad():
            answers.append(wf(torch.ones(2, 3), forget=forget))

    thread = threading.Thread(target=work)
    thread.start()
    assert model.reached.wait(30)
    with wf.forgetting(1):
        if not closes:
            model.go_on.set()
            thread.join()
    model.go_on.set()
    thread.join()
    assert torch.equal(answers[0], expected)


def test_threads_with_and_without_blocks_all_get_right_answers(tiny_cnn, x):
    wf = apply(tiny_cnn, x)
    with torch.no_grad():
        right = {forget: wf(x, forget=forget) for forget in (None, 1, 2, 3)}
    answers = []

    def work(index):
        chance = random.Random(index)
        for _ in range(30):
            forget = chance.choice([None, 1, 2, 3])
            with torch.no_grad():
                if index < 4:
                    answers.append((forget, wf(x, forget=forget)))
                else:
                    with wf.forgetting(forget):
                        answers.append((forget, (wf if index < 6 else wf.base)(x)))

    run_in_threads(work)
    for forget, answer in answers:
        close(answer, right[forget])
    assert len(answers) == 8 * 30
    with torch.no_grad():
        assert torch.equal(wf(x), right[None])  # nothing is left behind


# ---- soak ---------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of memory this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def mixed_batch(chance, number):
    """A random batch of 2 to 6 samples and any kind of forget for it."""
    size = chance.randint(2, 6)
    x = images(size, 3, 8, 8, seed=number)
    labels = torch.tensor([chance.randint(-1, CLASSES - 1) for _ in range(size)])
    sets = torch.tensor([[chance.random() < 0.4 for _ in range(CLASSES)] for _ in range(size)])
    return x, chance.choice([None, labels, labels, sets, 1, {0, 2}])


@pytest.mark.parametrize("number", [pytest.param(10_000, marks=pytest.mark.slow), 200])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@torch.no_grad()
def test_mixed_batches_without_end_grow_no_memory_recompile_nothing_and_do_not_drift(
    number, compiled, tiny_cnn
):
    torch._dynamo.reset()
    wf = apply(tiny_cnn, images(1, 3, 8, 8))
    state = {k: v.clone() for k, v in wf.state_dict().items()}
    if compiled:
        wf.compile(backend="eager", dynamic=True)
    chance = random.Random(0)
    for i in range(40):  # every kind of forget and every size is seen once
        wf(*mixed_batch(chance, i))
    first = [mixed_batch(random.Random(i), i) for i in range(8)]
    answers = [wf(*batch) for batch in first]
    held, memory = tensors(), resident()
    with torch._dynamo.config.patch(error_on_recompile=compiled):
        for i in range(number):
            x, forget = mixed_batch(chance, i)
            assert wf(x, forget).isfinite().all()
            if not isinstance(forget, torch.Tensor) and i % 10 == 0:
                with wf.forgetting(forget):
                    wf(x)
    assert tensors() <= held + 20
    assert resident() - memory < 64 * 2**20
    for batch, answer in zip(first, answers):
        assert torch.equal(wf(*batch), answer)
    assert all(torch.equal(v, state[k]) for k, v in wf.state_dict().items())
    torch._dynamo.reset()
