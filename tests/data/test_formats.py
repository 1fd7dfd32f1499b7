import gzip
import hashlib
import io
import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from wfilter import data
from wfilter.data import formats as readers


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
    for position, name in enumerate(("train", "val", "extra")):
        for row in range(3):
            file = folder / name / f"n{row}" / "x.png"
            file.parent.mkdir(parents=True)
            file.write_bytes(png((50 * position, 100 * row, 0)))
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


def write_binary(root, monkeypatch):
    """The binary version of CIFAR-10 with four images in each file, taken for the official one."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 3, 32, 32)).astype(np.uint8)
    labels = (np.arange(24) % 10).astype(np.uint8)
    for number, name in enumerate(readers.CIFAR10_MD5):
        part = slice(4 * number, 4 * number + 4)
        content = np.concatenate([labels[part, None], pixels[part].reshape(4, -1)], 1).tobytes()
        (folder / f"{name}.bin").write_bytes(content)
        monkeypatch.setitem(readers.CIFAR10_MD5, name, hashlib.md5(content).hexdigest())
    return folder, pixels, labels


def test_cifar10s_binary_version_is_read_in_order(tmp_path, monkeypatch):
    _, pixels, labels = write_binary(tmp_path, monkeypatch)
    train, test = data.load("cifar10", "train", tmp_path), data.load("cifar10", "test", tmp_path)
    assert np.array_equal(torch.cat([train.images, test.images]).numpy(), pixels)
    assert torch.cat([train.labels, test.labels]).tolist() == labels.tolist()
    assert test.class_names[int(test.labels[0])] == "airplane"


def test_a_binary_file_that_is_damaged_or_missing_is_named(tmp_path, monkeypatch):
    folder, *_ = write_binary(tmp_path, monkeypatch)
    (folder / "test_batch.bin").write_bytes(b"cut short")
    with pytest.raises(ValueError, match=r"test_batch.bin is corrupt: its md5"):
        data.load("cifar10", "test", tmp_path)
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_3.bin is missing"):
        data.load("cifar10", "train", tmp_path)


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
    assert found.labels.tolist() == [0, 1, 2]
    assert found.class_names == ("tench", "crane_n1", "crane_n2")
    assert (found.mean, found.std) == ((0.5,), (0.5,))
    assert found.images[torch.tensor([0, 2])][:, 1, 0, 0].tolist() == [0, 200]
    assert found.images[torch.tensor([0])][0, 0, 0, 0] == 50


def test_imagenet_splits_can_be_joined(tmp_path):
    write_imagenet(tmp_path)
    found = data.load("imagenet", "extra+train", tmp_path)
    assert found.images[torch.arange(6)][:, 0, 0, 0].tolist() == [100] * 3 + [0] * 3
    assert found.labels.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_set_of_encoded_images_is_held_out_and_batched_like_any_other(tmp_path):
    write_imagenet(tmp_path)
    train, val = data.hold_out(data.load("imagenet", "train+val+extra", tmp_path, size=16), 0.4)
    assert (len(train), len(val)) == (6, 3)
    (images, labels) = next(iter(data.batches(val, 3)))
    assert images.shape == (3, 3, 16, 16)
    assert labels.sort().values.tolist() == [0, 1, 2]


def test_what_imagenet_lacks_is_named(tmp_path):
    folder = write_imagenet(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"imagenet was not found: .*imagenet/k7"):
        data.load("imagenet", "val+k7", tmp_path)
    (folder / "val" / "n9").mkdir()
    with pytest.raises(ValueError, match="n9 is no class of this set"):
        data.load("imagenet", "val", tmp_path)
    (folder / "imagenet_class_index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"imagenet_class_index.json is missing"):
        data.load("imagenet", "train", tmp_path)


OWN_SET = """
import torch
from wfilter.data import ImageSet
def blank(split):
    labels = torch.arange(3 if split == "train" else 2)
    images = torch.zeros(len(labels), 1, 4, 4, dtype=torch.uint8)
    return ImageSet("blank", images, labels, ("a", "b", "c"), (0.5,), (0.25,))
def nothing(split):
    return None
"""


def test_a_set_can_be_given_as_a_function(tmp_path, monkeypatch):
    (tmp_path / "mysets.py").write_text(OWN_SET)
    monkeypatch.chdir(tmp_path)
    found = data.load("mysets:blank", "test", size=8, channels=3)
    assert (len(found), found.image_shape, found.mean) == (2, (3, 8, 8), (0.5,))
    assert len(data.load("mysets:blank")) == 3
    with pytest.raises(ValueError, match=r"mysets:nothing returned NoneType. Expected a wfilter"):
        data.load("mysets:nothing")
    with pytest.raises(ValueError, match=r"function of mysets 'blanc' is not known.*blank"):
        data.load("mysets:blanc")
    with pytest.raises(ValueError, match="'nomodule' is neither imagefolder nor a module"):
        data.load("nomodule:blank")


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
