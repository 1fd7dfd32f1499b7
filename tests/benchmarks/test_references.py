import argparse
import copy
import hashlib
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch.nn.functional import interpolate

import references
import starts
import training
from wfilter import data, zoo


@pytest.fixture(autouse=True)
def _checkpoints_at_every_step(monkeypatch):
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0)


def run(monkeypatch, out, *options):
    monkeypatch.setattr(sys, "argv", ["references.py", "--out", str(out), *options])
    references.main()


def train(monkeypatch, out, *more):
    few = ["--epochs", "2", "--batch-size", "64", "--limit", "300"]
    run(monkeypatch, out, "--model", "cnn-digits", "--data", "digits", *few, *more)


def test_an_interrupted_training_ends_with_the_weights_of_an_uninterrupted_one(
    monkeypatch, tmp_path
):
    train(monkeypatch, tmp_path / "whole")
    steps, plain_step = [], training.train_step

    def stop_after_six(*args):
        if len(steps) == 6:
            raise KeyboardInterrupt
        steps.append(1)
        return plain_step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(training, "train_step", stop_after_six)
        with pytest.raises(KeyboardInterrupt):
            train(monkeypatch, tmp_path / "parts")
    train(monkeypatch, tmp_path / "parts")
    whole, parts = (
        load_file(tmp_path / name / "cnn-digits-s0.safetensors") for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_the_log_line_holds_accuracy_and_settings_and_the_weights_load(monkeypatch, tmp_path):
    train(monkeypatch, tmp_path)
    (line,) = map(json.loads, (tmp_path / "references.jsonl").read_text().splitlines())
    assert 0 <= line["worst_class"] <= line["accuracy"] <= 100
    assert line["settings"]["lr"] == references.OPTIMISERS["sgd"]["lr"]
    assert {"command", "seed", "commit", "environment", "seconds"} <= line.keys()
    zoo.load_weights(zoo.create("cnn-digits"), tmp_path / "cnn-digits-s0.safetensors")


def test_a_finished_training_is_not_repeated_and_other_settings_are_refused(
    monkeypatch, tmp_path, capsys
):
    train(monkeypatch, tmp_path)
    train(monkeypatch, tmp_path)
    assert "nothing to do" in capsys.readouterr().out
    (tmp_path / "cnn-digits-s0.safetensors").unlink()
    with pytest.raises(SystemExit, match="other settings"):
        train(monkeypatch, tmp_path, "--lr", "0.01")


def test_a_vit_starts_from_one_of_half_its_width_as_two_copies_that_answer_alike(tmp_path):
    half, whole = zoo.create("vit_tiny-mnist"), zoo.create("vit_small-mnist")
    save_file(half.state_dict(), tmp_path / "half.safetensors")
    assert starts.start_from(whole, tmp_path / "half.safetensors").endswith("fresh: nothing")
    with torch.no_grad():  # what couples the copies is fresh: without it both are the half
        for name, tensor in whole.named_parameters():
            if tensor.ndim == 2 and "head" not in name:
                for block in tensor.chunk(3 if "qkv" in name else 1):
                    rows, columns = (size // 2 for size in block.shape)
                    block[:rows, columns:] = block[rows:, :columns] = 0
    images = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(whole(images), half(images))


def test_an_imagenet_vit_sees_a_small_patch_as_it_would_the_enlarged_one(tmp_path):
    large = VisionTransformer(embed_dim=192, depth=12, num_heads=3, num_classes=10).eval()
    save_file(large.state_dict(), tmp_path / "large.safetensors")
    small = zoo.create("vit_tiny-cifar")
    starts.start_from(small, tmp_path / "large.safetensors")
    patch = torch.rand(1, 3, 4, 4)
    enlarged = interpolate(patch, (16, 16), mode="bicubic")
    seen, expected = small.patch_embed.proj(patch), large.patch_embed.proj(2 * enlarged - 1)
    torch.testing.assert_close(seen, expected)


@pytest.mark.parametrize(("size", "products"), [(4, 2), (8, 0)])
def test_convolutions_as_products_give_the_same_answers_and_gradients(monkeypatch, size, products):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3, stride=2, padding=1),
        torch.nn.Conv2d(5, 4, 3, stride=2, padding=1, bias=False),
        torch.nn.Conv2d(4, 6, 3, padding=1),
    ).double()
    product = copy.deepcopy(plain)
    training.as_products(product)
    images = torch.rand(2, 3, size, size, dtype=torch.float64)
    answers, called, convolve = [plain(images)], [], torch.nn.Conv2d.forward
    monkeypatch.setattr(
        torch.nn.Conv2d, "forward", lambda self, x: called.append(1) or convolve(self, x)
    )
    answers.append(product(images))
    assert len(called) == 3 - products
    torch.testing.assert_close(answers[1], answers[0])
    for answer in answers:
        answer.square().sum().backward()
    for ours, theirs in zip(product.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_hardest_images_are_those_the_start_is_least_sure_of(monkeypatch, tmp_path):
    digits = data.load("digits", "train").take(torch.arange(300))
    train(monkeypatch, tmp_path / "first")
    start = tmp_path / "first" / "cnn-digits-s0.safetensors"
    model = zoo.load_weights(zoo.create("cnn-digits"), start)
    chosen = training.hardest(model, digits, 100)
    images, labels = digits.batch(torch.arange(300))
    loss = torch.nn.functional.cross_entropy(model(images), labels, reduction="none")
    rest = torch.ones(300, dtype=torch.bool).index_fill(0, chosen, False)
    assert loss[chosen].min() >= loss[rest].max()
    seen, fit = [], references.fit
    monkeypatch.setattr(references, "fit", lambda *args: seen.append(args[1].labels) or fit(*args))
    train(monkeypatch, tmp_path, "--start", str(start), "--hardest", "100")
    assert torch.equal(seen[0], labels[chosen])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hardest", "100"], "asks the weights of --start"),
        (["--hardest", "0", "--start", "a.safetensors"], "less than one batch of 64 images"),
    ],
)
def test_hardest_images_that_nobody_can_choose_are_refused(
    monkeypatch, capsys, tmp_path, options, message
):
    with pytest.raises(SystemExit):
        train(monkeypatch, tmp_path, *options)
    assert message in capsys.readouterr().err


