import gzip
import hashlib
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from wfilter import data
from wfilter.data import formats as readers

REAL = os.environ.get("WFILTER_DATA")
needs_data = pytest.mark.skipif(not REAL, reason="WFILTER_DATA does not name the data folder")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("WFILTER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_mnist(root, count=7, packed=True):
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = np.arange(count * 28 * 28).reshape(count, 28, 28).astype(np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    for prefix in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">{1 + array.ndim}i", 0x800 + array.ndim, *array.shape)
            path = raw / f"{prefix}-{kind}-ubyte"
            if packed:
                path.with_name(path.name + ".gz").write_bytes(
                    gzip.compress(header + array.tobytes())
                )
            else:
                path.write_bytes(header + array.tobytes())
    return raw, images, labels


def png(colour, size=(224, 224)):
    content = io.BytesIO()
    Image.new("RGB", size, colour).save(content, "PNG")
    return content.getvalue()


def write_imagenet(root):
    folder = root / "imagenet"
    folder.mkdir()
    index = {"0": ["n0", "tench"], "1": ["n1", "crane"], "2": ["n2", "crane"]}
    (folder / "imagenet_class_index.json").write_text(json.dumps(index))
    for position, name in enumerate(readers.IMAGENET_PARTS.values()):
        with zipfile.ZipFile(folder / name, "w") as archive:
            for row in (2, 0, 1):
                archive.writestr(f"n{row}/x.png", png((50 * position, 100 * row, 0)))
    return folder


def write_folder(root, classes=("ant", "bee"), count=5, size=(30, 20)):
    for row, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f"{number}.png").write_bytes(png((200 * row, number, 7), size))
    return root


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("under", ["", "mnist"])
def test_mnist_is_read_from_either_layout(tmp_path, packed, under):
    _, images, labels = write_mnist(tmp_path / under, packed=packed)
    found = data.load("mnist", "test", tmp_path)
    assert np.array_equal(found.images[:, 0].numpy(), images)
    assert np.array_equal(found.labels.numpy(), labels)
    assert found.class_names[3] == "3"


def test_the_environment_names_the_data_folder(tmp_path, monkeypatch):
    write_mnist(tmp_path)
    monkeypatch.setenv("WFILTER_DATA", str(tmp_path))
    assert len(data.load("mnist")) == 7


def test_a_truncated_mnist_file_is_named(tmp_path):
    raw, *_ = write_mnist(tmp_path)
    file = raw / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte.gz is corrupt .* again"):
        data.load("mnist", "test", tmp_path)


def test_a_swapped_mnist_file_is_named(tmp_path):
    raw, *_ = write_mnist(tmp_path, 20)
    (raw / "train-labels-idx1-ubyte.gz").replace(raw / "train-images-idx3-ubyte.gz")
    with pytest.raises(ValueError, match="its first number is 2049, not 2051"):
        data.load("mnist", "train", tmp_path)


def test_a_missing_mnist_file_is_named(tmp_path):
    raw, *_ = write_mnist(tmp_path)
    (raw / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"train-labels-idx1-ubyte.gz is missing"):
        data.load("mnist", "train", tmp_path)


@pytest.fixture(scope="module")
def sheet(tmp_path_factory):
    """A cifar10 folder whose test sheet has one colour per tile, and what is on it."""
    folder = tmp_path_factory.mktemp("data") / "cifar10"
    folder.mkdir()
    colours = np.random.default_rng(0).integers(0, 256, (100, 100, 3)).astype(np.uint8)
    Image.fromarray(colours.repeat(32, 0).repeat(32, 1)).save(
        folder / "test_batch.webp", lossless=True, method=0, quality=0
    )
    labels = (np.arange(10000) % 10).astype(np.uint8)
    np.savez(folder / "labels.npz", test=labels, train=labels)
    planes = np.broadcast_to(colours.reshape(10000, 3, 1), (10000, 3, 1024)).reshape(10000, -1)
    md5 = hashlib.md5(np.concatenate([labels[:, None], planes], 1).tobytes()).hexdigest()
    return folder, colours, md5


def test_cifar10_sheets_are_cut_in_order_and_leave_the_data_folder_alone(sheet, monkeypatch):
    folder, colours, md5 = sheet
    monkeypatch.setitem(readers.CIFAR10_MD5, "test_batch", md5)
    before = sorted(folder.parent.rglob("*"))
    found = data.load("cifar10", "test", folder.parent)
    assert found.image_shape == (3, 32, 32)
    assert np.array_equal(found.images[:, :, 5, 9].numpy(), colours.reshape(10000, 3))
    assert found.class_names[int(found.labels[3])] == "cat"
    assert sorted(folder.parent.rglob("*")) == before


