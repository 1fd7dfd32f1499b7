import pytest
import torch
from torch import nn

import digits
from digits import FORGET, train
from wfilter import baselines
from wfilter.baselines.batches import Task


def test_halves_keep_every_sample_once_and_the_size_of_the_batches():
    task = Task.of(digits.trained_cnn(), [FORGET, 4], train())
    labels = digits.data()[0][1]
    forget, retain = ([y for _, y in half()] for half in (task.forget, task.retain))
    assert len(torch.cat(forget)) + len(torch.cat(retain)) == len(labels)
    assert set(torch.cat(forget).tolist()) == {FORGET, 4}
    assert {len(y) for y in retain[:-1]} == {64}
    assert [len(y) for y, _ in task.all(500)] == [500, 500, 297]
    others = task.other_labels(torch.zeros(500).long())
    assert set(others.tolist()) == set(range(10)) - {FORGET, 4}


def test_a_batch_is_never_one_sample_alone_since_batchnorm_cannot_train_on_it():
    images, labels = digits.data()[0]
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    retained = int((labels[:65] != FORGET).sum())
    batches = [(images[:65], labels[:65])]
    for size in (retained - 1, 8):
        sizes = [len(y) for _, y in Task.of(model, FORGET, batches).retain(size)]
        assert min(sizes) > 1
        assert sum(sizes) == retained
    for name in ("random_labels", "salun", "retrained"):
        options = {"epochs": 1} if name != "salun" else {"epochs": 1, "share": 1.0}
        changed = baselines.METHODS[name](model.eval(), FORGET, batches * 2, **options)
        assert all(parameter.isfinite().all() for parameter in changed.parameters())


def test_a_class_that_is_not_in_the_data_is_refused():
    images, labels = digits.data()[0]
    batches = digits.batches((images[labels != FORGET], labels[labels != FORGET]))
    needs_none = {"original", "logit_mask", "projection"}
    quick = {"random_labels", "fine_tuning", "l1_sparse", "bad_teaching"}  # tell after an epoch
    for name in {*baselines.METHODS} - needs_none:
        options = {"epochs": 1} if name in quick else {}
        for forget in (FORGET, [FORGET, 4]):
            with pytest.raises(ValueError, match=r"none of \[3\] to forget"):
                baselines.METHODS[name](digits.trained_cnn(), forget, batches, **options)
