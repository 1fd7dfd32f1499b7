"""The default: it looks, goes on where rows lag, and tells the truth about what it reached."""

import copy
import dataclasses
import json
import os
from functools import cache, partial

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import digits
import wfilter
from helpers import linear, samples
from wfilter import explain
from wfilter.cli.untraining import half_shifted
from wfilter.core.forget import as_sets
from wfilter.data.batches import InMemory
from wfilter.metrics import Budget
from wfilter.untraining.auto import AutoRun
from wfilter.untraining.history import Ended, History
from wfilter.untraining.instant import Instant, imagined_features
from wfilter.untraining.judging import Judgement, Sets, judge, verdict
from wfilter.untraining.objectives import Auto
from wfilter.untraining.recipes import AUTO
from wfilter.untraining.reroute import plain_head
from wfilter.untraining.rounds import PAIRS
from wfilter.untraining.sample import Sample, take_sample
from wfilter.untraining.stages import EXPANSION, Outline, Stage, choose_stages
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


@cache
def by_default() -> tuple[wfilter.FilteredModel, History]:
    model = copy.deepcopy(plain_cnn())
    wf = wfilter.apply_weight_filtering(model, example_input=torch.zeros(1, 1, 8, 8))
    return wf, wfilter.untrain(wf, InMemory(*digits.data()[0]))


def test_where_gates_fall_short_all_rows_become_feature_rows_and_meet_the_bar():
    wf, history = by_default()
    retain, forget, base = accuracies(wf, *digits.data()[1])
    assert forget.worst == 0
    assert retain.mean >= base - 0.005
    assert history.ended is Ended.MET
    assert history.verdict.startswith("Every row met the bar, by feature rows (all gates open)")
    assert "soft 0.5, 200 steps" in history.choices[2]
    assert "falls short" in history.choices[2]
    assert history.choices[3].startswith("reroute, num_classes=10")
    assert set(wf.pinned) == {target.name for target in wf.targets}


def test_what_the_default_made_survives_saving_baking_and_its_oracle(tmp_path):
    wf, _ = by_default()
    x, labels = (part[:20] for part in digits.data()[1])
    fresh = copy.deepcopy(plain_cnn())
    again = wfilter.load(wf.save(tmp_path / "f.safetensors"), fresh, example_input=x[:1])
    torch.testing.assert_close(again(x, forget=labels), wf(x, forget=labels))
    assert max(wf.verify(x, forget=labels).values()) < 1e-3
    assert 3 not in wf.bake(forget=3)(x).argmax(1).tolist()


def test_units_are_not_told_where_all_gates_are_open_and_curves_are_left_out():
    wf, _ = by_default()
    x, labels = (part[:60] for part in digits.data()[1])
    for ask in (
        lambda: explain.top_units(wf, 3),
        lambda: explain.similarity(wf),
        lambda: explain.class_curves(wf, x, 3),
    ):
        with pytest.raises(ValueError, match=r"all their gates are open.*'distill-soft' for small"):
            ask()
    budget = Budget(relearn_epochs=1, relearn_samples=4)
    metrics = ["accuracy", "curves", "relearn"]
    options = {"train": (x, labels), "budget": budget, "classes": [3]}
    report = wfilter.evaluate(wf, (x, labels), metrics=metrics, **options)
    assert report.value("wfilter", "Acc_f") == 0
    assert report.value("wfilter", "relearn alphas") is None
    assert report.value("wfilter", "insertion") is None


def test_the_default_starts_over_where_it_ended_with_feature_rows():
    wf, history = by_default()
    fixed = recipe_from(json.loads(json.dumps(history.fixed)))
    assert fixed.stages == "reroute"
    before = {name: value.clone() for name, value in wf.feature_rows.named_buffers()}
    wfilter.untrain(wf, InMemory(*digits.data()[0]), recipe=fixed)
    for name, value in wf.feature_rows.named_buffers():
        torch.testing.assert_close(value, before[name], rtol=1e-3, atol=1e-3)


def separate() -> tuple[wfilter.FilteredModel, torch.Tensor, torch.Tensor]:
    """Each class has units of its own: closing them is all that forgetting takes."""
    model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 4)).requires_grad_(False)
    own = torch.arange(40) % 4
    model[0].weight.copy_(nn.functional.one_hot(own, 4).float())
    model[0].bias.zero_()
    model[2].weight.copy_(nn.functional.one_hot(own, 4).T.float())
    model[2].bias.zero_()
    labels = torch.arange(400) % 4
    noise = torch.rand(400, 4, generator=torch.Generator().manual_seed(0))
    images = 2 * nn.functional.one_hot(labels, 4) + noise
    return wfilter.apply_weight_filtering(model, targets="0.weight"), images, labels