def test_cifar10_is_decoded_once_and_then_read_from_the_cache(sheet, monkeypatch):
    folder, _, md5 = sheet
    monkeypatch.setitem(readers.CIFAR10_MD5, "test_batch", md5)
    first = data.load("cifar10", "test", folder.parent)
    with monkeypatch.context() as patch:
        patch.delattr(readers, "_cifar_sheet")
        assert torch.equal(data.load("cifar10", "test", folder.parent).images, first.images)
    (cached,) = readers.cache_folder().glob("cifar10-test-*.npy")
    cached.write_bytes(b"cut short")
    assert torch.equal(data.load("cifar10", "test", folder.parent).images, first.images)


def test_a_cache_that_cannot_be_written_is_done_without(sheet, monkeypatch, tmp_path):
    folder, _, md5 = sheet
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setitem(readers.CIFAR10_MD5, "test_batch", md5)
    assert len(data.load("cifar10", "test", folder.parent)) == 10000


def test_another_sheet_than_the_official_one_is_refused(sheet):
    with pytest.raises(ValueError, match="not the official test_batch: its md5 differs"):
        data.load("cifar10", "test", sheet[0].parent)


def test_a_sheet_that_is_no_image_or_missing_is_named(sheet, tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "labels.npz").write_bytes((sheet[0] / "labels.npz").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"test_batch.webp is missing"):
        data.load("cifar10", "test", tmp_path)
    (tmp_path / "cifar10" / "test_batch.webp").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"test_batch.webp is corrupt"):
        data.load("cifar10", "test", tmp_path)


def test_cifar10_as_torchvision_stores_it_is_read(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32)).astype(np.uint8)
    content = {"data": pixels.reshape(4, -1), "labels": [3, 1, 4, 1]}
    (folder / "test_batch").write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["x"] * 10}))
    with pytest.raises(ValueError, match="cifar-10-batches-py is incomplete or corrupt"):
        data.load("cifar10", "test", tmp_path)
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)
    found = data.load("cifar10", "test", tmp_path)
    assert np.array_equal(found.images.numpy(), pixels)
    assert found.labels.tolist() == [3, 1, 4, 1]


def test_imagenet_labels_come_from_the_class_index(tmp_path):
    write_imagenet(tmp_path)
    found = data.load("imagenet", "test", tmp_path)
    assert found.labels.tolist() == [2, 0, 1]
    assert found.class_names == ("tench", "crane_n1", "crane_n2")
    assert (found.mean, found.std) == ((0.5,), (0.5,))
    assert found.images[torch.tensor([0, 2])][:, 1, 0, 0].tolist() == [200, 100]


def test_imagenet_parts_can_be_joined(tmp_path):
    write_imagenet(tmp_path)
    found = data.load("imagenet", "k1+train1", tmp_path)
    assert found.images[torch.arange(6)][:, 0, 0, 0].tolist() == [100] * 3 + [0] * 3
    assert len(data.load("imagenet", "train", tmp_path)) == 9


def test_a_set_of_encoded_images_is_held_out_and_batched_like_any_other(tmp_path):
    write_imagenet(tmp_path)
    train, val = data.hold_out(data.load("imagenet", "train", tmp_path, size=16), 0.4)
    assert (len(train), len(val)) == (6, 3)
    (images, labels) = next(iter(data.batches(val, 3)))
    assert images.shape == (3, 3, 16, 16)
    assert labels.sort().values.tolist() == [0, 1, 2]


def test_damaged_imagenet_files_are_named(tmp_path):
    folder = write_imagenet(tmp_path)
    with zipfile.ZipFile(folder / "imagenet_val_k0.zip", "w") as archive:
        archive.writestr("n9/x.png", b"")
    (folder / "imagenet_val_k1.zip").write_bytes(b"no zip")
    (folder / "imagenet_val_k2.zip").unlink()
    with pytest.raises(ValueError, match="'n9' in the zips is no ImageNet class"):
        data.load("imagenet", "k0", tmp_path)
    with pytest.raises(ValueError, match=r"imagenet_val_k1.zip is corrupt"):
        data.load("imagenet", "k1", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"imagenet_val_k2.zip is missing"):
        data.load("imagenet", "k2", tmp_path)
    with pytest.raises(ValueError, match=r"split='k7' is not known. Choose from: train, test, "):
        data.load("imagenet", "k0+k7", tmp_path)