def test_warped_images_differ_from_each_other_and_stay_recognisable():
    square = torch.zeros(1, 1, 28, 28)
    square[..., 6:22, 10:18] = 1
    warped = training.warped(square.expand(50, -1, -1, -1), torch.Generator().manual_seed(0))
    assert (warped[0] - warped[1]).abs().max() > 0.5
    assert warped.min() >= 0
    assert warped.max() <= 1
    assert (warped.sum((1, 2, 3)) / square.sum() - 1).abs().max() < 0.25  # by at most 1 / 0.9^2
    torch.testing.assert_close(warped[:, 0, 14, 14], torch.ones(50))  # the centre stays


def test_half_precision_training_ends_near_the_same_loss():
    losses = {}
    images, labels = torch.rand(32, 1, 8, 8), torch.randint(10, (32,))
    for bfloat16 in (False, True):
        torch.manual_seed(0)
        model = zoo.create("cnn-digits").train()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        steps = [training.train_step(model, images, labels, optimiser, bfloat16) for _ in range(5)]
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        losses[bfloat16] = steps[-1]
    assert abs(losses[True] - losses[False]) < 0.05 * losses[False]
    assert losses[True] != losses[False]


def test_images_are_halved_in_the_first_epochs_only(monkeypatch, tmp_path):
    sizes = []

    def noting(model, images, labels, optimiser, *rest):
        sizes.append(images.shape[-1])
        optimiser.step()
        return 0.0

    monkeypatch.setattr(training, "train_step", noting)
    train(monkeypatch, tmp_path, "--half", "1")
    assert sizes == [4] * 4 + [8] * 4


def test_classes_left_out_are_never_seen_and_name_the_file(monkeypatch, tmp_path):
    seen, plain_step = set(), training.train_step

    def noting(model, images, labels, *rest):
        seen.update(labels.tolist())
        return plain_step(model, images, labels, *rest)

    monkeypatch.setattr(training, "train_step", noting)
    train(monkeypatch, tmp_path, "--without", "0", "3")
    assert seen == {1, 2, 4, 5, 6, 7, 8, 9}
    assert (tmp_path / "cnn-digits-s0-without0-without3.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--without", "12"], "classes are 0 to 9"),
        (["--without", "3", "--start", "resnet18-digits.safetensors"], "has seen a class"),
        (["--without", "1", "3", "--start", "cnn-digits-s0-without3.safetensors"], "has seen"),
    ],
)
def test_a_class_to_leave_out_that_is_none_or_was_seen_is_refused(
    monkeypatch, tmp_path, capsys, options, message
):
    with pytest.raises(SystemExit):
        train(monkeypatch, tmp_path, *options)
    assert message in capsys.readouterr().err


