"""The benchmark of the default: what it measures where classes are many and images few."""

import pytest
import torch

import auto
import problems
import wfilter
from wfilter import data
from wfilter.cli.demo import example_problem


def test_classes_without_a_test_image_are_left_out_of_the_figures():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 30)
    ).eval()
    wf = wfilter.apply_weight_filtering(model, targets="1.*")
    pixels = torch.randint(0, 256, (60, 3, 2, 2), dtype=torch.uint8)
    test = data.ImageSet("drawn", pixels, torch.arange(60) % 20, tuple(map(str, range(30))))
    found = auto.measure(wf, test)
    assert wf.num_classes > auto.FEW_ROWS
    assert all(0 <= value <= 100 for value in found.values())


def test_a_row_counts_with_the_halves_it_has_images_for():
    labels, forget = torch.tensor([0, 0, 1]), torch.tensor([0, 2, 1])
    retain, known = auto.both_halves(torch.tensor([0, 0, 2]), labels, forget)
    assert retain.by_row == {2: 1.0}
    assert known.by_row == {0: 1.0, 1: 0.0}


@pytest.mark.parametrize("name", problems.SMALL)
def test_a_network_trained_on_the_spot_takes_the_images_of_its_dataset(name):
    small = problems.SMALL[name]
    size = {"digits": 8, "mnist": 28}[small.dataset]
    assert small.make().eval()(torch.zeros(2, 1, size, size)).shape == (2, 10)


def test_figures_of_feature_rows_are_those_of_the_model_run_as_a_user_would():
    model, train, test = example_problem(arguments=[])
    test = test.take(torch.arange(120))
    wf = wfilter.apply_weight_filtering(model, example_input=test.batch(torch.arange(1))[0])
    wfilter.untrain(wf, data.batches(train, 64), recipe="reroute")
    found = auto.measure(wf, test)
    images, labels = test.batch(torch.arange(120))
    with torch.no_grad():
        logits = torch.cat([wf(images, forget=row) for row in range(10)])
    forget = torch.arange(10).repeat_interleave(120)
    retain = wfilter.metrics.retain_accuracy(logits, labels.repeat(10), forget)
    assert found["acc_r"] == pytest.approx(100 * retain.mean, abs=0.2)
    assert found["acc_f"] == 0
