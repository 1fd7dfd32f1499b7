"""Files of version 0.1.0 still load; ``version_0_1/make.py`` made them with that version's code."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

import wfilter

OLD = Path(__file__).parent / "version_0_1"
STORED_SECONDS = ["1.204340", "1.331789", "1.355601"]


def load_maker():
    spec = importlib.util.spec_from_file_location("make_version_0_1", OLD / "make.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


make = load_maker()


@pytest.fixture
def told():
    return {k: torch.tensor(v) for k, v in json.loads((OLD / "told.json").read_text()).items()}


def fresh():
    images, _ = make.make_images()
    settings = {"targets": "*", "class_names": make.NAMES}
    return wfilter.apply_weight_filtering(make.make_model(), example_input=images, **settings)


def test_filters_of_the_first_version_give_the_logits_it_gave(told):
    images, _ = make.make_images()
    wf = wfilter.load(OLD / "filters.safetensors", make.make_model(), example_input=images)
    assert wf.class_names == make.NAMES
    logits = wf(images, forget=torch.tensor([0, 1, 2, -1, 2, 1]))
    torch.testing.assert_close(logits.detach(), told["logits"])


def test_run_stopped_by_the_first_version_goes_on_to_the_alphas_it_would_have_reached(
    tmp_path, told
):
    run = {"recipe": "distill-soft", "steps": 6}
    checkpoint = shutil.copy(OLD / "run.ckpt", tmp_path)
    wf = fresh()
    history = wfilter.untrain(wf, [make.make_images()], **run, checkpoint=checkpoint, resume=True)
    assert [record.step for record in history.records] == [1, 2, 3, 4, 5, 6]
    # The seconds show that steps 1 to 3 are those of the file and were not run again.
    assert [f"{record.seconds:.6f}" for record in history.records[:3]] == STORED_SECONDS
    torch.testing.assert_close(wf.alphas.detach(), told["alphas"], rtol=1e-4, atol=1e-4)


def test_report_of_the_first_version_is_read_and_printed():
    report = wfilter.Report.from_json(OLD / "report.json")
    assert report.class_names == make.NAMES
    assert report.rows["wfilter"]["Acc_f"].by_class == {0: 0.0, 1: 0.0, 2: 0.0}
    assert "Acc_r" in report.to_markdown()
