"""A label stays with its sample, and a name with its class."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import wfilter
from helpers import CLASSES, linear, samples, tiny
from wfilter.data.batches import InMemory
from wfilter.data.images import ImageSet, batches
from wfilter.untraining.loop import untrain
from wfilter.untraining.recipes import PAPER

NAMES = ("ant", "bee", "cow", "dog")


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
    wf = linear()
    untrain(wf, InMemory(*samples(), batch_size=8), recipe=PAPER, steps=8)
    assert wf.alphas.isfinite().all()
