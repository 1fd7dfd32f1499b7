"""What `evaluate` refuses, and old names that it still takes."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import digits
import wfilter
from wfilter import Budget, Report
from wfilter.evaluation.run import evaluate
from wfilter.metrics import METRICS


@pytest.mark.parametrize("metric", ["accuracy", "zrf"])
def test_class_without_samples_is_named(wf, test, metric):
    images, labels = test
    with pytest.raises(ValueError, match="data has no samples of class 7"):
        evaluate(wf, (images[labels != 7], labels[labels != 7]), metrics=metric)
    few = (images[labels != 7], labels[labels != 7])
    assert evaluate(wf, few, metrics=metric, classes=[1, 2]).classes == (1, 2)


def test_training_images_without_a_class_are_refused(wf, test, train):
    images, labels = train
    few = (images[labels != 3], labels[labels != 3])
    with pytest.raises(ValueError, match="train has no samples of class 3"):
        evaluate(
            wf, test, metrics="membership", classes=[3], train=few, budget=Budget(train_images=200)
        )


def test_data_without_labels_is_refused(wf, test):
    for form in ([test[0]], DataLoader(TensorDataset(test[0]), 50)):
        with pytest.raises(TypeError, match="data has no labels"):
            evaluate(wf, form)
        with pytest.raises(TypeError, match="data has no labels"):
            evaluate(digits.cnn(), form, classes=3, original=wf.base)
        with pytest.raises(TypeError, match="train has no labels"):
            evaluate(wf, test, train=form, rivals=["ssd"], classes=[3], metrics="accuracy")


def test_data_that_can_be_read_only_once_is_refused(wf, test):
    with pytest.raises(TypeError, match="cannot be read twice"):
        evaluate(wf, iter(digits.batches(test)))


@pytest.mark.parametrize("metric", ["accuracy", "zrf", "sets", "curves"])
def test_data_without_images_is_refused(wf, test, metric):
    nothing = (test[0][:0], test[1][:0])
    for form in ([], nothing, DataLoader(TensorDataset(*nothing), 4)):
        with pytest.raises(ValueError, match="data has no batches with images"):
            evaluate(wf, form, metrics=metric)


@pytest.mark.parametrize("metric", ["accuracy", "zrf"])
def test_output_that_is_not_a_number_is_refused_and_its_method_named(wf, test, metric):
    broken = copy.deepcopy(wf.base)
    with torch.no_grad():
        broken[8].bias[0] = torch.nan
    with pytest.raises(ValueError, match="the output of scrub contains NaN in"):
        evaluate(wf, test, classes=[3], metrics=metric, rivals={"scrub": {3: broken}})
    bad = test[0].clone()
    bad[5] = torch.nan
    with pytest.raises(ValueError, match=r"the output of original contains NaN in 1 of"):
        evaluate(wf, (bad, test[1]), classes=[int(test[1][5])], metrics=metric)


def test_labels_the_model_does_not_know_are_refused(wf, test):
    with pytest.raises(ValueError, match=r"label 10, but the model knows the classes 0\.\.9"):
        evaluate(wf, (test[0], test[1] + 1), metrics="accuracy")


def test_unknown_metrics_and_missing_training_images_are_refused(wf, test):
    with pytest.raises(ValueError, match="'speed'"):
        evaluate(wf, test, metrics=["speed"])
    for name in (name for name, metric in METRICS.items() if metric.needs_train):
        with pytest.raises(ValueError, match=f"{name} need training images: pass train="):
            evaluate(wf, test, metrics=name)
    with pytest.raises(ValueError, match="made here and need training images"):
        evaluate(wf, test, rivals=["ssd"])
    with pytest.raises(ValueError, match="classes is empty"):
        evaluate(wf, test, classes=[])


def test_models_that_fit_no_row_are_refused(wf, test):
    model = digits.trained_cnn()
    with pytest.raises(ValueError, match=r"models for the classes \[5\]"):
        evaluate(wf, test, classes=[3], rivals={"ssd": {5: model}})
    with pytest.raises(ValueError, match="one retrained model for 2 classes"):
        evaluate(wf, test, classes=[3, 4], retrained=model)
    with pytest.raises(TypeError, match=r"expected \{class: model\}"):
        evaluate(wf, test, classes=[3], rivals={"ssd": model})
    with pytest.raises(ValueError, match="say which with classes=, and pass original="):
        evaluate(model, test)
    with pytest.raises(ValueError, match="forgotten one class, but classes= names 2"):
        evaluate(digits.cnn(), test, classes=[3, 4], original=model)


def test_model_that_cannot_be_reset_loses_zrf_only_where_it_was_not_asked_for():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(x * self.scale)

    torch.manual_seed(0)
    wf = wfilter.apply_weight_filtering(Odd(), targets="head.*")
    data = (torch.randn(30, 4), torch.arange(30) % 3)
    report = evaluate(wf, data)
    assert "zrf" in report.conditions["left out"]
    with pytest.raises(ValueError, match="factory="):
        evaluate(wf, data, metrics="zrf")
    assert evaluate(wf, data, metrics="zrf", factory=Odd).value("wfilter", "ZRF") > 0.5


def test_the_old_name_of_classes_works_with_a_warning(wf, test):
    with pytest.warns(DeprecationWarning, match=r"evaluate\(rows=\.\.\.\) is now"):
        old = evaluate(wf, test, metrics="accuracy", rows=[3])
    assert old.rows == evaluate(wf, test, metrics="accuracy", classes=[3]).rows
    with pytest.raises(TypeError, match="both classes= and its old name rows="):
        evaluate(wf, test, rows=[3], classes=[3])


def test_the_old_name_of_a_reports_conditions_works_with_a_warning(wf, test):
    report = evaluate(wf, test, metrics="accuracy", classes=[3], seed=5)
    with pytest.warns(DeprecationWarning, match=r"Report\.facts is now Report\.conditions"):
        assert report.facts == report.conditions
    with pytest.warns(DeprecationWarning, match=r"Report\(facts=\.\.\.\) is now"):
        old = Report(report.columns, report.rows, report.classes, facts={"seed": 5})
    assert old.conditions == {"seed": 5}


def test_files_name_the_conditions_as_before(wf, test):
    report = evaluate(wf, test, metrics="accuracy", classes=[3], seed=5)
    stored = json.loads(report.to_json())
    assert stored["facts"]["seed"] == 5
    assert "conditions" not in stored
    assert Report.from_json(report.to_json()) == report
