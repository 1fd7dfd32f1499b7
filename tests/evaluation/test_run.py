"""Evaluation: numbers equal an independent computation, methods share a table."""

import copy
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import digits
import wfilter
from helpers import rerouted
from wfilter import Budget, baselines, metrics
from wfilter.data.reading import as_batches, take
from wfilter.evaluation.run import evaluate, make_problem, report_on
from wfilter.metrics.cost import changed_tensors
from wfilter.metrics.method import Draw, Method
from wfilter.metrics.relearn import original_accuracy, trainable
from wfilter.metrics.sets import random_sets

SMALL = Budget(
    test_images=120,
    train_images=200,
    zrf_draws=2,
    relearn_samples=100,
    relearn_epochs=2,
    shots=(1,),
    shot_steps=2,
    curve_images=3,
    curve_steps=4,
)


def counted(module):
    """A list that grows by the size of every batch the module sees."""
    seen = []
    module.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    return seen


class CountedBatches:
    def __init__(self, pair):
        self.batches, self.passes = digits.batches(pair), 0

    def __iter__(self):
        self.passes += 1
        return iter(self.batches)


# ---- accuracies ---------------------------------------------------------------------------------


def test_accuracies_and_confusions_of_all_rows_are_those_of_scikit_learn(wf, test):
    report = evaluate(wf, test, metrics="accuracy")
    images, labels = test
    for row in range(10):
        with torch.no_grad():
            predictions = wf(images, forget=row).argmax(1)
        for name, half in (("Acc_f", labels == row), ("Acc_r", labels != row)):
            expected = accuracy_score(labels[half], predictions[half])
            assert report.rows["wfilter"][name].by_class[row] == pytest.approx(expected)
        expected = confusion_matrix(labels, predictions, labels=range(10)).tolist()
        assert report.details["confusion"]["wfilter"][row] == expected
        routed = report.details["routing"]["wfilter"][row]
        shares = metrics.routing(predictions, labels, row, 10)
        assert routed == {c: float(shares[c]) for c in range(10) if shares[c]}
    assert report.value("wfilter", "Acc_f") < 0.3 < 0.5 < report.value("wfilter", "Acc_r")
    assert report.value("original", "Acc_f") > 0.9


def test_ten_rows_cost_ten_forwards_and_one_reading_of_the_data(wf, test):
    data = CountedBatches(test)
    problem = make_problem(wf, data)
    assert problem.original.mean > 0.9  # the original's own pass
    data.passes, seen = 0, counted(wf.base[0])
    report_on(Method.of_filtered(wf, problem.classes), problem, ["accuracy"])
    assert data.passes == 1
    assert sum(seen) <= 10 * 200 + 8  # and a few images to probe the model


def test_sampled_rows_leave_forget_accuracy_exact_and_are_stated(wf, test):
    whole = evaluate(wf, test, metrics="accuracy")
    some = evaluate(wf, test, metrics="accuracy", budget=Budget(retain_rows=3))
    assert some.rows["wfilter"]["Acc_f"] == whole.rows["wfilter"]["Acc_f"]
    difference = some.value("wfilter", "Acc_r") - whole.value("wfilter", "Acc_r")
    assert 0 < abs(difference) < 0.1
    assert "3 random rows for each image" in some.column("Acc_r").definition


def test_many_classes_are_tried_under_their_own_row_and_four_others():
    torch.manual_seed(0)
    wf = wfilter.apply_weight_filtering(nn.Linear(8, 60), targets="*")
    seen = counted(wf.base)
    report = evaluate(wf, (torch.randn(240, 8), torch.arange(240) % 60), metrics="accuracy")
    assert len(report.rows["wfilter"]["Acc_f"].by_class) == 60
    assert sum(seen) <= 240 * (1 + 1 + 5) + 8  # AUS, the original, own row and four others
    assert "confusion" not in report.details


def test_rows_are_dealt_so_that_all_of_them_are_tried_equally_often():
    labels = torch.arange(60) % 30
    whole = Draw(range(30), 4, seed=0)(labels)
    for image, rows in zip(labels.tolist(), whole.tolist(), strict=True):
        assert len(set(rows)) == 5
        assert rows[0] == image
    others = torch.bincount(whole[:, 1:].flatten(), minlength=30)
    assert int(others.max() - others.min()) <= 2
    draw = Draw(range(30), 4, seed=0)
    assert torch.equal(torch.cat([draw(part) for part in labels.split(7)]), whole)
    assert not torch.equal(Draw(range(30), 4, seed=1)(labels), whole)
    some = Draw([0, 1, 2, 3], 1, seed=0)(torch.tensor([0, 9]))
    assert some[0, 0] == 0
    assert some.shape == (2, 2)  # class 9 has no row here: two others


