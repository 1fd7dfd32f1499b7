"""The default: it looks, goes on where rows lag, and tells the truth about what it reached."""

import dataclasses
import json
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import digits
import wfilter
from helpers import linear, samples
from wfilter.data.batches import InMemory
from wfilter.untraining.auto import AutoRun
from wfilter.untraining.history import Ended, History
from wfilter.untraining.judging import Judgement, verdict
from wfilter.untraining.recipes import AUTO, Auto
from wfilter.untraining.sample import take_sample
from wfilter.untraining.stages import Stage, choose_stages
from wfilter.untraining.stored import recipe_from

SHORT = dataclasses.replace(AUTO, steps=8, stages="soft 0.5, soft 1")


@cache
def plain_cnn() -> nn.Module:
    """Three convolutions without BatchNorm: on these the former default left 36 % known."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        optimiser = torch.optim.Adam(model.parameters(), 5e-3)
        for images, labels in 12 * digits.batches(digits.data()[0]):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimiser.step()
    return model.eval()


def accuracies(wf, images, labels):
    """Retain and forget of every row, and the base model's accuracy, on test images."""
    rows = torch.arange(10).repeat_interleave(len(labels))
    with torch.no_grad():
        logits = torch.cat([wf(images, row) for row in range(10)])
        base = float((wf(images).argmax(1) == labels).float().mean())
    pairs = (logits, labels.repeat(10), rows)
    return wfilter.metrics.retain_accuracy(*pairs), wfilter.metrics.forget_accuracy(*pairs), base


def test_the_default_forgets_every_digit_of_a_plain_cnn_and_says_so():
    wf = wfilter.apply_weight_filtering(plain_cnn(), example_input=torch.zeros(1, 1, 8, 8))
    recipe = dataclasses.replace(AUTO, stages="soft 1", steps=80)
    history = wfilter.untrain(wf, InMemory(*digits.data()[0]), recipe=recipe)
    retain, forget, base = accuracies(wf, *digits.data()[1])
    assert forget.mean <= 0.01
    assert forget.worst <= 0.06
    assert retain.mean >= base - 0.04
    assert set(history.rows) == set(range(10))
    assert history.verdict.startswith(("Every row met the bar", "Acc", *map(str, range(1, 11))))
    wfilter.remove_weight_filtering(wf)


@pytest.mark.parametrize("kind", ["memory", "loader", "list", "no labels", "dicts"])
def test_any_kind_of_batches_will_do(kind):
    x, y = samples()
    given = {
        "memory": InMemory(x, y, 8),
        "loader": DataLoader(TensorDataset(x, y), 8, shuffle=True),
        "list": list(zip(x.split(8), y.split(8))),
        "no labels": list(x.split(8)),
        "dicts": [{"image": a, "label": b} for a, b in zip(x.split(8), y.split(8))],
    }[kind]
    wf = linear()
    history = wfilter.untrain(wf, given, recipe=SHORT)
    assert history.ended in (Ended.MET, Ended.NOT_MET)
    assert history.verdict
    assert wf.alphas.isfinite().all()


def test_images_of_several_labels_are_judged_label_by_label():
    x, y = samples()
    several = nn.functional.one_hot(y, 4) + nn.functional.one_hot((y + 1) % 4, 4) > 0
    history = wfilter.untrain(linear(), InMemory(x, several), recipe=SHORT)
    assert all(0 <= value <= 1 for row in history.rows.values() for value in row)


def test_gates_for_each_element_are_learned_too():
    wf = linear(granularity="element")
    assert wfilter.untrain(wf, InMemory(*samples()), recipe=SHORT).rows


def test_three_images_of_each_of_many_classes_are_solved():
    wf = linear(classes=300)
    x, y = torch.randn(900, 6, generator=torch.Generator().manual_seed(0)), torch.arange(900) % 300
    history = wfilter.untrain(wf, InMemory(x, y))
    assert "rows are solved" in history.choices[0]
    assert "too few to hold any out" in history.choices[1]
    assert history.fixed["stages"] == "linear"


def test_the_recipe_it_settled_on_gives_the_same_alphas_without_looking():
    first, again = linear(), linear()
    history = wfilter.untrain(first, InMemory(*samples()), recipe=SHORT)
    fixed = recipe_from(json.loads(json.dumps(history.fixed)))
    assert len(Stage.parse(fixed.stages)) == 1
    wfilter.untrain(again, InMemory(*samples()), recipe=fixed)
    assert torch.equal(first.alphas, again.alphas)


@pytest.mark.parametrize("after", [1, 5, 8, 12, 15])
def test_an_interrupted_run_resumes_to_the_same_alphas(tmp_path, monkeypatch, after):
    whole, part, resumed = linear(), linear(), linear()
    wfilter.untrain(whole, InMemory(*samples()), recipe=SHORT)
    step, calls = AutoRun._step, []

    def stopping(self):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return step(self)

    file = tmp_path / "run.safetensors"
    with monkeypatch.context() as patched:
        patched.setattr(AutoRun, "_step", stopping)
        history = wfilter.untrain(part, InMemory(*samples()), recipe=SHORT, checkpoint=file)
    assert history.ended is Ended.INTERRUPTED
    history = wfilter.untrain(
        resumed, InMemory(*samples()), recipe=SHORT, checkpoint=file, resume=True
    )
    assert torch.equal(resumed.alphas, whole.alphas)


