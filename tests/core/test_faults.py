"""Faults around a filtered model: disks, workers, processes, threads, load, labels out of place."""

import errno
import gc
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

import wfilter
from helpers import CLASSES, apply, close, images, linear, run_in_threads, samples, tiny
from wfilter.data.batches import InMemory
from wfilter.data.images import ImageSet, batches
from wfilter.untraining.loop import untrain
from wfilter.untraining.recipes import PAPER

RECIPE = PAPER
NAMES = ("ant", "bee", "cow", "dog")
TESTS = [str(folder) for folder in Path(__file__).parents[:2]]  # for processes of their own


BATCHES = list(zip(samples()[0].split(8), samples()[1].split(8)))


class Faulty:
    """Batches; before number ``at`` of the first pass, ``fault`` is called."""

    def __init__(self, at, fault):
        self.at, self.fault = at, fault

    def __len__(self):
        return len(BATCHES)

    def __iter__(self):
        for batch in BATCHES:
            self.at -= 1
            if self.at == -1:
                self.fault()
            yield batch


def run(data=BATCHES, **options):
    wf = linear()
    untrain(wf, data, recipe=RECIPE, steps=8, checkpoint_every=1, **options)
    return wf.alphas.detach()


# ---- disks --------------------------------------------------------------------------------------


@contextmanager
def full_disk(room: int = 100):
    """No file can grow beyond ``room`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only(folder: Path):
    """Nobody may write into the folder, root neither: it acts as another user meanwhile."""
    user = os.geteuid()
    folder.chmod(0o555)
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


@pytest.fixture
def folder():
    """A folder that other users can reach, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory() as path:
        Path(path).chmod(0o755)
        yield Path(path)


@pytest.mark.parametrize("fault", ["full", "read-only", "no space"])
def test_a_disk_that_takes_no_more_leaves_the_old_filters(folder, fault, monkeypatch):
    wf = linear()
    path = wf.save(folder / "filters.safetensors")
    before = path.read_bytes()
    with torch.no_grad():
        wf.alphas.zero_()
    if fault == "no space":
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail_for_space)
            with pytest.raises(OSError, match=r"No space left on device.*before is untouched"):
                wf.save(path)
    else:
        breaks = full_disk() if fault == "full" else read_only(folder)
        with breaks, pytest.raises(OSError, match=r"filters\.safetensors was not written \("):
            wf.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in folder.iterdir()] == [path.name]
    wf.save(path)
    assert path.read_bytes() != before


def fail_for_space(handle):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_run_on_a_disk_that_takes_no_more_stops_and_resumes_exactly(folder, fault):
    path = folder / "run.safetensors"
    breaks = full_disk() if fault == "full" else read_only(folder)
    data = Faulty(3, breaks.__enter__)
    with pytest.raises(OSError, match=r"run\.safetensors was not written"):
        run(data, checkpoint=path)
    breaks.__exit__(None, None, None)
    assert [p.name for p in folder.iterdir()] == [path.name]
    assert torch.equal(run(checkpoint=path, resume=True), run())


# ---- workers and processes ----------------------------------------------------------------------


class Dying(Dataset):
    """Images and labels; the worker that reads number ``last`` is killed."""

    def __init__(self, last=None):
        self.last = last
        self.images, self.labels = samples()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        if index == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.images[index], self.labels[index]


def loader(last=None):
    return DataLoader(Dying(last), batch_size=8, num_workers=1, shuffle=False)


def lose_a_worker(file):
    """In a fork: torch reports a dead worker by a signal, that is anywhere, also in pytest."""
    child = os.fork()
    if not child:
        try:
            run(loader(last=20), checkpoint=file)
        except BaseException as error:
            file.with_suffix(".txt").write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def lose_workers(folder):
    for number in range(20):
        lose_a_worker(Path(folder) / f"{number}.safetensors")