def test_where_gates_meet_the_bar_they_are_the_result():
    wf, images, labels = separate()
    history = wfilter.untrain(wf, InMemory(images, labels))
    assert history.ended is Ended.MET
    assert history.verdict.startswith("Every row met the bar, by gates")
    assert history.fixed["stages"] == "soft 1"
    assert wf.feature_rows is None
    with torch.no_grad():
        assert not (wf(images, forget=labels).argmax(1) == labels).any()


def test_feature_rows_the_model_does_not_obey_are_not_used(monkeypatch):
    monkeypatch.setattr(Instant, "attach", lambda self, rows: False)
    wf = linear()
    recipe = dataclasses.replace(AUTO, steps=8, stages="soft 0.5, reroute")
    history = wfilter.untrain(wf, InMemory(*samples()), recipe=recipe)
    assert wf.feature_rows is None
    assert history.fixed["stages"] == "soft 0.5"
    assert history.choices[-1].endswith("the model answers otherwise than its head alone")


def test_a_sample_shows_its_features_on_the_way_to_what_is_kept():
    x, y = samples()
    run = AutoRun(linear(), InMemory(x, y), None, SHORT, 0)
    run.look()
    run.begin(fresh=True)
    run.keep()
    plain = Instant.look(run.wf, run.sample, run.head)
    torch.testing.assert_close(run.instant.features, plain.features)
    torch.testing.assert_close(run.instant.base, run.base)


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


def test_three_images_of_each_of_many_classes_get_feature_rows():
    wf = linear(classes=300)
    x, y = torch.randn(900, 6, generator=torch.Generator().manual_seed(0)), torch.arange(900) % 300
    history = wfilter.untrain(wf, InMemory(x, y))
    assert "300 classes: feature rows, which take no steps" in history.choices[0]
    assert "too few to hold any out" in history.choices[1]
    assert history.fixed["stages"] == "reroute"
    assert history.ended is Ended.MET
    assert wf.feature_rows is not None


def test_many_classes_without_a_place_for_feature_rows_are_solved():
    x, y = torch.randn(900, 6, generator=torch.Generator().manual_seed(0)), torch.arange(900) % 300
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 300), nn.Softplus())
    wf = wfilter.apply_weight_filtering(model, 300, targets="0.*")
    history = wfilter.untrain(wf, InMemory(x, y))
    assert "rows are solved" in history.choices[0]
    assert "no feature rows: the logits are not what one linear layer makes" in history.choices[0]
    assert history.fixed["stages"] == "linear"


def test_the_recipe_it_settled_on_gives_the_same_alphas_without_looking():
    first, again = linear(), linear()
    history = wfilter.untrain(first, InMemory(*samples()), recipe=SHORT)
    fixed = recipe_from(json.loads(json.dumps(history.fixed)))
    assert len(Stage.parse(fixed.stages)) == 1
    wfilter.untrain(again, InMemory(*samples()), recipe=fixed)
    assert torch.equal(first.alphas, again.alphas)


@pytest.mark.parametrize("stages", ["soft 0.5, soft 1", "soft 0.5, reroute"])
@pytest.mark.parametrize("after", [1, 5, 8, 12, 15])
def test_an_interrupted_run_resumes_to_the_same_rows(tmp_path, monkeypatch, after, stages):
    whole, part, resumed = linear(), linear(), linear()
    recipe = dataclasses.replace(SHORT, stages=stages)
    wanted = wfilter.untrain(whole, InMemory(*samples()), recipe=recipe)
    step, calls = AutoRun._step, []

    def stopping(self):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return step(self)

    file = tmp_path / "run.safetensors"
    with monkeypatch.context() as patched:
        patched.setattr(AutoRun, "_step", stopping)
        history = wfilter.untrain(part, InMemory(*samples()), recipe=recipe, checkpoint=file)
    assert (history.ended is Ended.INTERRUPTED) == (after < len(wanted.records))
    history = wfilter.untrain(
        resumed, InMemory(*samples()), recipe=recipe, checkpoint=file, resume=True
    )
    assert torch.equal(resumed.alphas, whole.alphas)
    assert history.choices == wanted.choices
    assert history.verdict == wanted.verdict
    for name, value in whole.feature_rows.named_buffers() if whole.feature_rows else ():
        assert torch.equal(dict(resumed.feature_rows.named_buffers())[name], value)


