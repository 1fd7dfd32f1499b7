import dataclasses

import pytest
import torch
from torch import nn

import wfilter
from wfilter.recipes import (
    DISTILL,
    DISTILL_SOFT,
    PAPER,
    RowAdam,
    blend,
    distill_pairs,
    get_recipe,
    paper_pairs,
    row_pairs,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_paper_constants_are_those_of_the_paper():
    assert (PAPER.learning_rate, PAPER.expansion, PAPER.patience) == (100.0, 3, 10)
    assert (PAPER.lambda_retain, PAPER.lambda_forget, PAPER.lambda_alpha) == (1.0, 10.0, 1.0)
    assert wfilter.RECIPES["paper-vit"].lambda_forget == 100.0


def test_paper_pairs_forget_the_first_half_and_retain_the_second_under_other_rows():
    labels = torch.randint(0, 10, (16,), generator=generator())
    pairs = paper_pairs(labels, 10, PAPER, generator(1))
    assert pairs.own.sum() == 8
    assert len(pairs.sample) == 8 + 3 * 8
    assert torch.equal(pairs.forget[pairs.own], labels[:8])
    retain = pairs.forget[~pairs.own]
    assert (retain != labels[pairs.sample[~pairs.own]]).all()
    assert all(len(set(rows.tolist())) == 3 for rows in retain.view(8, 3))


def test_paper_pairs_repeat_rows_only_when_there_are_too_few_classes():
    pairs = paper_pairs(torch.tensor([0, 1]), 2, PAPER, generator())
    assert pairs.forget[~pairs.own].tolist() == [0, 0, 0]


def test_distill_sets_hold_the_own_class_exactly_when_the_pair_says_so():
    labels = torch.randint(0, 10, (64,), generator=generator())
    pairs = distill_pairs(labels, 10, DISTILL, generator(2))
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


@pytest.mark.parametrize("share", [-1.0, 60])
def test_shares_are_shares(share):
    with pytest.raises(ValueError, match="is a share"):
        dataclasses.replace(DISTILL, blend=share)


def test_paper_objective_refuses_blended_images():
    with pytest.raises(ValueError, match="a blended image has no label"):
        dataclasses.replace(PAPER, blend=0.5)


def test_distill_without_sets_gives_labels():
    recipe = dataclasses.replace(DISTILL, set_share=0.0)
    pairs = distill_pairs(torch.tensor([0, 1, 2]), 4, recipe, generator())
    assert pairs.forget.dtype == torch.int64
    assert torch.equal(pairs.forget == torch.tensor([0, 1, 2])[pairs.sample], pairs.own)


def test_row_pairs_put_every_sample_once_under_one_class_of_the_batch():
    labels = torch.tensor([5, 3, 3, 8, 5, 3])
    drawn = set()
    for seed in range(20):
        pairs = row_pairs(labels, 10, DISTILL_SOFT, generator(seed))
        assert pairs.sample.tolist() == list(range(6))
        assert len(pairs.forget.unique()) == 1
        assert torch.equal(pairs.own, labels == pairs.forget)
        drawn.add(int(pairs.forget[0]))
    assert drawn == {3, 5, 8}


def test_one_row_for_a_step_goes_neither_with_sets_nor_with_the_papers_objective():
    with pytest.raises(ValueError, match="pairs='row' has one class for all images of a step"):
        dataclasses.replace(DISTILL, pairs="row")
    with pytest.raises(ValueError, match="Use objective='distill' and set_share=0"):
        dataclasses.replace(PAPER, pairs="row")


@pytest.mark.parametrize("change", [{"pairs": "mixed"}, {"patience": 3}, {"lambda_deep": -1.0}])
def test_a_term_on_features_needs_one_row_and_no_validation(change):
    deep = dataclasses.replace(DISTILL_SOFT, pairs="row", lambda_deep=5.0)
    with pytest.raises(ValueError, match=r"Use lambda_deep > 0 with pairs='row' and patience=0"):
        dataclasses.replace(deep, **change)


def test_shares_of_two_processes_are_the_whole():
    pairs = paper_pairs(torch.arange(8) % 4, 4, PAPER, generator())
    parts = [pairs.share(rank, 2) for rank in range(2)]
    seen = sorted(zip(pairs.sample.tolist(), pairs.forget.tolist()))
    both = [p for part in parts for p in zip(part.sample.tolist(), part.forget.tolist())]
    assert sorted(both) == seen
    assert parts[0].own.sum() == parts[1].own.sum()


def test_row_adam_treats_sparse_and_dense_gradients_of_touched_rows_alike():
    torch.manual_seed(0)
    dense, sparse = (nn.Parameter(torch.zeros(5, 3)) for _ in range(2))
    rows = torch.tensor([1, 4])
    values = torch.randn(2, 3)
    optimisers = RowAdam([dense], 0.1), RowAdam([sparse], 0.1)
    for _ in range(3):
        dense.grad = torch.zeros(5, 3).index_copy(0, rows, values)
        sparse.grad = torch.sparse_coo_tensor(rows[None], values, (5, 3), check_invariants=True)
        for optimiser in optimisers:
            optimiser.step()
    torch.testing.assert_close(dense, sparse)
    assert (sparse[[0, 2, 3]] == 0).all()


def test_an_unknown_recipe_names_the_known_ones():
    with pytest.raises(ValueError, match=r"recipe='best' is unknown. Use one of paper, paper-vit"):
        get_recipe("best")


@pytest.mark.parametrize(
    "change", [{"objective": "x"}, {"gates": "x"}, {"pairs": "x"}, {"depth": 0.0}, {"expansion": 0}]
)
def test_impossible_settings_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(PAPER, **change)
