"""Damaged and hostile files: an error or the exact result, and nothing half-loaded.

The ordinary run takes a sample of each kind of damage, ``slow`` all of it.
"""

import itertools
import json
import pickle
import random
import resource
import struct
import time

import pytest
import torch
from safetensors import safe_open
from torch import nn

import wfilter
from helpers import shuffle_alphas
from kills import kill_in_a_new_process
from wfilter.data.batches import InMemory
from wfilter.files import checkpoint
from wfilter.untraining.loop import Run, untrain
from wfilter.untraining.recipes import DISTILL
from wfilter.untraining.state import Keeper

DAMAGE = (ValueError, FileNotFoundError)
STEPS = {"steps": 4, "checkpoint_every": 1}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


EXAMPLE = torch.zeros(1, 3)
STATE = {name: value.clone() for name, value in network().state_dict().items()}


@pytest.fixture
def wf():
    names = ("ant", "bee", "cow")
    made = wfilter.apply_weight_filtering(network(), targets="0.*", class_names=names)
    return shuffle_alphas(made)


@pytest.fixture
def saved(wf, tmp_path):
    return wf.save(tmp_path / "filters.safetensors")


def assert_names(error, path) -> None:
    assert str(error).startswith(str(path))


def outcome(path, wf) -> str:
    """``"refused"`` or ``"exact"``; anything else fails."""
    model = network()
    try:
        loaded = wfilter.load(path, model, example_input=EXAMPLE)
    except DAMAGE as error:
        assert_names(error, path)
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert all(torch.equal(v, STATE[k]) for k, v in model.state_dict().items())
        assert not wfilter.core.attach.is_marked(model)
        return "refused"
    assert torch.equal(loaded.alphas, wf.alphas)
    assert (loaded.class_names, loaded.hard) == (wf.class_names, wf.hard)
    assert loaded.targets == wf.targets
    return "exact"


def count_outcomes(path, wf, contents) -> dict[str, int]:
    counts = {"refused": 0, "exact": 0}
    for content in contents:
        path.write_bytes(content)
        counts[outcome(path, wf)] += 1
    return counts


def flipped(content: bytes, at: int, by: int) -> bytes:
    return content[:at] + bytes([content[at] ^ by]) + content[at + 1 :]


def sample(numbers: range, count: int) -> list[int]:
    return sorted(random.Random(0).sample(numbers, min(count, len(numbers))))


# ---- filters: every byte, every length ----------------------------------------------------------


def test_a_flipped_byte_is_an_error_or_changes_nothing(saved, wf):
    content = saved.read_bytes()
    places = sample(range(len(content)), 150)
    counts = count_outcomes(saved, wf, (flipped(content, at, 1) for at in places))
    assert counts["refused"] > 140  # a blank of the header may become another blank


def test_a_truncated_file_is_refused(saved, wf):
    content = saved.read_bytes()
    places = sample(range(len(content)), 60)
    assert count_outcomes(saved, wf, (content[:n] for n in places)) == {"refused": 60, "exact": 0}


@pytest.mark.slow
def test_every_byte_flipped_in_every_bit_is_an_error_or_changes_nothing(saved, wf, record_property):
    content = saved.read_bytes()
    flips = (flipped(content, at, 1 << bit) for at in range(len(content)) for bit in range(8))
    counts = count_outcomes(saved, wf, flips)
    record_property("counts", counts)
    print("bits flipped in filters:", counts)
    assert sum(counts.values()) == 8 * len(content)
    assert counts["exact"] < 0.01 * len(content)


@pytest.mark.slow
def test_every_truncation_is_refused(saved, wf):
    content = saved.read_bytes()
    counts = count_outcomes(saved, wf, (content[:n] for n in range(len(content))))
    print("truncations of filters:", counts)
    assert counts == {"refused": len(content), "exact": 0}


def test_bytes_after_the_end_are_refused(saved, wf):
    content = saved.read_bytes()
    assert count_outcomes(saved, wf, [content + b"\0", content * 2])["refused"] == 2


# ---- filters: changed on purpose, with a digest that fits ---------------------------------------


def rewrite(path, change) -> None:
    """Write the file again after ``change(facts, alphas)``, as a forger would: digest included."""
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["wfilter"])
        alphas = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del facts["digest"]
    change(facts, alphas)
    facts["digest"] = checkpoint.digest_of(facts, alphas)
    save_file(alphas, path, metadata={"wfilter": json.dumps(facts)})


def rename(old, new):
    def change(facts, alphas):
        alphas[new] = alphas.pop(old)
        facts["targets"] = sorted(alphas)

    return change


def each_alpha(function):
    return lambda facts, alphas: alphas.update({k: function(v) for k, v in alphas.items()})


def fact(key, value):
    return lambda facts, alphas: facts.update({key: value})


