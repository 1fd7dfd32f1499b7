import pytest

from wfilter import RECIPES
from wfilter.cli import settings


def test_what_is_written_is_read_back(tmp_path):
    values = {"model": 'a "b" \\ ü', "steps": 3, "rate": 0.5, "amp": True, "targets": ["*.weight"]}
    table = {"gates": "soft", "depth": 1.0}
    (tmp_path / "a.toml").write_text(settings.write({**values, "recipe": table}), "utf-8")
    assert settings.read(tmp_path / "a.toml") == {**values, "recipe": table}


def test_relative_weights_start_at_the_file(tmp_path):
    (tmp_path / "a.toml").write_text('weights = "base.safetensors"')
    assert settings.read(tmp_path / "a.toml")["weights"] == str(tmp_path / "base.safetensors")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_the_round_trip(name, tmp_path):
    text = settings.write({"recipe": RECIPES[name].to_dict()})
    (tmp_path / "a.toml").write_text(text)
    assert settings.make_recipe(name, settings.read(tmp_path / "a.toml")["recipe"]) == RECIPES[name]


def test_none_can_be_written():
    assert settings.make_recipe("distill", {"start": "none"}).start is None


def test_wrong_types_are_refused():
    with pytest.raises(ValueError, match="expansion='many' is not int"):
        settings.make_recipe("distill", {"expansion": "many"})
    with pytest.raises(ValueError, match="margin=True is not float"):
        settings.make_recipe("distill", {"margin": True})
