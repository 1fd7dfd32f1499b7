import dataclasses

import pytest

import wfilter
from wfilter.untraining.recipes import DISTILL, DISTILL_SOFT, PAPER, get_recipe


def test_paper_constants_are_those_of_the_paper():
    assert (PAPER.learning_rate, PAPER.expansion, PAPER.patience) == (100.0, 3, 10)
    assert (PAPER.lambda_retain, PAPER.lambda_forget, PAPER.lambda_alpha) == (1.0, 10.0, 1.0)
    assert wfilter.RECIPES["paper-vit"].lambda_forget == 100.0


@pytest.mark.parametrize("share", [-1.0, 60])
def test_shares_are_shares(share):
    with pytest.raises(ValueError, match="is a share"):
        dataclasses.replace(DISTILL, blend=share)


def test_paper_objective_refuses_blended_images():
    with pytest.raises(ValueError, match="a blended image has no label"):
        dataclasses.replace(PAPER, blend=0.5)


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


def test_an_unknown_recipe_names_the_known_ones():
    with pytest.raises(ValueError, match=r"recipe='best' is unknown. Use one of paper, paper-vit"):
        get_recipe("best")


@pytest.mark.parametrize(
    "change", [{"objective": "x"}, {"gates": "x"}, {"pairs": "x"}, {"depth": 0.0}, {"expansion": 0}]
)
def test_impossible_settings_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(PAPER, **change)