def test_one_image_of_each_of_many_classes_is_enough():
    torch.manual_seed(0)
    wf = wfilter.apply_weight_filtering(nn.Linear(8, 300), targets="*")
    report = evaluate(wf, (torch.randn(300, 8), torch.arange(300)), metrics="accuracy")
    assert len(report.rows["wfilter"]["Acc_r"].by_class) == 300
    assert "4 random rows for each image, dealt evenly out of 300" in str(report)
    assert report.conditions["budget"]["retain_rows"] == 4
    assert report.conditions["test images"] == {"in all": 300, "of a forgotten class, at least": 1}


def test_any_form_of_the_data_gives_the_same_report(wf, test):
    dataset = TensorDataset(*test)
    dicts = [{"image": x, "label": y} for x, y in digits.batches(test)]
    forms = (test, dataset, DataLoader(dataset, 50), digits.batches(test), dicts)
    tables = [evaluate(wf, form, metrics="accuracy", classes=3).rows for form in forms]
    assert all(table == tables[0] for table in tables)


def test_sets_are_forgotten_as_the_model_itself_forgets_them(wf, test):
    report = evaluate(wf, test, metrics="sets", budget=SMALL)
    images, labels = take(as_batches(test), 10, SMALL.test_images, "data")
    wanted = random_sets(labels, 10, 3, seed=0)
    assert bool((wanted.sum(1) == 3).all())
    with torch.no_grad():
        expected = metrics.set_accuracies(wf(images, forget=wanted), labels, wanted)
    found = report.value("wfilter", "3 Acc_r"), report.value("wfilter", "3 Acc_f")
    assert found == pytest.approx(expected)
    assert report.value("logit_mask", "3 Acc_f") == 0
    assert report.value("logit_mask", "3 Acc_r") > 0.9


# ---- the other metrics --------------------------------------------------------------------------


def test_logit_mask_scores_zero_at_the_output_and_the_originals_probe(wf, test, train):
    names = ["accuracy", "probe", "relearn"]
    report = evaluate(
        wf, test, metrics=names, classes=[3], train=train, rivals=["logit_mask"], budget=SMALL
    )
    assert report.value("logit_mask", "Acc_f") == 0
    for column in ("probe f", "probe r", "NCM f", "NCM r"):
        assert report.value("logit_mask", column) == report.value("original", column)
    assert report.value("logit_mask", "relearn weights") == 0
    assert report.value("random network", "probe r") < report.value("original", "probe r")


def test_model_with_every_gate_closed_looks_like_a_random_network(test):
    base = copy.deepcopy(digits.trained_cnn())
    wf = wfilter.apply_weight_filtering(base, targets="*", init=-1000.0)
    report = evaluate(wf, test, metrics="zrf", classes=[0, 1], budget=SMALL)
    assert report.value("wfilter", "ZRF") > 0.97
    assert report.value("original", "ZRF") < 0.7


def test_exact_gates_are_given_a_chance_to_relearn(wf, test, train):
    assert bool((wf.alphas.abs() >= 1000).all())
    budget = replace(SMALL, relearn_samples=400, relearn_epochs=15, relearn_alpha_rate=0.3)
    problem = make_problem(wf, test, classes=range(10), train=train, budget=budget)

    @torch.no_grad()
    def still_known(row):
        images, labels = problem.of_class(row)
        return float((wf(images, forget=row).argmax(1) == labels).float().mean())

    row = min(range(10), key=still_known)  # which one is best forgotten differs between machines
    before = original_accuracy(problem, row)
    images, untouched = problem.of_class(row)[0], copy.deepcopy(wf)
    with trainable(wf, row) as (forward, alphas):
        assert torch.equal(forward(images), untouched(images, forget=row))
        found = metrics.relearn_time(
            *(wf, row, problem.train, [problem.of_class(row)]),
            target=before / 2,
            forward=forward,
            parameters=[alphas],
            samples=400,
            max_epochs=15,
            lr=0.3,
        )
    assert found.accuracies[0] < before / 2
    assert not found.failed


def test_cost_counts_what_must_be_stored_beside_the_original(wf, test):
    model = copy.deepcopy(wf.base)
    with torch.no_grad():
        model[8].bias += 1
    mask = baselines.logit_mask(wf.base, 3, digits.batches(test))
    assert [t.shape for t in changed_tensors(model, wf.base)] == [(10,)]
    rivals = {"shifted": {3: model}, "mask": {3: mask}}
    report = wfilter.compare(wf, rivals, test, classes=[3], metrics="cost", seconds=20.0)
    assert report.value("wfilter", "stored") == wf.alphas.numel()
    assert report.value("shifted", "stored") == 10 * 10
    assert report.value("mask", "stored") == 10 * 1
    assert report.value("wfilter", "s/class") == 2
    assert report.value("wfilter", "s, all") == 20
    assert report.value("shifted", "s/class") is None


def test_cost_counts_feature_rows_too():
    wf, images = rerouted()
    labels = torch.arange(4) % wf.num_classes
    report = wfilter.evaluate(wf, [(images, labels)], classes=[1], metrics="cost")
    rows = sum(tensor.numel() for tensor in wf.feature_rows.buffers())
    assert report.value("wfilter", "stored") == wf.alphas.numel() + rows > wf.alphas.numel()