def test_rows_that_are_done_leave_the_batch_and_stay_as_they_are():
    wf = linear()
    run = AutoRun(wf, InMemory(*samples()), None, SHORT, 0)
    run.look()
    run.begin(fresh=True)
    run.keep()
    run._step()
    run.best = wf.alphas.detach().clone()
    run.more["moving"] = torch.tensor([False, True, False, False])
    index, _, _ = run._draw(torch.Generator().manual_seed(0))
    assert len(index) == PAIRS // 4 // EXPANSION
    pairs = run._pairs(run.sample.rows[index], torch.Generator().manual_seed(0))
    assert pairs.forget[:, 1].all()
    run.bad, run.position = 1, 0
    run._step()
    changed = (wf.alphas != run.best).any(1)
    assert changed.tolist() == [False, True, False, False]


def test_half_precision_reaches_the_rows_of_full_precision_nearly():
    whole, half = linear(), linear()
    wfilter.untrain(whole, InMemory(*samples()), recipe=SHORT)
    history = wfilter.untrain(half, InMemory(*samples()), recipe=SHORT, amp=True)
    assert history.rows
    torch.testing.assert_close(half.alphas, whole.alphas, rtol=0.2, atol=0.5)


def ranks(rank: int, port: int, recipe: Auto, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    wf = linear()
    history = wfilter.untrain(wf, InMemory(*samples()), recipe=recipe)
    torch.save((wf.alphas.detach(), history.verdict), f"{out}{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("stages", ["soft 0.5, soft 1", "soft 0.5, reroute"])
def test_two_processes_agree_on_alphas_and_verdict(tmp_path, stages):
    recipe = dataclasses.replace(SHORT, stages=stages)
    port = 20000 + os.getpid() % 20000
    mp.spawn(ranks, (port, recipe, str(tmp_path / "rank")), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}") for rank in range(2))
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]
    assert first[1]


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
    run.begin(fresh=True)
    run.keep()
    assert 0 < run.sample.held.sum() < len(x)
    for seed in range(20):
        index, blend, _ = run._draw(torch.Generator().manual_seed(seed))
        assert not run.sample.held[index].any()
        assert not run.sample.held[blend.other].any()


def test_an_image_is_augmented_in_the_same_way_whenever_it_is_read_and_held_ones_never():
    x, y = samples()
    noisy = InMemory(x, y, augment=lambda x, g: x + torch.rand(x.shape, generator=g))
    sample = take_sample(linear(), noisy, None, 99, 0.2, 0)
    whole = sample.read(torch.arange(32))
    torch.testing.assert_close(sample.read(torch.tensor([9, 3, 30])), whole[[9, 3, 30]])
    changed = (whole != x).any(1)
    assert torch.equal(changed, ~sample.held)
    assert 0 < int(changed.sum()) < 32


def test_the_default_meets_the_bar_on_augmented_digits():
    wf = wfilter.apply_weight_filtering(
        copy.deepcopy(plain_cnn()), example_input=torch.zeros(1, 1, 8, 8)
    )
    augment = partial(half_shifted, pad=1)
    recipe = dataclasses.replace(AUTO, stages="reroute")
    images = InMemory(*digits.data()[0], augment=augment)
    assert wfilter.untrain(wf, images, recipe=recipe).ended is Ended.MET


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
    text = verdict(found, AUTO, ["cat", "dog", "owl"].__getitem__, "gates", "more images")
    assert "2 of 3 rows fall short with gates: still known: dog (25 %)" in text
    assert "rows of owl (40.0)" in text
    assert text.endswith("Try more images.")
    fine = Judgement(2, {0: 0.9, 1: 0.9}, {0: 0.0, 1: 0.0}, {0: 0.9, 1: 0.9})
    assert verdict(fine, AUTO, str, "gates", "").startswith(
        "Every row met the bar, by gates: Acc_r 90.0"
    )


def test_a_judgement_counts_doubtful_images_and_sets():
    kept = {0: 0.99, 1: 0.99, 2: 0.99}
    never = {0: 0.0, 1: 0.0, 2: 0.0}
    plain = Judgement(3, kept, never, kept)
    assert plain.is_met(AUTO)
    doubtful = dataclasses.replace(plain, changed={0: 0.0, 1: 0.02, 2: 0.04})
    assert doubtful.lagging(AUTO) == [1, 2]
    fine, poor = Sets(0.98, 0.0, 0.99, 2.5), Sets(0.97, 0.0, 0.99, 2.5)
    assert dataclasses.replace(plain, sets=fine).is_met(AUTO)
    found = dataclasses.replace(plain, sets=poor)
    assert not found.is_met(AUTO)
    assert not found.lagging(AUTO)
    assert "sets of several classes lose more" in verdict(found, AUTO, str, "gates", "")
    known = dataclasses.replace(plain, sets=Sets(0.99, 0.05, 0.99, 2.5))
    assert not known.is_met(AUTO)


def test_a_mask_is_judged_as_losing_nothing_and_the_base_model_as_forgetting_nothing():
    rows = torch.arange(200) % 5
    logits = 3 * nn.functional.one_hot(rows, 5) + torch.rand(200, 5)
    sample = Sample(torch.Tensor, rows, None, torch.ones(200, dtype=torch.bool))

    def answer(index, forget, blend, masked):
        x = logits[index]
        if blend is not None:
            weight = blend.weight[:, None]
            x = weight * x + (1 - weight) * logits[blend.other]
        return x.masked_fill(as_sets(forget, 5), -100.0) if masked else x

    mask = judge(partial(answer, masked=True), sample, logits, 5, 0)
    assert mask.is_met(AUTO)
    assert mask.sets.forget == 0
    base = judge(partial(answer, masked=False), sample, logits, 5, 0)
    assert base.lagging(AUTO) == [0, 1, 2, 3, 4]
    assert base.sets.forget == 1
    assert set(base.changed.values()) == {0.0}


def test_stages_follow_the_units_the_classes_and_the_place_for_feature_rows():
    def chosen(*units, classes=10, **others):
        return [str(stage) for stage in choose_stages(Outline(units, classes, **others))[0]]

    assert chosen(*20 * [512]) == ["hard 0.2", "reroute"]
    assert chosen(*20 * [64]) == ["soft 0.2", "reroute"]
    assert chosen(64) == ["soft 1", "reroute"]
    assert chosen(64, 64, reroutes=False) == ["hard 0.5", "soft 0.5", "hard 1", "soft 1"]
    assert chosen(*20 * [64], classes=1000) == ["reroute"]
    assert chosen(*20 * [64], classes=1000, reroutes=False) == ["linear"]
    assert chosen(64, classes=1000, element=True, reroutes=False) == ["hard 1", "soft 1"]
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
        (0.7 * nn.functional.one_hot(y, 4) + 0.1, r"shares of classes.*labels.argmax\(1\)"),
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


def test_a_class_without_images_keeps_no_other_from_its_feature_row_and_is_named():
    x, labels = digits.data()[0]
    some = labels != 9
    wf = wfilter.apply_weight_filtering(
        copy.deepcopy(plain_cnn()), example_input=torch.zeros(1, 1, 8, 8)
    )
    recipe = dataclasses.replace(AUTO, stages="reroute")
    history = wfilter.untrain(wf, InMemory(x[some], labels[some]), recipe=recipe)
    retain, forget, base = accuracies(wf, *digits.data()[1])
    assert forget.worst == 0
    assert retain.mean >= base - 0.005
    assert history.verdict.startswith("Every row with images met the bar")
    assert history.verdict.endswith("Not judged, for want of images: 9.")
    assert history.ended is Ended.NOT_MET
    assert 9 not in history.rows


def sample_of(images: torch.Tensor, labels: torch.Tensor) -> Sample:
    return Sample(images.__getitem__, labels, None, torch.ones(len(labels), dtype=torch.bool))


def test_features_imagined_for_a_class_without_images_are_answered_as_it():
    wf, _ = by_default()
    head = plain_head(wf, torch.zeros(1, 1, 8, 8))
    instant = Instant.look(wf, sample_of(*digits.data()[0]), head)
    rows = instant.sample.rows
    for bare in range(10):
        known = rows != bare
        imagined = imagined_features(instant.features[known], rows[known], bare, head)
        assert (head(imagined).argmax(1) == bare).float().mean() > 0.8


def test_rows_are_judged_by_the_images_they_learn_from_where_none_is_held_out():
    x, y = samples()
    keep = (y != 3) | (y.eq(3).cumsum(0) <= 3)
    sample = take_sample(linear(), InMemory(x[keep], y[keep]), None, 99, 0.2, 0)
    assert set(sample.rows[sample.held].tolist()) == {0, 1, 2}
    assert int((sample.rows[sample.judged] == 3).sum()) == 3
    history = wfilter.untrain(linear(), InMemory(x[keep], y[keep]), recipe=SHORT)
    assert set(history.rows) == {0, 1, 2, 3}
    assert any("1 classes have none there" in choice for choice in history.choices)
