"""What a baked model still holds: nothing of weights under closed gates, nothing of other rows."""

import pickle
import struct
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import wfilter
from helpers import CLASSES, images, random_rows
from wfilter.cli import baking
from wfilter.core.gates import HARD

FORGET = 2


def network():
    """Weights that are all different, so that each can be searched for."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, CLASSES)
    )
    return model.eval()


@pytest.fixture
def wf():
    """Exact gates: each row closes half of the units, each another half."""
    made = wfilter.apply_weight_filtering(
        network(), targets=["0.*", "4.*"], example_input=images(1, 1, 8, 8, dtype=torch.float32)
    )
    generator = torch.Generator().manual_seed(1)
    closed = torch.rand(made.alphas.shape, generator=generator) < 0.5
    with torch.no_grad():
        made.alphas.copy_(torch.where(closed, -HARD, HARD))
    return made


def split(wf, forget=FORGET):
    """Weights of the base model that a bake leaves out and those that it keeps, as numbers.

    The first are under closed gates; with feature rows also what the head knew of the class.
    """
    gone, kept = [], []
    base = dict(wf.base.named_parameters())
    for target in wf.targets:
        gate = target.spread(wf.gates(forget)[target.name].detach()).expand(target.shape).clone()
        if wf.feature_rows is not None and target.name.startswith("4."):
            gate[forget] = 0
        gone += base[target.name].detach()[gate == 0].tolist()
        kept += base[target.name].detach()[gate == 1].tolist()
    return gone, kept


def found(numbers, content: bytes) -> int:
    """How many numbers occur in a file, as float32, float64, their negatives, or as text."""
    return sum(any(form in content for form in forms(number)) for number in numbers)


def forms(number: float):
    for value in (number, -number):
        yield struct.pack("<f", value)
        yield struct.pack("<d", value)
        yield repr(value)[:8].encode()


EXAMPLE = images(1, 1, 8, 8, dtype=torch.float32)
BAKES = tuple(f"wfilter bake {suffix}" for suffix in baking.FORMATS)  # a new format is tested too
WHOLE = ("pickle", "torch.save", "safetensors", *BAKES, "machine code")
PRUNED = tuple(f"{name}, pruned" for name in WHOLE)
ROWS = tuple(f"{name}, rows" for name in WHOLE + PRUNED)  # feature rows folded into the head
GRAPHS = (".pt2", ".onnx", "machine code")  # they note which code they were traced from
NO_GRAPHS = [name for name in WHOLE + PRUNED + ROWS if not any(word in name for word in GRAPHS)]


def slow(name: str):
    """Compiling takes half a minute."""
    return pytest.param(name, marks=pytest.mark.slow) if "machine code" in name else name


@pytest.fixture(params=map(slow, WHOLE + PRUNED + ROWS))
def written(request) -> str:
    """One way in which a baked model gets into a file."""
    return request.param


@pytest.fixture
def content(written, wf, tmp_path) -> bytes:
    """The bytes of all files that it writes."""
    name, *extras = written.split(", ")
    pruned, folder = "pruned" in extras, tmp_path / "written"
    folder.mkdir()
    if "rows" in extras:
        wf.feature_rows = random_rows(CLASSES, 288, head="4.weight").float()
    if name.startswith("wfilter bake"):
        path = folder / f"baked{name.split()[2]}"
        baking.bake(wf, {FORGET}, path, pruned=pruned, example_input=EXAMPLE)
    else:
        write(wf.bake(FORGET, prune=pruned, example_input=EXAMPLE), name, folder / "baked.pt2")
    return b"".join(map(unpacked, folder.iterdir()))


def write(model, name, path):
    if name == "machine code":
        wfilter.export(model, path, example_input=EXAMPLE, aoti=True)
    elif name == "safetensors":
        save_file(model.state_dict(), path)
    elif name == "pickle":
        path.write_bytes(pickle.dumps(model))
    else:
        torch.save(model, path)


def unpacked(path) -> bytes:
    """What a file holds: an archive's parts, which might be compressed, else its bytes."""
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return path.read_bytes() + b"".join(map(archive.read, archive.namelist()))


def test_weights_under_closed_gates_are_in_no_byte_of_the_file(wf, written, content):
    gone, kept = split(wf)
    assert len(gone) > 100
    there = found(kept, content)  # the search does find what is there
    # Pruning drops open weights too; ONNX and machine code fold BatchNorm and rows into others.
    changed = any(word in written for word in ("pruned", "onnx", "machine code"))
    assert there > 100 if changed else there == len(kept)
    assert found(gone, content) == 0