def test_every_metric_has_numbers_and_nothing_is_left_changed(wf, test, train):
    before = copy.deepcopy(wf.state_dict())
    state, hard = torch.random.get_rng_state(), wf.hard
    models = {"retrained": {3: baselines.retrained(wf.base, 3, digits.batches(train), epochs=1)}}
    options = {"metrics": "all", "train": train, "budget": SMALL, "classes": [3]}
    report = wfilter.compare(wf, models, test, **options)
    numbers = {name for table in report.tables() for name in table.lines}
    assert numbers == {"original", "retrained", "random network", "wfilter", "logit_mask"}
    missing = [c.name for c in report.columns if report.value("wfilter", c.name) is None]
    assert missing == ["s/class", "s, all"]
    assert wfilter.Report.from_json(report.to_json()) == report
    again = wfilter.compare(wf, models, test, **options)
    for line in report.against(again).lines:
        assert line.column.name == "switch ms" or line.difference == 0
    assert torch.equal(state, torch.random.get_rng_state())
    assert wf.hard == hard
    assert all(torch.equal(before[name], tensor) for name, tensor in wf.state_dict().items())


def test_facts_name_seed_versions_and_machine(wf, test):
    conditions = evaluate(wf, test, metrics="accuracy", classes=3, seed=5).conditions
    assert conditions["seed"] == 5
    assert conditions["versions"]["torch"] == torch.__version__
    assert {"system", "device", "threads"} <= set(conditions["machine"])
    assert conditions["budget"]["test_images"] == Budget().test_images
    assert len(conditions["original"]) == 16


# ---- methods in one table -----------------------------------------------------------------------


def test_rivals_by_name_are_made_timed_and_measured(wf, test, train):
    report = evaluate(
        wf,
        test,
        classes=[3],
        train=train,
        rivals=["random_labels", "retrained"],
        rival_options={"retrained": {"epochs": 2}},
        budget=SMALL,
    )
    assert report.methods == ("original", "retrained", "wfilter", "random_labels")
    assert report.value("random_labels", "Acc_f") < 0.3
    assert report.value("retrained", "Acc_f") == 0
    assert report.value("retrained", "s/class") > 0
    assert report.value("random_labels", "gap") is not None


def test_rivals_by_name_see_shuffled_images_and_the_seed_of_the_evaluation(wf, test, train):
    images, labels = train
    order = labels.sort().indices  # as image folders lie on disk
    ordered = (images[order], labels[order])
    options = {"classes": [3], "metrics": "accuracy", "rivals": ["random_labels"]}
    runs = [evaluate(wf, test, train=ordered, seed=seed, **options) for seed in (0, 0, 1)]
    sorted_batches = evaluate(wf, test, train=digits.batches(ordered), **options)
    worse = sorted_batches.value("random_labels", "Acc_r")  # a list keeps its order
    assert runs[0].value("random_labels", "Acc_r") > worse + 0.03
    first, again, other = (run.details["confusion"]["random_labels"] for run in runs)
    assert first == again
    assert first != other
    dicts = [{"image": x, "label": y} for x, y in digits.batches(train)]
    report = evaluate(wf, test, train=dicts, **options)
    assert report.value("random_labels", "Acc_f") < 0.3


def test_plain_model_is_evaluated_for_the_class_it_has_forgotten(test):
    base = digits.trained_cnn()
    masked = baselines.logit_mask(base, 3, digits.batches(test))
    report = evaluate(masked, test, classes=3, original=base, metrics=["accuracy", "cost"])
    assert report.methods == ("original", "model")
    assert report.value("model", "Acc_f") == 0
    alone = evaluate(base, test, classes=[3, 4], original=base, metrics="accuracy")
    assert alone.methods == ("original",)


def test_models_of_some_classes_only_are_measured_on_those(wf, test):
    models = {c: baselines.logit_mask(wf.base, c, digits.batches(test)) for c in (3, 5)}
    report = evaluate(wf, test, metrics="accuracy", classes=[3, 4], retrained=models)
    assert set(report.rows["retrained"]["Acc_r"].by_class) == {3}
    assert set(report.rows["wfilter"]["Acc_r"].by_class) == {3, 4}
    ours, bar = (report.rows[m]["Acc_r"].by_class[3] for m in ("wfilter", "retrained"))
    forget = report.rows["wfilter"]["Acc_f"].by_class[3]
    assert report.value("wfilter", "gap") == pytest.approx((abs(ours - bar) + forget) / 2)


def test_class_names_choose_rows_and_are_shown(test):
    names = [f"digit {c}" for c in range(10)]
    base = copy.deepcopy(digits.trained_cnn())
    wf = wfilter.apply_weight_filtering(base, class_names=names)
    report = evaluate(wf, test, metrics="accuracy", classes=["digit 3"])
    assert report.classes == (3,)
    assert "digit 3" in str(report)
