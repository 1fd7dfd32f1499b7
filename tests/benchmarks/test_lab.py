"""Our own data folder, unpacked into the formats that wfilter reads."""

import hashlib
import io
import json
import os
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

import lab
from wfilter import data
from wfilter.data import formats, zoo

REAL = os.environ.get("WFILTER_DATA")
needs_data = pytest.mark.skipif(not REAL, reason="WFILTER_DATA does not name the data folder")


@pytest.fixture
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("WFILTER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def colours():
    return np.random.default_rng(0).integers(0, 256, (100, 100, 3)).astype(np.uint8)


@pytest.fixture
def sheets(tmp_path, colours, monkeypatch, _own_cache):
    """A data folder whose six sheets have one colour per tile, taken for the official ones."""
    folder = tmp_path / "data" / "cifar10"
    folder.mkdir(parents=True)
    picture = io.BytesIO()
    Image.fromarray(colours.repeat(32, 0).repeat(32, 1)).save(
        picture, "webp", lossless=True, method=0, quality=0
    )
    labels = (np.arange(10000) % 10).astype(np.uint8)
    np.savez(folder / "labels.npz", test=labels, train=np.tile(labels, 5))
    planes = np.broadcast_to(colours.reshape(10000, 3, 1), (10000, 3, 1024)).reshape(10000, -1)
    md5 = hashlib.md5(np.concatenate([labels[:, None], planes], 1).tobytes()).hexdigest()
    for name in formats.CIFAR10_MD5:
        (folder / f"{name}.webp").write_bytes(picture.getvalue())
        monkeypatch.setitem(formats.CIFAR10_MD5, name, md5)
    return folder.parent


def test_sheets_are_cut_in_order_and_leave_the_data_folder_alone(sheets, colours):
    before = sorted(sheets.rglob("*"))
    assert [made.name for made in lab.unpack(sheets)] == ["cifar-10-batches-bin"]
    assert lab.unpack(sheets) == []  # once is enough
    found = data.load("cifar10", "test")
    assert np.array_equal(found.images[:, :, 5, 9].numpy(), colours.reshape(10000, 3))
    assert found.class_names[int(found.labels[3])] == "cat"
    assert len(data.load("cifar10")) == 50000
    assert sorted(sheets.rglob("*")) == before


@pytest.mark.parametrize("fault", ["md5", "content", "missing"])
def test_a_bad_sheet_is_named_and_nothing_is_left_half_done(sheets, fault, monkeypatch):
    file, words = sheets / "cifar10" / "data_batch_2.webp", "not the official data_batch_2"
    if fault == "md5":
        monkeypatch.setitem(formats.CIFAR10_MD5, "data_batch_2", "0")
    elif fault == "content":
        file.write_bytes(b"no image")
        words = "data_batch_2.webp is corrupt"
    else:
        file.unlink()
        words = "data_batch_2.webp is missing"
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        lab.unpack(sheets)
    assert not any((formats.cache_folder() / "cifar10").iterdir())


@pytest.fixture
def zips(tmp_path, _own_cache):
    folder = tmp_path / "data" / "imagenet"
    folder.mkdir(parents=True)
    index = {"0": ["n0", "tench"], "1": ["n1", "crane"], "2": ["n2", "crane"]}
    (folder / lab.INDEX).write_text(json.dumps(index))
    for position, name in enumerate(lab.PARTS.values()):
        with zipfile.ZipFile(folder / name, "w") as archive:
            for row in (2, 0, 1):
                picture = io.BytesIO()
                Image.new("RGB", (224, 224), (50 * position, 100 * row, 0)).save(picture, "PNG")
                archive.writestr(f"n{row}/x.png", picture.getvalue())
    return folder.parent


def test_zips_become_folders_of_parts_and_splits(zips):
    lab.unpack(zips)
    assert data.load("imagenet", "train").labels.bincount().tolist() == [3, 3, 3]
    test = data.load("imagenet", "test")
    assert test.labels.tolist() == [0, 1, 2]
    assert test.images[torch.arange(3)][:, 0, 0, 0].tolist() == [150] * 3
    joined = data.load("imagenet", "k1+train1")
    assert joined.images[torch.arange(6)][:, 0, 0, 0].tolist() == [100] * 3 + [0] * 3


def test_a_damaged_or_missing_zip_is_named(zips):
    (zips / "imagenet" / "imagenet_val_k1.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"imagenet_val_k1.zip is corrupt"):
        lab.unpack(zips)
    (zips / "imagenet" / "imagenet_val_k1.zip").unlink()
    with pytest.raises(FileNotFoundError, match=r"imagenet_val_k1.zip is missing"):
        lab.unpack(zips)


@needs_data
@pytest.mark.parametrize(
    ("name", "counts", "shape"),
    [
        ("mnist", (60000, 10000), (1, 28, 28)),
        ("cifar10", (50000, 10000), (3, 32, 32)),
        ("imagenet", (3000, 1000), (3, 224, 224)),
    ],
)
def test_the_real_sets_are_whole(name, counts, shape):
    for split, count in zip(("train", "test"), counts, strict=True):
        found = data.load(name, split)
        assert (len(found), found.image_shape) == (count, shape)
        assert found.labels.unique().numel() == found.num_classes == len({*found.class_names})


@needs_data
def test_the_real_weights_fit_their_models():
    for spec in ("wfilter:resnet18-cifar", "wfilter:vgg16-cifar", "timm:vit_tiny_patch16_224"):
        zoo.build(spec, weights=zoo.weights_path(spec))