def test_the_file_holds_no_alphas_and_no_names(content):
    assert struct.pack("<f", HARD) not in content
    assert struct.pack("<f", -HARD) not in content
    for word in (b"alphas", b"parametriz", b"_weight_filtering", b"feature_rows", b"sureness"):
        assert word not in content


@pytest.mark.parametrize("written", [slow(name) for name in ROWS], indirect=True)
def test_the_file_holds_no_statistics_of_any_class(wf, content):
    rows = wf.feature_rows
    told = [rows.means, rows.factors, rows.rests, rows.phases, rows.mixing, rows.sureness]
    numbers = torch.cat([part.flatten()[:50] for part in told]).tolist()
    assert len(numbers) > 200
    assert found(numbers, content) == 0


@pytest.mark.parametrize("written", NO_GRAPHS, indirect=True)
def test_the_file_has_no_word_of_wfilter(content):
    assert b"wfilter" not in content


def test_the_file_is_the_same_whatever_the_other_rows_were(wf, tmp_path):
    files = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        others = [row for row in range(CLASSES) if row != FORGET]
        with torch.no_grad():
            wf.alphas[others] = torch.randn(len(others), wf.alphas.shape[1])
        baking.bake(wf, {FORGET}, tmp_path / f"{seed}.safetensors")
        files.append((tmp_path / f"{seed}.safetensors").read_bytes())
    assert files[0] == files[1]


def test_the_file_is_the_same_whatever_the_weights_under_closed_gates_were(wf, tmp_path):
    baking.bake(wf, {FORGET}, tmp_path / "a.safetensors")
    with torch.no_grad():
        for target in wf.targets:
            weight = dict(wf.base.named_parameters())[target.name]
            gate = target.spread(wf.gates(FORGET)[target.name].detach()).expand(target.shape)
            weight[gate == 0] = torch.randn(int((gate == 0).sum()))
    baking.bake(wf, {FORGET}, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_a_bake_with_zeros_names_pruning_and_a_pruned_one_does_not(wf, tmp_path):
    path = tmp_path / "baked.safetensors"
    assert "before you hand it out, see --prune" in str(baking.bake(wf, {FORGET}, path))
    small = baking.bake(wf, {FORGET}, path, pruned=True, example_input=EXAMPLE)
    assert "see --prune" not in str(small)


@pytest.mark.parametrize("forget", [FORGET, {0, FORGET}, {0, 1, 2, 3}])
def test_closed_is_exactly_zero_and_open_bit_for_bit_the_base_model(wf, forget):
    baked, base = wf.bake(forget).state_dict(), wf.base.state_dict()
    for target in wf.targets:
        gate = target.spread(wf.gates(forget)[target.name].detach()).expand(target.shape)
        assert ((gate == 0) | (gate == 1)).all()
        assert (baked[target.name][gate == 0] == 0).all()
        assert torch.equal(baked[target.name][gate == 1], base[target.name][gate == 1])


def test_zeros_carry_no_sign_of_what_they_were(wf, tmp_path):
    baking.bake(wf, {FORGET}, tmp_path / "a.safetensors")
    for name, tensor in load_file(tmp_path / "a.safetensors").items():
        assert not torch.signbit(tensor[tensor == 0]).any(), name


def test_gates_that_are_not_exact_leave_a_trace_and_snapping_removes_it(wf):
    with torch.no_grad():
        wf.alphas.copy_(wf.alphas.sign() * 6)
    base = wf.base[0].weight
    soft, snapped = wf.bake(FORGET), wf.bake(FORGET, snap=0.01)
    closed = wf.gates(FORGET)["0.weight"] < 0.5
    assert (soft[0].weight[closed] != 0).all()  # who has the gates can divide them back
    assert (snapped[0].weight[closed] == 0).all()
    assert torch.equal(snapped[0].weight[~closed], base[~closed])


def test_the_filters_file_and_its_card_hold_no_base_weights(wf, tmp_path):
    wf.save(tmp_path / "filters")
    files = sorted(path for path in (tmp_path / "filters").iterdir())
    assert [path.name for path in files] == ["README.md", "filters.safetensors"]
    gone, kept = split(wf)
    assert found(gone + kept, b"".join(path.read_bytes() for path in files)) == 0
