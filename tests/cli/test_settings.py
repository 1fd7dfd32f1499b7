import time

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


BOMBS = {
    "deep list": "a = " + "[" * 200_000,
    "deep table": "a = " + "{b = " * 100_000,
    "many dotted parts": "a." * 2_000_000 + "a = 1",
    "large": "a = 1\n" + "#" * 2**21,
    "not text": "\0\1\2",
    "one key twice": "a = 1\na = 2",
    "long number": "a = " + "9" * 100_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_settings_file_is_refused_at_once(tmp_path, name):
    path = tmp_path / "settings.toml"
    path.write_text(BOMBS[name])
    began = time.perf_counter()
    with pytest.raises(ValueError, match=r"is not valid TOML|it is no settings file"):
        settings.read(path)
    assert time.perf_counter() - began < 20


def test_the_largest_nest_of_dotted_keys_that_is_read_takes_seconds(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("a." * 300 + "a = 1")
    assert "a" in settings.read(path)
