import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch.testing import assert_close
from torch.utils.data import DataLoader

from wfilter import data


def make_set(labels=(0, 1, 2, 0, 1, 2), channels=1, size=4, **more):
    pixels = torch.Generator().manual_seed(0)
    shape = (len(labels), channels, size, size)
    images = torch.randint(0, 256, shape, generator=pixels).to(torch.uint8)
    return data.ImageSet("made", images, torch.tensor(labels), ("a", "b", "c"), **more)


def test_digits_are_divided_into_two_parts_that_share_no_image_and_miss_none():
    train, test = data.load("digits"), data.load("digits", "test")
    stored = torch.from_numpy(load_digits().images * 255 / 16).round().flatten(1)
    both = torch.cat([train.images, test.images]).flatten(1).double()
    assert sorted(both.tolist()) == sorted(stored.tolist())
    assert len(test) == pytest.approx(0.2 * len(stored), abs=5)


def test_every_digit_has_a_fifth_of_its_images_in_the_test_split():
    train, test = data.load("digits"), data.load("digits", "test")
    share = test.labels.bincount() / (test.labels.bincount() + train.labels.bincount())
    assert_close(share, torch.full((10,), 0.2), atol=0.004, rtol=0)


def test_a_set_is_loaded_the_same_every_time():
    assert torch.equal(data.load("digits").images, data.load("digits").images)


def test_size_and_channels_are_as_asked():
    digits = data.load("digits", "test", size=28, channels=3)
    images, _ = digits.batch(torch.arange(3))
    assert images.shape == (3, 3, 28, 28)
    assert torch.equal(images[:, 0], images[:, 2])
    assert_close(images.mean(), data.load("digits", "test").batch(torch.arange(3))[0].mean(),
                 atol=0.02, rtol=0)  # fmt: skip


def test_pixels_are_between_0_and_1_unless_normalised():
    plain, _ = make_set().batch(torch.arange(6))
    scaled, _ = make_set(mean=(0.5,), std=(0.25,)).batch(torch.arange(6))
    assert 0 <= plain.min() < plain.max() <= 1
    assert_close(scaled, (plain - 0.5) / 0.25)


def test_mean_and_std_may_differ_by_channel():
    mean, std = (0.1, 0.2, 0.3), (1.0, 2.0, 4.0)
    plain, _ = make_set(channels=3).batch(torch.arange(6))
    scaled, _ = make_set(channels=3, mean=mean, std=std).batch(torch.arange(6))
    for channel in range(3):
        assert_close(scaled[:, channel], (plain[:, channel] - mean[channel]) / std[channel])


def test_torch_data_loader_reads_a_set():
    dataset = make_set()
    (images, labels), *rest = DataLoader(dataset, batch_size=4)
    assert len(rest) == 1
    assert_close(images, dataset.batch(torch.arange(4))[0])
    assert labels.tolist() == [0, 1, 2, 0]


def test_a_set_can_be_looped_over_and_indexed_from_its_end():
    dataset = make_set()
    assert [label for _, label in dataset] == [0, 1, 2, 0, 1, 2]
    assert torch.equal(dataset[-1][0], dataset[5][0])


def test_taking_nothing_gives_an_empty_set():
    empty = make_set().take(torch.tensor([], dtype=torch.int64))
    assert len(empty) == 0
    assert list(data.batches(empty)) == []


def test_unshuffled_passes_are_the_set_in_order():
    dataset = make_set()
    loader = data.batches(dataset, 4)
    for _ in range(2):
        assert torch.equal(torch.cat([labels for _, labels in loader]), dataset.labels)
    assert len(loader) == 2


def test_shuffled_passes_differ_and_are_repeated_by_a_second_loader():
    dataset = data.load("digits", "test")
    first = data.batches(dataset, 50, shuffle=True, seed=3, augment=data.shift_and_flip)
    second = data.batches(dataset, 50, shuffle=True, seed=3, augment=data.shift_and_flip)
    passes = [torch.cat([images for images, _ in first]) for _ in range(2)]
    again = [torch.cat([images for images, _ in second]) for _ in range(2)]
    assert not torch.equal(passes[0], passes[1])
    assert torch.equal(passes[0], again[0])
    assert torch.equal(passes[1], again[1])


def test_setting_the_epoch_gives_that_pass():
    loader = data.batches(make_set(), 6, shuffle=True)
    passes = [next(iter(loader))[0] for _ in range(3)]
    later = data.batches(make_set(), 6, shuffle=True)
    later.epoch = 2
    assert torch.equal(next(iter(later))[0], passes[2])