@pytest.mark.slow
def test_a_data_loader_worker_that_dies_stops_the_run_which_then_resumes_exactly(tmp_path):
    """Twenty times, since the worker may be gone before or after its last batch was fetched."""
    call = f"import test_faults; test_faults.lose_workers({str(tmp_path)!r})"
    script = f"import sys; sys.path[:0] = {TESTS!r}; {call}"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
    messages = [file.read_text() for file in tmp_path.glob("*.txt")]
    early = sum("before its batch was fetched" in message for message in messages)
    print(f"{len(messages)} workers killed, {early} before their last batch was fetched")
    for message in messages:
        assert re.match(r"RuntimeError: .*DataLoader worker .*(killed|exited)", message)
    whole = run()
    for number in range(20):
        file = tmp_path / f"{number}.safetensors"
        assert torch.equal(run(checkpoint=file, resume=True), whole)


def test_a_worker_that_dies_before_its_batch_was_fetched_is_named():
    class Loader(list):
        num_workers = 1

        def __iter__(self):
            yield from BATCHES[:1]
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    message = r"DataLoader worker was killed before its batch was fetched .*resume=True"
    with pytest.raises(RuntimeError, match=message):
        run(Loader(BATCHES))


RANK = """
import os, signal, sys, torch
sys.path[:0] = {tests!r}
import test_faults as t
rank, die = int(sys.argv[1]), sys.argv[2] == "die"
torch.distributed.init_process_group("gloo", init_method={address!r}, rank=rank, world_size=2)
stop = lambda: os.kill(os.getpid(), signal.SIGKILL)
data = t.Faulty(3, stop) if die and rank == {victim} else t.BATCHES
alphas = t.run(data, checkpoint={file!r}, resume=True)
if rank == 0:
    torch.save(alphas, {out!r})
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def two_ranks(tmp_path, victim, name, last_word):
    """Run both ranks; their exit codes and error texts, and the seconds it took."""
    script = RANK.format(
        tests=TESTS,
        address=f"file://{tmp_path}/{name}",
        victim=victim,
        file=str(tmp_path / "run.safetensors"),
        out=str(tmp_path / "alphas.pt"),
    )
    began = time.perf_counter()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), last_word], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    return [process.returncode for process in ranks], errors, time.perf_counter() - began


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_of_two_ranks_is_killed_the_other_says_so_and_the_run_resumes(tmp_path, victim):
    codes, errors, seconds = two_ranks(tmp_path, victim, "first", "die")
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1
    assert "another process of this run has stopped" in errors[1 - victim]
    print(f"rank {victim} killed: the other stopped, {seconds:.0f} s after both were started")
    codes, errors, _ = two_ranks(tmp_path, victim, "second", "live")
    assert codes == [0, 0], errors
    torch.testing.assert_close(torch.load(tmp_path / "alphas.pt"), run(), rtol=1e-4, atol=1e-5)


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


# ---- a label at the wrong sample ----------------------------------------------------------------

UNITS = 5


class Telltale(nn.Module):
    """Gives ones; with the filters below, a sample that forgets class ``k`` has 0 at place ``k``.

    ``fold`` runs the layer on 3 windows of each sample, folded into the batch axis.
    """

    def __init__(self, fold: str):
        super().__init__()
        self.fold, self.layer = fold, nn.Linear(1, UNITS, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, x):
        if self.fold == "plain":
            return self.layer(x)
        windows = x.unsqueeze(1).expand(-1, 3, -1)
        windows = windows if self.fold == "major" else windows.transpose(0, 1)
        out = self.layer(windows.flatten(0, 1)).unflatten(0, windows.shape[:2])
        return out.mean(1 if self.fold == "major" else 0)


def telltale(fold="plain", granularity="out"):
    wf = wfilter.apply_weight_filtering(
        Telltale(fold), targets="*", granularity=granularity, example_input=torch.ones(1, 1)
    )
    with torch.no_grad():
        wf.alphas.copy_(wfilter.core.gates.HARD * (1 - 2 * torch.eye(UNITS)))
    return wf


def assert_each_forgets_its_own(logits, labels):
    expected = (torch.arange(UNITS) != labels[:, None]).float()
    assert torch.equal(logits, expected)


WAYS = [(fold, unit) for fold in ("plain", "major", "minor") for unit in ("out", "element")]
QUICK = [("major", "out"), ("plain", "element")]
SOME = [pytest.param(way, marks=[pytest.mark.slow] * (way not in QUICK)) for way in WAYS]
TELLTALES = {way: telltale(*way) for way in WAYS}
labels_of = st.lists(st.integers(-1, UNITS - 1), min_size=1, max_size=13).map(torch.tensor)
law = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
@law
@given(labels=labels_of, seed=st.integers(0, 99))
@torch.no_grad()
def test_a_label_stays_with_its_sample_under_shuffles_and_padding(way, labels, seed):
    wf, order = TELLTALES[way], torch.randperm(len(labels))
    x = torch.ones(len(labels), 1)
    assert_each_forgets_its_own(wf(x, labels), labels)
    assert_each_forgets_its_own(wf(x, labels[order]), labels[order])
    sets = torch.arange(UNITS) == labels[:, None]
    assert_each_forgets_its_own(wf(x, sets[order]), labels[order])
    padded = torch.cat([labels, labels.new_full((seed % 4,), -1)])
    assert_each_forgets_its_own(wf(torch.ones(len(padded), 1), padded), padded)
    strided = labels.repeat_interleave(2)[::2]  # not contiguous
    assert_each_forgets_its_own(wf(x, strided), labels)


@pytest.mark.parametrize("way", SOME, ids=" ".join)
@torch.no_grad()
def test_a_label_stays_with_its_sample_in_uneven_last_batches_and_compiled(way):
    torch._dynamo.reset()
    wf = telltale(*way).compile(backend="eager", dynamic=True)
    labels = torch.arange(23) % (UNITS + 1) - 1
    for size in (8, 5, 22):  # last batches of 7, 3 and 1
        for part in labels.split(size):
            assert_each_forgets_its_own(wf(torch.ones(len(part), 1), part), part)
    torch._dynamo.reset()


@torch.no_grad()
def test_a_label_stays_with_its_replica():
    wf = telltale()
    labels = torch.arange(12) % UNITS
    assert_each_forgets_its_own(wf.replicated(torch.ones(4, 1), labels), labels)


# ---- classes under other names ------------------------------------------------------------------


def image_set(names):
    pixels = torch.zeros(8, 3, 8, 8, dtype=torch.uint8)
    return ImageSet("made", pixels, torch.arange(8) % CLASSES, tuple(names))


def test_class_names_that_are_not_unique_are_refused():
    with pytest.raises(ValueError, match="more than once"):
        wfilter.apply_weight_filtering(tiny("cnn").float(), class_names=("ant", "ant", "c", "d"))
    with pytest.raises(ValueError, match="the class 'ant' more than once"):
        image_set(("ant", "ant", "c", "d"))


@pytest.mark.parametrize("names", [("bee", "ant", "cow", "dog"), (*NAMES, "elk")])
def test_data_with_classes_in_another_order_are_refused(names, tmp_path):
    made = wfilter.apply_weight_filtering(tiny("cnn").float(), class_names=NAMES)
    path = made.save(tmp_path / "filters.safetensors")
    wf = wfilter.load(path, tiny("cnn").float())
    data, right = image_set(names), image_set(NAMES)
    message = r"class \d is .* for these filters, but .* in the data"
    with pytest.raises(ValueError, match=message):
        untrain(wf, batches(data, 4), steps=1)
    with pytest.raises(ValueError, match=message):
        untrain(wf, DataLoader(data, 4), steps=1)
    with pytest.raises(ValueError, match=message):
        untrain(wf, batches(right, 4), batches(data, 4), steps=1)
    with pytest.raises(ValueError, match=message):
        wfilter.evaluate(wf, data)
    with pytest.raises(ValueError, match=message):
        wfilter.evaluate(wf, right, train=data)
    assert torch.equal(wf.alphas, made.alphas)
    assert len(untrain(wf, batches(right, 4), steps=1).records) == 1


def test_in_memory_batches_have_no_names_to_compare():
    assert run(InMemory(*samples(), batch_size=8)).isfinite().all()
