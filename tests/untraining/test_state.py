"""A run that was interrupted or killed goes on from its checkpoint to the same alphas."""

import dataclasses
import json
import time

import pytest
import torch
from safetensors import safe_open
from torch import nn

import wfilter
from helpers import QUICK, linear, samples, untrained
from kills import kill_in_a_new_process
from wfilter import data
from wfilter.data.batches import InMemory
from wfilter.untraining.loop import Run, untrain
from wfilter.untraining.recipes import DISTILL_SOFT, PAPER
from wfilter.untraining.state import Keeper


@pytest.mark.parametrize("recipe", [QUICK, PAPER], ids=lambda r: r.name)
@pytest.mark.parametrize("loader", [False, True])
def test_an_interrupted_run_resumes_to_the_same_alphas(tmp_path, recipe, loader):
    batches = list(zip(samples()[0].split(8), samples()[1].split(8)))

    class Stopping:
        """Batches that end in Ctrl-C the first time through."""

        def __init__(self, after):
            self.after = after

        def __len__(self):
            return len(batches)

        def __iter__(self):
            for batch in batches:
                self.after -= 1
                if self.after < 0:
                    raise KeyboardInterrupt
                yield batch

    whole, _ = untrained(linear(width=7), recipe=recipe, data=batches, steps=10)
    part = linear(width=7)
    file = tmp_path / "run.safetensors"
    history = untrain(part, Stopping(6), recipe=recipe, steps=10, checkpoint=file)
    assert history.stopped == "interrupted at step 6"
    resumed = linear(width=7)
    history = untrain(resumed, batches, recipe=recipe, steps=10, checkpoint=file, resume=True)
    assert torch.equal(resumed.alphas, whole.alphas)
    assert [r.step for r in history.records] == list(range(1, 11))


def test_the_librarys_own_batches_resume_to_the_same_alphas(tmp_path):
    pixels = (samples()[0].view(-1, 1, 2, 3) * 50 + 128).byte()
    facts = data.ImageSet("points", pixels, samples()[1], tuple("abcd"))
    batches = lambda: data.batches(facts, 8, shuffle=True, seed=0)  # noqa: E731
    flat = lambda: wfilter.apply_weight_filtering(  # noqa: E731
        nn.Sequential(nn.Flatten(), wfilter.remove_weight_filtering(linear())),
        targets="1.0.*",
        example_input=torch.zeros(1, 1, 2, 3),
    )
    whole, file = flat(), tmp_path / "run.safetensors"
    untrain(whole, batches(), recipe=QUICK, steps=10)
    part = flat()
    stop = Run._step

    def stopping(self, batch):
        if self.step == 6:
            raise KeyboardInterrupt
        return stop(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_step", stopping)
        untrain(part, batches(), recipe=QUICK, steps=10, checkpoint=file)
    resumed = flat()
    untrain(resumed, batches(), recipe=QUICK, steps=10, checkpoint=file, resume=True)
    assert torch.equal(resumed.alphas, whole.alphas)


def test_a_checkpoint_of_another_length_is_refused(tmp_path):
    file = tmp_path / "run.safetensors"
    untrained(checkpoint=file, checkpoint_every=2, steps=4)
    with pytest.raises(ValueError, match="belongs to a run of 4 steps"):
        untrained(checkpoint=file, resume=True, steps=8)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    file = tmp_path / "run.safetensors"
    untrained(checkpoint=file, checkpoint_every=2)
    with pytest.raises(ValueError, match="belongs to another run: recipe or seed differ"):
        untrained(checkpoint=file, resume=True, seed=1)
    file.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="is not a checkpoint of untrain"):
        untrained(checkpoint=file, resume=True)


class Slow(InMemory):
    """Takes its time between batches, so that a kill can fall anywhere."""

    def order(self, seed, epoch):
        for index in super().order(seed, epoch):
            time.sleep(0.02)
            yield index


LONG = 600


def resume_slowly(folder):
    """A run that goes on where its checkpoint is, in a process that is going to be killed.

    When it starts it notes from which step; ready to be killed it is once a step is stored.
    """
    file, store = folder / "run.safetensors", Keeper.store
    if file.exists():
        with safe_open(file, framework="pt") as opened, (folder / "steps").open("a") as steps:
            print(json.loads(opened.metadata()["untrain"])["step"], file=steps)

    def store_and_say(keeper, run):
        store(keeper, run)
        (folder / "ready").touch()

    Keeper.store = store_and_say
    untrained(
        data=Slow(*samples(), 8), steps=LONG, checkpoint=file, checkpoint_every=1, resume=True
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kill_minus_nine_at_twenty_random_moments_then_resume_gives_the_same_alphas(tmp_path):
    kill_in_a_new_process("test_state", "resume_slowly", tmp_path)
    steps = (tmp_path / "steps").read_text().split()
    print("a run killed 20 times, resumed from steps", *steps)
    assert len(set(steps)) == len(steps) >= 19  # every life came further than the one before
    resumed, _ = untrained(steps=LONG, checkpoint=tmp_path / "run.safetensors", resume=True)
    assert torch.equal(resumed.alphas, untrained(steps=LONG)[0].alphas)


@pytest.mark.parametrize("at", range(3, 9))
def test_ctrl_c_inside_a_step_loses_no_batch(tmp_path, at, monkeypatch):
    """At every kind of place in a step: before, in and after the change of the alphas."""
    file = tmp_path / "run.safetensors"
    places = [(Run, "_rows"), (Run, "_logits"), (torch.optim.Adam, "step"), (Run, "_record")]
    for owner, name in places:
        file.unlink(missing_ok=True)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupting(getattr(owner, name), at, name == "step"))
            _, history = untrained(recipe=SOFT, steps=12, checkpoint=file, checkpoint_every=1)
            assert history.stopped == f"interrupted at step {at - 1}"
        resumed, _ = untrained(recipe=SOFT, steps=12, checkpoint=file, resume=True)
        assert torch.equal(resumed.alphas, untrained(recipe=SOFT, steps=12)[0].alphas)


SOFT = dataclasses.replace(DISTILL_SOFT, depth=1.0)


def interrupting(function, at, after):
    """The function; its call number ``at`` ends in Ctrl-C, before or after it was done."""
    calls = []

    def wrapped(*args, **options):
        calls.append(1)
        if len(calls) == at and not after:
            raise KeyboardInterrupt
        result = function(*args, **options)
        if len(calls) == at:
            raise KeyboardInterrupt
        return result

    return wrapped


@pytest.mark.parametrize("recipe", [QUICK, PAPER], ids=lambda r: r.name)
def test_resuming_a_finished_run_changes_nothing(recipe, tmp_path):
    options = {"recipe": recipe, "steps": 6, "checkpoint": tmp_path / "a", "checkpoint_every": 3}
    first, _ = untrained(**options)
    again, history = untrained(**options, resume=True)
    assert torch.equal(first.alphas, again.alphas)
    assert len(history.records) == 6
    assert history.stopped == "6 steps"
