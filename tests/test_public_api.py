"""What users type: names, signatures, and that importing wfilter is light."""

import inspect
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import wfilter

CONTRACT = {
    "FilteredModel",
    "apply_weight_filtering",
    "find_targets",
    "load",
    "register",
    "remove_weight_filtering",
}


def test_names_of_the_contract_are_exported_and_documented():
    assert set(wfilter.__all__) >= CONTRACT
    for name in wfilter.__all__:
        assert inspect.getdoc(getattr(wfilter, name)), name


def test_submodules_need_no_import_of_their_own():
    code = (
        "import wfilter\n"
        "print(*(f.__name__ for f in (wfilter.explain.top_units, wfilter.plots.heat_map,"
        "wfilter.page.write_page, wfilter.baselines.logit_mask, wfilter.zoo.build)))"
    )
    root = Path(wfilter.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert result.stdout.split()[:2] == ["top_units", "heat_map"]
    with pytest.raises(AttributeError, match="no attribute 'explian'"):
        wfilter.explian  # noqa: B018


def test_a_name_in_place_of_a_model_is_refused():
    with pytest.raises(TypeError, match=r"model is a str, not a torch\.nn\.Module"):
        wfilter.apply_weight_filtering("resnet18")


def test_images_and_labels_must_be_as_many():
    with pytest.raises(ValueError, match="InMemory has 3 images\nand 2 labels"):
        wfilter.InMemory(torch.rand(3, 1, 8, 8), torch.tensor([0, 1]))


def test_apply_takes_the_arguments_of_the_contract():
    parameters = inspect.signature(wfilter.apply_weight_filtering).parameters
    assert list(parameters)[:2] == ["model", "num_classes"]
    defaults = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert defaults == {
        "targets": "auto",
        "exclude": (),
        "granularity": "out",
        "init": 3.0,
        "class_names": None,
        "example_input": None,
    }


def test_filtered_model_has_the_attributes_of_the_contract(wf):
    data = {"alpha", "base", "class_names", "num_classes", "plan"}
    methods = {"bake", "forgetting", "gates", "save", "trainable_parameters", "verify"}
    assert data | methods <= set(dir(wf))


def test_import_needs_none_of_the_heavy_packages():
    heavy = ("torchvision", "timm", "sklearn", "matplotlib", "onnx", "scipy")
    code = f"import sys, wfilter; print([m for m in {heavy!r} if m in sys.modules])"
    root = Path(wfilter.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert result.stdout.strip() == "[]"


def test_package_ships_its_types():
    assert Path(wfilter.__file__).with_name("py.typed").exists()


def test_version_is_that_of_the_distribution():
    try:
        installed = metadata.version("wfilter")
    except metadata.PackageNotFoundError:
        pytest.skip("runs from a checkout that is not installed")
    assert installed == wfilter.__version__