def test_a_start_that_lacks_the_classes_serves_and_their_order_does_not_matter(
    monkeypatch, tmp_path, capsys
):
    train(monkeypatch, tmp_path, "--without", "3", "1")
    train(monkeypatch, tmp_path, "--without", "1", "3", "3")
    assert "nothing to do" in capsys.readouterr().out
    start = str(tmp_path / "cnn-digits-s0-without1-without3.safetensors")
    train(monkeypatch, tmp_path, "--without", "3", "--start", start)
    assert (tmp_path / "cnn-digits-s0-without3.safetensors").exists()


def test_each_class_is_left_out_in_turn_by_the_recipe_of_the_original(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, "--recipe", "digits", "--each", "3", "5", "--epochs", "4")
    lines = list(map(json.loads, (tmp_path / "references.jsonl").read_text().splitlines()))
    assert [line["settings"]["without"] for line in lines] == [[], [3], [5]]
    assert {line["settings"]["pad"] for line in lines} == {references.RECIPES["digits"]["pad"]}
    assert {line["settings"]["epochs"] for line in lines} == {4}  # given anew
    for line in lines[1:]:
        (left_out,) = line["settings"]["without"]
        assert line["per_class"][left_out] == 0
        assert line["accuracy_retain"] > 85
        assert line["worst_class"] > 0  # of the classes it saw
        written = (tmp_path / line["file"]).read_bytes()
        assert line["sha256"] == hashlib.sha256(written).hexdigest()


def test_lines_are_stored_once_with_a_table_beside_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(references, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    train(monkeypatch, tmp_path)
    train(monkeypatch, tmp_path, "--without", "3")
    for _ in range(2):
        run(monkeypatch, tmp_path, "--collect")
    assert "0 lines added" in capsys.readouterr().out
    stored = (tmp_path / "results" / "references.jsonl").read_text()
    assert stored == (tmp_path / "references.jsonl").read_text()
    table = (tmp_path / "results" / "references.md").read_text().splitlines()
    assert table[-1].startswith("| cnn-digits-s0.safetensors |")
    original = json.loads(stored.splitlines()[0])["per_class"]
    kept = [value for label, value in enumerate(original) if label != 3]
    assert f"| {sum(kept) / 9:.2f} |" in table[-2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "1"], "give --recipe, or both --model and --data"),
        (["--recipe", "digits", "--each", "3", "--without", "5"], "no --without, no --start"),
        (["--recipe", "digits", "--each", "12"], "classes are 0 to 9"),
    ],
)
def test_trainings_that_cannot_be_meant_are_refused(
    monkeypatch, tmp_path, capsys, options, message
):
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, *options)
    assert message in capsys.readouterr().err


def test_whitened_patches_are_uncorrelated_and_the_layer_stays_as_it_is():
    torch.manual_seed(0)
    pixels = torch.randint(256, (40, 3, 8, 8)).cumsum(3) // 8  # neighbours resemble each other
    images = data.ImageSet("noise", pixels.to(torch.uint8), torch.zeros(40).long(), ("a", "b"))
    model = zoo.create("cnn-cifar")
    training.whiten(model, images)
    answers = torch.nn.functional.conv2d(images.batch(torch.arange(40))[0], model[0].weight)
    covariance = answers[:, :12].transpose(0, 1).flatten(1).cov()
    values = covariance.diagonal()
    assert ((values > 0.5) & (values < 1.001)).all()  # below 1 by the floor
    assert (covariance - values.diag()).abs().max() < 1e-3
    torch.testing.assert_close(answers[:, 12:], -answers[:, :12])
    assert not model[0].weight.requires_grad
    trained = {p for group in optimiser_groups(model) for p in group["params"]}
    assert model[0].weight not in trained
    assert model[0].bias in trained
    with pytest.raises(SystemExit, match="the first convolution has 32"):
        training.whiten(zoo.create("cnn-mnist"), data.load("digits", size=28))


def optimiser_groups(model):
    settings = {"optimiser": "sgd", "lr": 0.1, "weight_decay": 5e-4}
    return training.make_optimiser(model, argparse.Namespace(**settings)).param_groups


def test_two_epochs_in_a_row_show_both_sides_of_every_image():
    digits = data.load("digits", "test").take(torch.arange(50))
    first, second, third = (training.mirrored(digits, epoch, seed=1) for epoch in range(3))
    turned = (first.images != digits.images).flatten(1).any(1)
    assert 10 < turned.sum() < 40
    assert torch.equal(first.images, second.images.flip(3))
    assert torch.equal(first.images, third.images)
    assert torch.equal(first.labels, digits.labels)