def test_steps_are_a_limit_and_the_base_model_stays_bit_identical():
    wf = linear()
    before = {k: v.clone() for k, v in wf.base.state_dict().items()}
    history = wfilter.untrain(wf, InMemory(*samples()), steps=3)
    assert len(history.records) == 3
    assert all(torch.equal(v, before[k]) for k, v in wf.base.state_dict().items())


def test_hard_stages_end_with_exact_gates_and_layers_before_theirs_open():
    wf = linear()
    recipe = dataclasses.replace(AUTO, steps=8, stages="hard 0.5")
    wfilter.untrain(wf, InMemory(*samples()), recipe=recipe)
    gates = torch.sigmoid(wf.alphas)
    assert ((gates == 0) | (gates == 1)).all()
    assert not wf.hard


def test_held_out_images_are_never_drawn():
    x, y = samples()
    run = AutoRun(linear(), InMemory(x, y), None, SHORT, 0)
    run.look()
    run._begin(fresh=True)
    run._keep()
    assert 0 < run.sample.held.sum() < len(x)
    for seed in range(20):
        index, blend, _ = run._draw(torch.Generator().manual_seed(seed))
        assert not run.sample.held[index].any()
        assert not run.sample.held[blend.other].any()


def test_given_validation_images_are_what_rows_are_judged_on():
    x, y = samples()
    sample = take_sample(linear(), InMemory(x[:20], y[:20]), InMemory(x[20:], y[20:]), 99, 0.2, 0)
    assert sample.held.sum() == 12
    torch.testing.assert_close(sample.read(torch.tensor([31, 0, 20])), x[[31, 0, 20]])


def test_history_keeps_choices_rows_and_the_fixed_recipe_through_json():
    history = wfilter.untrain(linear(), InMemory(*samples()), recipe=SHORT)
    again = History.from_dict(json.loads(history.to_json()))
    assert again == history


def test_the_verdict_names_classes_that_are_still_known_or_cost_others():
    kept = {0: 0.9, 1: 0.9, 2: 0.5}
    found = Judgement(3, kept, {0: 0.0, 1: 0.25, 2: 0.0}, {0: 0.9, 1: 0.9, 2: 0.9})
    text = verdict(found, AUTO, ["cat", "dog", "owl"].__getitem__, "more images")
    assert "2 of 3 rows fall short: still known: dog (25 %)" in text
    assert "rows of owl (40.0)" in text
    assert text.endswith("Try more images.")
    fine = Judgement(2, {0: 0.9, 1: 0.9}, {0: 0.0, 1: 0.0}, {0: 0.9, 1: 0.9})
    assert verdict(fine, AUTO, str, "").startswith("Every row met the bar: Acc_r 90.0")


def test_stages_follow_the_layers_and_the_classes():
    assert [str(s) for s in choose_stages(20, 10, False)[0]][:2] == ["hard 0.2", "soft 0.2"]
    assert [str(s) for s in choose_stages(1, 10, False)[0]] == ["hard 1", "soft 1"]
    assert [str(s) for s in choose_stages(20, 1000, False)[0]] == ["linear"]
    with pytest.raises(ValueError, match=r"has 'thick 1'. Give 'hard 0.2', 'soft 1.0'"):
        Stage.parse("soft 1, thick 1")


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="bar_worst=3 is a share"):
        Auto("a", bar_worst=3)
    with pytest.raises(ValueError, match="steps=-1 must not be negative"):
        Auto("a", steps=-1)


def test_one_class_bad_labels_and_no_images_are_refused():
    x, y = samples()
    for labels, message in (
        (y[:, None], r"labels have shape \(32, 1\)"),
        (y + 0.5, "is no whole number"),
        (y + 9, "is outside 0..3"),
    ):
        with pytest.raises(ValueError, match=message):
            wfilter.untrain(linear(), InMemory(x, labels), recipe=SHORT)
    with pytest.raises(ValueError, match="train has no batches"):
        wfilter.untrain(linear(), [], recipe=SHORT)


def test_what_is_no_batches_is_refused_with_what_to_give_instead():
    x, y = samples()
    wf = linear()
    with pytest.raises(TypeError, match=r"train is a tensor .* wfilter.InMemory\(images, labels\)"):
        wfilter.untrain(wf, x, y)
    with pytest.raises(TypeError, match=r"Dataset .* one sample at a time. Give torch.utils"):
        wfilter.untrain(wf, TensorDataset(x, y))
    with pytest.raises(TypeError, match=r"images are of type ndarray. Give torch.as_tensor"):
        InMemory(x.numpy(), y.numpy())