FORGERIES = {
    "renamed key": rename("0.bias", "1.bias"),
    "key of another parameter": rename("0.bias", "2.bias"),
    "path traversal in a name": rename("0.bias", "../../../../etc/passwd"),
    "absolute path in a name": rename("0.bias", "/etc/passwd"),
    "empty name": rename("0.bias", ""),
    "attribute as a name": rename("0.bias", "0.__class__.__init__"),
    "transposed alphas": each_alpha(lambda a: a.t().contiguous()),
    "flat alphas": each_alpha(lambda a: a.flatten()),
    "empty alphas": each_alpha(lambda a: a[:, :0].contiguous()),
    "one row more": each_alpha(lambda a: torch.cat([a, a[:1]])),
    "integers": each_alpha(lambda a: a.long()),
    "truth values": each_alpha(lambda a: a > 0),
    "complex numbers": each_alpha(lambda a: a.to(torch.complex64)),
    "NaN": each_alpha(lambda a: a * float("nan")),
    "infinity": each_alpha(lambda a: a / 0),
    "many classes": fact("num_classes", 10**12),
    "no classes": fact("num_classes", 0),
    "minus one class": fact("num_classes", -1),
    "classes as text": fact("num_classes", "3"),
    "classes as truth": fact("num_classes", True),
    "classes as a list": fact("num_classes", [3]),
    "names not unique": fact("class_names", ["ant", "ant", "cow"]),
    "too few names": fact("class_names", ["ant"]),
    "names that are numbers": fact("class_names", [1, 2, 3]),
    "names as text": fact("class_names", "abc"),
    "unknown granularity": fact("granularity", "row"),
    "granularity as a number": fact("granularity", 1),
    "hard as text": fact("hard", "no"),
    "targets as a number": fact("targets", 7),
    "targets as lists": fact("targets", [[], []]),
    "base as a number": fact("base", 1),
    "base of another model": fact("base", "0" * 64),
    "format as text": fact("format", "1"),
    "format of the future": fact("format", 2),
    "no format": lambda facts, alphas: facts.pop("format"),
    "no base": lambda facts, alphas: facts.pop("base"),
    "no architecture": lambda facts, alphas: facts.pop("architecture"),
    "no alphas": lambda facts, alphas: (alphas.clear(), facts.update(targets=[])),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_file_with_a_fitting_digest_is_refused(saved, wf, name):
    rewrite(saved, FORGERIES[name])
    assert outcome(saved, wf) == "refused"


def test_the_same_alphas_in_a_wider_dtype_are_the_same(saved, wf):
    rewrite(saved, each_alpha(torch.Tensor.double))
    assert outcome(saved, wf) == "exact"


# ---- filters: no safetensors at all, or hostile ones --------------------------------------------


class Trap:
    """Unpickling it would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def header(entries: object, length: int | None = None) -> bytes:
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    return struct.pack("<Q", len(text) if length is None else length) + text


HUGE = {"0.weight": {"dtype": "F32", "shape": [2**31, 2**30], "data_offsets": [0, 2**63]}}
ODD = {
    "empty file": b"",
    "a text": b"wfilter" * 100,
    "header longer than the file": header({}, 2**20),
    "header of 2**63 bytes": header({}, 2**63),
    "tensor of 2**63 bytes": header(HUGE),
    "tensor whose size overflows": header(
        {"a": {"dtype": "F32", "shape": [2**32, 2**32, 2**32], "data_offsets": [0, 0]}}
    ),
    "negative offsets": header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}),
    "overlapping tensors": header(
        {n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}
    )
    + bytes(4),
    "deep JSON header": header(b"[" * 200_000),
    "deep JSON facts": header({"__metadata__": {"wfilter": "[" * 200_000}}),
    "long number in the facts": header({"__metadata__": {"wfilter": "9" * 200_000}}),
    "facts that are a list": header({"__metadata__": {"wfilter": "[1]"}}),
    "facts that are null": header({"__metadata__": {"wfilter": "null"}}),
    "no facts": header({"__metadata__": {}}),
    "facts as an object": header({"__metadata__": {"wfilter": {}}}),
    "a zip": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_is_refused(tmp_path, wf, name):
    path = tmp_path / "odd.safetensors"
    path.write_bytes(ODD[name])
    assert outcome(path, wf) == "refused"


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_pickle_under_another_name_is_refused_and_not_run(tmp_path, wf, by_torch):
    path, mark = tmp_path / "filters.safetensors", tmp_path / "was_run"
    torch.save(Trap(mark), path) if by_torch else path.write_bytes(pickle.dumps(Trap(mark)))
    assert outcome(path, wf) == "refused"
    assert not mark.exists()


def test_a_file_that_declares_much_and_holds_holes_is_refused_in_little_memory(saved, wf):
    """A sparse file of 64 GB: size, header and facts agree, the alphas do not fit the model."""
    shape = [3, 64 * 2**30 // 12]
    facts = {**checkpoint._header(wf), "targets": ["0.weight"], "digest": ""}
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 12 * shape[1]]}
    content = header({"__metadata__": {"wfilter": json.dumps(facts)}, "0.weight": entry})
    with saved.open("wb") as file:
        file.write(content)
        file.truncate(len(content) + 12 * shape[1])
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    assert outcome(saved, wf) == "refused"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
    assert time.perf_counter() - began < 30


# ---- checkpoints of a running untraining --------------------------------------------------------


def untrained(path=None, **options):
    made = wfilter.apply_weight_filtering(network(), targets="0.*")
    data = InMemory(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    untrain(made, data, recipe=DISTILL, checkpoint=path, **{**STEPS, **options})
    return made.alphas.detach()


@pytest.fixture
def running(tmp_path):
    path = tmp_path / "run.safetensors"
    untrained(path, steps=2)
    return path


@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.slow), 0.01])
def test_a_flipped_byte_of_a_run_is_an_error_or_changes_nothing(running, share):
    whole, content = untrained(steps=2), running.read_bytes()
    counts = {"refused": 0, "exact": 0}
    for at in sample(range(len(content)), int(share * len(content))):
        running.write_bytes(flipped(content, at, 1))
        counts[resumed(running, whole)] += 1
    print("bytes flipped in a run's checkpoint:", counts)
    assert counts["exact"] < 0.01 * len(content)


def resumed(path, whole) -> str:
    """Resume a run of two steps that is at its end: nothing is left but to restore."""
    made = wfilter.apply_weight_filtering(network(), targets="0.*")
    data = InMemory(torch.zeros(8, 3))
    run = Run(made, data, None, DISTILL, 0)
    run.plan(None, 2, None, False, False)
    before = made.alphas.detach().clone()
    try:
        Keeper(path, 1).restore(run)
    except ValueError as error:
        assert_names(error, path)
        assert torch.equal(made.alphas, before)
        assert run.step == 0
        return "refused"
    run.history.stopped = "2 steps"
    run.finish()
    assert run.step == 2
    assert torch.equal(made.alphas, whole)
    return "exact"


def test_an_untouched_checkpoint_resumes_exactly(running):
    assert resumed(running, untrained(steps=2)) == "exact"


def test_truncated_checkpoints_of_a_run_are_refused(running):
    content = running.read_bytes()
    for keep in sample(range(len(content)), 20):
        running.write_bytes(content[:keep])
        assert resumed(running, None) == "refused"


def test_a_run_on_another_base_model_is_refused(running):
    other = network()
    with torch.no_grad():
        other[2].bias.add_(1)
    made = wfilter.apply_weight_filtering(other, targets="0.*")
    data = InMemory(torch.zeros(8, 3))
    with pytest.raises(ValueError, match="belongs to another model: base model, targets or class"):
        untrain(made, data, recipe=DISTILL, checkpoint=running, steps=2, resume=True)


def test_a_run_with_classes_in_another_order_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    for names in (["ant", "bee", "cow"], ["bee", "ant", "cow"]):
        made = wfilter.apply_weight_filtering(network(), targets="0.*", class_names=names)
        data = InMemory(torch.ones(8, 3))
        if names[0] == "ant":
            untrain(made, data, recipe=DISTILL, checkpoint=path, steps=1, checkpoint_every=1)
            continue
        with pytest.raises(ValueError, match=r"belongs to another model.*class names differ"):
            untrain(made, data, recipe=DISTILL, checkpoint=path, steps=1, resume=True)


# ---- kill -9 while writing ----------------------------------------------------------------------


def save_for_ever(folder):
    """Save filters over and over, all alphas equal to the number of the save."""
    made = wfilter.apply_weight_filtering(network(), targets="0.*")
    path = folder / "filters.safetensors"
    if path.exists():
        alphas = wfilter.load(path, network(), example_input=EXAMPLE).alphas
        assert len(alphas.unique()) == 1  # the alphas of one save, whole
        with (folder / "saves").open("a") as saves:
            print(int(alphas[0, 0]), file=saves)
    (folder / "ready").touch()
    for number in itertools.count(1):
        with torch.no_grad():
            made.alphas.fill_(float(number))
        made.save(path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kill_minus_nine_while_saving_leaves_the_old_or_the_new_file(tmp_path):
    kill_in_a_new_process("test_files", "save_for_ever", tmp_path, 21)
    saves = [int(number) for number in (tmp_path / "saves").read_text().split()]
    print(f"20 kills while saving, each followed by a load; {sum(saves)} files written")
    assert len(saves) == 20