def test_an_image_folder_without_splits_is_divided_class_by_class(tmp_path):
    name = f"imagefolder:{write_folder(tmp_path)}"
    train, test = data.load(name), data.load(name, "test")
    assert train.class_names == ("ant", "bee")
    assert train.labels.bincount().tolist() == [4, 4]
    assert test.labels.bincount().tolist() == [1, 1]
    assert not {*train.images.items} & {*test.images.items}


def test_images_of_a_folder_are_scaled_and_cropped(tmp_path):
    found = data.load(f"imagefolder:{write_folder(tmp_path)}", "test", size=12, channels=1)
    assert found.image_shape == (1, 12, 12)
    assert found.batch(torch.arange(2))[0].shape == (2, 1, 12, 12)
    image = Image.new("RGB", (64, 32))
    image.paste((255, 0, 0), (16, 0, 48, 32))  # the centre square
    image.save(tmp_path / "a.png")
    pixels = readers.EncodedImages((tmp_path / "a.png",), 16)[torch.tensor([0])]
    assert pixels[0, 0].float().mean() == 255
    assert pixels[0, 1:].sum() == 0


@pytest.mark.parametrize("second", ["test", "val"])
def test_split_folders_share_one_list_of_classes(tmp_path, second):
    write_folder(tmp_path / "train", ("ant", "cat"))
    write_folder(tmp_path / second, ("bee", "cat"), 1)
    name = f"imagefolder:{tmp_path}"
    assert data.load(name).class_names == data.load(name, "test").class_names
    assert data.load(name, "test").labels.tolist() == [1, 2]


def test_an_image_folder_without_what_is_asked_for_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        data.load(f"imagefolder:{tmp_path}/nowhere")
    with pytest.raises(ValueError, match=r"holds no images. Expected .*/CLASS/IMAGE"):
        data.load(f"imagefolder:{tmp_path}")
    write_folder(tmp_path / "train")
    with pytest.raises(FileNotFoundError, match="has no folder for split='test'"):
        data.load(f"imagefolder:{tmp_path}", "test")


def test_a_file_that_is_no_image_is_named_when_decoded(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "ant" / "bad.jpg").write_bytes(b"no image")
    stored = readers.read(f"imagefolder:{tmp_path}", "train")
    with pytest.raises(ValueError, match=r"bad.jpg cannot be decoded .* Replace or remove it"):
        stored.images[torch.arange(len(stored.images))]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"data='cifar' is not known.*Did you mean 'cifar10'\?"):
        data.load("cifar")
    with pytest.raises(ValueError, match="Choose from: digits, mnist, cifar10, imagenet, "):
        data.load("imagefolder")


def test_a_missing_set_says_where_it_was_looked_for_and_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no data folder was given.*WFILTER_DATA.*digits"):
        data.load("imagenet")
    with pytest.raises(FileNotFoundError, match=r"not in .*mnist/MNIST/raw.*download=True"):
        data.load("mnist", root=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"root=.*nowhere is not a folder"):
        data.load("mnist", root=tmp_path / "nowhere")


def test_a_download_goes_to_the_cache_and_only_when_allowed(monkeypatch):
    def fetch(root, download):
        assert download
        write_mnist(Path(root))

    monkeypatch.setattr(torchvision.datasets, "MNIST", fetch)
    with pytest.raises(FileNotFoundError, match="mnist was not found"):
        data.load("mnist")
    assert len(data.load("mnist", download=True)) == 7
    assert (readers.cache_folder() / "mnist" / "MNIST" / "raw").is_dir()
    assert len(data.load("mnist")) == 7


def test_a_download_that_fails_names_the_remedy(monkeypatch):
    def fail(root, download):
        raise RuntimeError("no network")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", fail)
    with pytest.raises(FileNotFoundError, match=r"downloaded \(no network\). Check the network"):
        data.load("cifar10", download=True)


@needs_data
@pytest.mark.parametrize(
    ("name", "counts", "shape"),
    [("mnist", (60000, 10000), (1, 28, 28)), ("imagenet", (3000, 1000), (3, 224, 224))],
)
def test_the_real_sets_are_whole(name, counts, shape):
    for split, count in zip(("train", "test"), counts, strict=True):
        found = data.load(name, split, REAL)
        assert (len(found), found.image_shape) == (count, shape)
        assert found.labels.unique().numel() == found.num_classes == len({*found.class_names})


@needs_data
def test_the_real_cifar10_test_images_have_the_official_md5():
    assert data.load("cifar10", "test", REAL).labels.bincount().tolist() == [1000] * 10