def test_a_shuffled_pass_has_every_image_once_and_drop_last_only_whole_batches():
    dataset = data.load("digits", "test")
    labels = torch.cat([labels for _, labels in data.batches(dataset, 50, shuffle=True)])
    assert torch.equal(labels.sort().values, dataset.labels.sort().values)
    loader = data.batches(dataset, 50, shuffle=True, drop_last=True)
    assert [len(labels) for _, labels in loader] == [50] * len(loader) == [50] * 7


@settings(max_examples=25, deadline=None)
@given(
    labels=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 5),
)
def test_hold_out_divides_each_class_by_the_fraction(labels, fraction, seed):
    dataset = make_set(labels)
    train, val = data.hold_out(dataset, fraction, seed)
    assert len(train) + len(val) == len(dataset)
    for label in range(3):
        count = labels.count(label)
        held = int((val.labels == label).sum())
        assert abs(held - fraction * count) <= 1
        assert count < 2 or 1 <= held < count


def test_hold_out_parts_share_no_image_and_depend_on_the_seed():
    dataset = data.load("digits", "test")
    numbered = data.ImageSet(
        "n", dataset.images, torch.arange(len(dataset)) % 10, dataset.class_names
    )
    train, val = data.hold_out(numbered, 0.3)
    rows = {tuple(image.flatten().tolist()) for image in train.images}
    assert all(tuple(image.flatten().tolist()) not in rows for image in val.images)
    assert torch.equal(val.images, data.hold_out(numbered, 0.3)[1].images)
    assert not torch.equal(val.images, data.hold_out(numbered, 0.3, seed=1)[1].images)


@pytest.mark.parametrize("flip", [False, True])
def test_shifted_images_are_windows_of_the_padded_image(flip):
    images = torch.rand(20, 2, 5, 6)
    moved = data.shift_and_flip(images, torch.Generator().manual_seed(1), pad=1, flip=flip)
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1), mode="replicate")
    mirrored_count = 0
    for padded_image, found in zip(padded, moved, strict=True):
        windows = [padded_image[:, r : r + 5, c : c + 6] for r in range(3) for c in range(3)]
        plain = any(torch.equal(found, window) for window in windows)
        mirrored = any(torch.equal(found, window.flip(2)) for window in windows)
        assert plain or mirrored
        mirrored_count += mirrored and not plain
    assert (0 < mirrored_count < 20) if flip else mirrored_count == 0


def test_no_shift_and_no_flip_changes_nothing():
    images = torch.rand(3, 1, 4, 4)
    assert torch.equal(data.shift_and_flip(images, torch.Generator(), pad=0), images)


def test_an_index_outside_the_set_is_refused():
    with pytest.raises(IndexError, match="index 6 is outside a set of 6 images"):
        make_set()[6]


def test_float_images_are_refused():
    with pytest.raises(
        ValueError, match=r"images are torch.float32 \(2, 1, 4, 4\). Expected uint8"
    ):
        data.ImageSet("x", torch.rand(2, 1, 4, 4), torch.tensor([0, 1]), ("a", "b"))


@pytest.mark.parametrize("labels", [torch.tensor([0]), torch.tensor([0.0, 1.0])])
def test_labels_of_the_wrong_length_or_dtype_are_refused(labels):
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"Expected int64 \(2,\)"):
        data.ImageSet("x", images, labels, ("a", "b"))


def test_labels_without_a_class_name_are_refused():
    with pytest.raises(ValueError, match=r"labels run from 0 to 7, outside 0\.\.2"):
        make_set((0, 7))


def test_a_mean_for_another_number_of_channels_is_refused():
    with pytest.raises(ValueError, match=r"mean=.* does not fit 1-channel images"):
        data.load("digits", mean=(0.1, 0.2, 0.3))


def test_a_std_of_zero_is_refused():
    with pytest.raises(ValueError, match="std above 0"):
        data.load("digits", std=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size=0 is not a number of pixels"),
        ({"channels": 2}, r"channels=2 is not 1 \(grey\) or 3 \(colour\)"),
        ({"split": "validation"}, "split='validation' is not known. Choose from: train, test"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        data.load("digits", **settings)


def test_batches_of_no_images_and_fractions_beyond_1_are_refused():
    with pytest.raises(ValueError, match="batch_size=0 is not a number of images"):
        data.batches(make_set(), 0)
    with pytest.raises(ValueError, match=r"fraction=1.5 is outside 0\.\.1"):
        data.hold_out(make_set(), 1.5)


def test_old_name_of_image_batches_still_works_with_a_warning():
    from wfilter import data

    with pytest.warns(DeprecationWarning, match="ImageBatches"):
        assert data.Batches is data.ImageBatches
