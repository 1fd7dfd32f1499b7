"""Untraining without the training set: the images of each arm, and the table made of them."""

import json
import sys

import pytest
import torch

import untraining
import without_training_set as without
from wfilter import data
from wfilter.cli.demo import train_original
from wfilter.data import backbones


@pytest.fixture(scope="module")
def model():
    trained = train_original("cnn-digits", data.load("digits"), epochs=3)
    return trained.requires_grad_(False)


def test_the_halves_share_no_image():
    test = data.load("digits", "test")
    seen, kept = without.halves(test, 50)
    assert len(seen) == len(test) // 2
    assert torch.equal(kept.labels, test.labels[len(seen) : len(seen) + 50])


def test_images_of_another_set_take_the_models_size_and_channels():
    assert without.other_images("digits", backbones.MNIST).shape == (1438, 1, 28, 28)
    assert without.other_images("digits", backbones.CIFAR).shape == (1438, 3, 32, 32)
    framed = without.other_images("digits", backbones.InputFormat(28, 1, (0.1,), (0.5,)), frame=4)
    assert (framed[:, :, :4] == -0.2).all()
    assert framed[:, :, 4:24, 4:24].mean() > framed.mean()


def test_balanced_indices_hold_every_class_found_equally_often():
    classes = torch.tensor([0] * 90 + [3] * 9 + [7])
    pick = without.balanced(classes, torch.Generator().manual_seed(0))
    assert classes[pick].bincount().tolist() == [34, 0, 0, 34, 0, 0, 0, 34]
    assert len(pick[classes[pick] == 3].unique()) == 9


def test_statistics_gaps_vanish_on_the_statistics_of_the_batch_itself():
    norm = torch.nn.BatchNorm2d(3, momentum=1.0)
    images = torch.rand(50, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    norm(images)
    norm.eval()
    with without.statistics_gaps(norm) as gaps:
        norm(images)
        norm(images + 1)
    assert gaps[0] < 1e-3 < gaps[1]
    assert not norm._forward_pre_hooks


def test_synthetic_images_are_taken_for_their_classes_and_stay_in_range(model):
    images = without.synthetic_images(model, backbones.DIGITS, 40, 60, batch_size=20)
    assert images.shape == (40, 1, 8, 8)
    assert 0 <= images.min() < images.max() <= 1
    right = without.answers(model, images) == torch.arange(40) % 10
    assert right.float().mean() > 0.5


def test_an_arm_stores_its_line_and_the_table_its_row(tmp_path, monkeypatch, model):
    from safetensors.torch import save_file

    weights, out = tmp_path / "cnn.safetensors", tmp_path / "lines.jsonl"
    save_file(model.state_dict(), weights)
    sizes = "--steps 2 --shift 1 --test-images 60 --set-images 60 --recipe distill-soft"
    sizes += " --synthetic-images 20 --iterations 2 --other digits --train-images 100"
    command = f"x --model cnn-digits --weights {weights} --out {out} {sizes}"
    monkeypatch.setattr(sys, "argv", command.split())
    without.main()
    lines = [json.loads(line) for line in untraining.lines_of(out)]
    assert [line["arm"] for line in lines] == list(without.ARMS)
    assert [line["images"] for line in lines] == [100, 179, 1438, 20]
    assert {line["test_images"] for line in lines} == {60}
    assert len({line["original"] for line in lines}) == 1
    text = out.with_suffix(".md").read_text()
    assert all(f"| cnn-digits | {line['arm']}: {line['source']} |" in text for line in lines)
    monkeypatch.setattr(sys, "argv", f"x --table --out {out}".split())
    without.main()
    assert out.with_suffix(".md").read_text() == text
