"""Faults around a filtered model: disks that fail, workers and processes that die."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from helpers import linear, samples
from wfilter.untraining.loop import untrain
from wfilter.untraining.recipes import PAPER

RECIPE = PAPER
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
