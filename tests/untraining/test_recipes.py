import dataclasses

import pytest

import wfilter
from wfilter.cli.settings import make_recipe
from wfilter.untraining.recipes import DISTILL, DISTILL_SOFT, LINEAR, PAPER, get_recipe
from wfilter.untraining.stored import recipe_from


def test_paper_constants_are_those_of_the_paper():
    assert (PAPER.learning_rate, PAPER.expansion, PAPER.patience) == (100.0, 3, 10)
    assert (PAPER.lambda_retain, PAPER.lambda_forget, PAPER.lambda_alpha) == (1.0, 10.0, 1.0)
    assert wfilter.RECIPES["paper-vit"].lambda_forget == 100.0


@pytest.mark.parametrize("share", [-1.0, 60])
def test_shares_are_shares(share):
    with pytest.raises(ValueError, match="is a share"):
        dataclasses.replace(DISTILL, blend=share)


@pytest.mark.parametrize(
    ("recipe", "change"),
    [
        (PAPER, {"blend": 0.5}),  # a blended image has no label
        (PAPER, {"pairs": "row"}),
        (PAPER, {"lambda_fisher": 1.0}),
        (DISTILL, {"lambda_fisher": 1.0}),
        (DISTILL, {"epsilon": 1.0}),
        (LINEAR, {"blend": 0.5}),
        (LINEAR, {"gates": "hard"}),
        (LINEAR, {"patience": 3}),
    ],
)
def test_a_recipe_has_no_settings_of_another_objective(recipe, change):
    name = next(iter(change))
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        dataclasses.replace(recipe, **change)
    old = {**recipe.to_dict(), **change}
    with pytest.raises(ValueError, match=f"{name}=.* is no setting of the objective"):
        recipe_from(old)


# What version 0.1 wrote for its one class of recipes.
BEFORE = {
    "schedule": "constant", "expansion": 3, "lambda_retain": 1.0, "lambda_forget": 1.0,
    "lambda_alpha": 1.0, "lambda_deep": 0.0, "lambda_fisher": 0.0, "fisher_images": 1500,
    "alike": 0, "regulariser": "global", "epsilon": 1e-6, "margin": 5.0, "pairs": "mixed",
    "forget_share": 0.5, "set_share": 0.0, "max_set": 5, "blend": 0.0, "gates": "soft",
    "start": None, "depth": 1.0, "evaluations": 5, "patience": 10,
}  # fmt: skip
OLD = [
    {"name": "paper", "objective": "paper", "optimiser": "sgd", "learning_rate": 100.0}
    | BEFORE | {"lambda_forget": 10.0, "epsilon": 1.0},
    {"name": "distill-soft", "objective": "distill", "optimiser": "adam", "learning_rate": 0.2}
    | BEFORE | {"schedule": "cosine", "expansion": 4, "lambda_alpha": 0.0, "margin": 4.0,
                "forget_share": 0.3, "blend": 0.5, "patience": 0},
    {"name": "linear", "objective": "linear", "optimiser": "solver", "learning_rate": 0.0}
    | BEFORE | {"lambda_alpha": 0.0003, "lambda_fisher": 3.0, "fisher_images": 4000,
                "margin": 9.0, "alike": 16, "patience": 0},
]  # fmt: skip


@pytest.mark.parametrize("stored", OLD, ids=lambda stored: stored["name"])
def test_settings_that_list_all_objectives_are_still_read(stored):
    assert recipe_from(stored) == wfilter.RECIPES[stored["name"]]
    assert make_recipe(stored["name"], stored) == wfilter.RECIPES[stored["name"]]


@pytest.mark.parametrize("name", wfilter.RECIPES)
def test_a_recipe_comes_back_from_its_own_settings(name):
    assert recipe_from(wfilter.RECIPES[name].to_dict()) == wfilter.RECIPES[name]


def test_the_objective_is_not_a_setting():
    with pytest.raises(ValueError, match="Choose the recipe by its name"):
        make_recipe("distill", {"objective": "paper"})
    with pytest.raises(ValueError, match="objective='x' is unknown"):
        recipe_from({"name": "a", "objective": "x"})


def test_a_term_on_features_is_refused_with_what_took_its_place():
    old = {**DISTILL_SOFT.to_dict(), "pairs": "row", "lambda_deep": 5.0}
    with pytest.raises(ValueError, match=r"lambda_deep=5.0 put a term .* see recipe 'reroute'"):
        recipe_from(old)


def test_an_unknown_recipe_names_the_known_ones():
    with pytest.raises(ValueError, match=r"recipe='best' is unknown. Use one of paper, paper-vit"):
        get_recipe("best")


@pytest.mark.parametrize("change", [{"gates": "x"}, {"depth": 0.0}, {"expansion": 0}])
def test_impossible_settings_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(DISTILL_SOFT, **change)
