"""Which samples a step trains on, and what each of them is to forget."""

import dataclasses
import math

import pytest
import torch

from wfilter.untraining.pairs import Pairs, blend, paper_pairs
from wfilter.untraining.recipes import DISTILL, PAPER


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_paper_pairs_forget_the_first_half_and_retain_the_second_under_other_rows():
    labels = torch.randint(0, 10, (16,), generator=generator())
    pairs = paper_pairs(labels, 10, PAPER.expansion, generator(1))
    assert pairs.own.sum() == 8
    assert len(pairs.sample) == 8 + 3 * 8
    assert torch.equal(pairs.forget[pairs.own], labels[:8])
    retain = pairs.forget[~pairs.own]
    assert (retain != labels[pairs.sample[~pairs.own]]).all()
    assert all(len(set(rows.tolist())) == 3 for rows in retain.view(8, 3))


def test_paper_pairs_repeat_rows_only_when_there_are_too_few_classes():
    pairs = paper_pairs(torch.tensor([0, 1]), 2, PAPER.expansion, generator())
    assert pairs.forget[~pairs.own].tolist() == [0, 0, 0]


def test_distill_sets_hold_the_own_class_exactly_when_the_pair_says_so():
    labels = torch.randint(0, 10, (64,), generator=generator())
    pairs = DISTILL.make_pairs(labels, 10, generator(2))
    own = pairs.forget[torch.arange(len(pairs.sample)), labels[pairs.sample]]
    assert torch.equal(own, pairs.own)
    sizes = pairs.forget.sum(1)
    assert sizes.min() == 1
    assert sizes.max() == DISTILL.max_set


def test_blended_images_keep_more_than_half_of_themselves():
    pure = torch.eye(64)  # image i is a 1 at i: an image's content can be read off
    images, chosen = blend(pure, 0.6, generator())
    assert 20 < chosen.sum() < 58
    assert torch.equal(images[~chosen], pure[~chosen])
    own = images.diagonal()[chosen]
    assert ((own >= 0.5) & (own < 1)).all()
    assert torch.allclose(images.sum(1), torch.ones(64))


def test_an_image_alone_is_not_blended_and_a_bad_one_spoils_no_other():
    images, chosen = blend(torch.ones(1, 4), 1.0, generator())
    assert not chosen.any()
    images = torch.eye(64)
    images[5] = torch.inf
    blended, chosen = blend(images, 0.5, generator())
    clean = ~chosen
    clean[5] = False
    assert torch.equal(blended[clean], images[clean])


def test_whole_numbers_cannot_be_blended():
    with pytest.raises(TypeError, match="Give floats"):
        blend(torch.zeros(4, 3, dtype=torch.uint8), 0.5, generator())


def test_distill_without_sets_gives_labels():
    recipe = dataclasses.replace(DISTILL, set_share=0.0)
    pairs = recipe.make_pairs(torch.tensor([0, 1, 2]), 4, generator())
    assert pairs.forget.dtype == torch.int64
    assert torch.equal(pairs.forget == torch.tensor([0, 1, 2])[pairs.sample], pairs.own)


def test_shares_of_two_processes_are_the_whole():
    pairs = paper_pairs(torch.arange(8) % 4, 4, PAPER.expansion, generator())
    parts = [pairs.share(rank, 2) for rank in range(2)]
    seen = sorted(zip(pairs.sample.tolist(), pairs.forget.tolist()))
    both = [p for part in parts for p in zip(part.sample.tolist(), part.forget.tolist())]
    assert sorted(both) == seen
    assert parts[0].own.sum() == parts[1].own.sum()


def test_accuracies_of_a_step_leave_blended_images_out():
    pairs = Pairs(
        torch.tensor([0, 1, 2]), torch.tensor([0, 2, 2]), torch.tensor([True, False, True])
    )
    logits, rows = torch.eye(3)[[1, 1, 2]], torch.tensor([0, 1, 2])
    nothing = torch.zeros(3, dtype=torch.bool)
    assert pairs.accuracies(logits, rows, nothing) == (1.0, 0.5)
    assert pairs.accuracies(logits, rows, torch.tensor([False, False, True])) == (1.0, 0.0)
    assert all(map(math.isnan, pairs.accuracies(logits, rows, ~nothing)))
