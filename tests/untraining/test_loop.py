"""The loop: what it learns, leaves alone, shares, refuses and reports."""

import copy
import dataclasses
import json
import os
import time

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import digits
import wfilter
from helpers import QUICK, linear, samples, untrained
from wfilter.data.batches import InMemory, split_batch
from wfilter.untraining.loop import Run, untrain
from wfilter.untraining.pairs import Pairs
from wfilter.untraining.recipes import DISTILL_SOFT, PAPER


def test_untraining_forgets_all_digits_in_one_round_and_keeps_the_others():
    (train, test) = digits.data()
    wf = wfilter.apply_weight_filtering(copy.deepcopy(digits.trained_cnn()))
    images, labels = test
    with torch.no_grad():
        original = (wf(images).argmax(1) == labels).float().mean()
        untrain(wf, InMemory(*train, batch_size=64), recipe=DISTILL_SOFT, steps=120)
        own = wf(images, labels).argmax(1) == labels
        other = wf(images, (labels + 1 + torch.arange(len(labels)) % 9) % 10).argmax(1) == labels
    assert own.float().mean() < 0.1
    assert other.float().mean() > original - 0.12


def test_the_base_model_stays_bit_identical():
    wf = linear()
    before = {k: v.clone() for k, v in wf.base.state_dict().items()}
    untrained(wf)
    assert all(torch.equal(v, before[k]) for k, v in wf.base.state_dict().items())


def test_hard_gates_end_exactly_open_or_closed():
    wf, _ = untrained(steps=20)
    gates = torch.sigmoid(wf.alphas)
    assert ((gates == 0) | (gates == 1)).all()
    assert (gates == 0).any()
    assert not wf.hard


@pytest.mark.parametrize("recipe", [QUICK, PAPER, DISTILL_SOFT], ids=lambda r: r.name)
def test_one_seed_gives_one_result(recipe):
    alphas = [untrained(recipe=recipe, seed=s, steps=20)[0].alphas.detach() for s in (5, 5, 6)]
    assert torch.equal(alphas[0], alphas[1])
    assert not torch.equal(alphas[0], alphas[2])


def test_shallow_targets_are_pinned_open_by_depth():
    wf = wfilter.apply_weight_filtering(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), targets="*"
    )
    untrained(wf, recipe=dataclasses.replace(QUICK, depth=0.5))
    assert (wf.gates({0, 1})["0.weight"] == 1).all()


def test_replicas_share_the_prefix_and_equal_plain_repetition():
    torch.manual_seed(0)
    wf = wfilter.apply_weight_filtering(copy.deepcopy(digits.trained_cnn()))
    names = [target.name for target in wf.targets]
    wf.pin_open(names[:2])
    with torch.no_grad():
        for name in names[2:]:
            wf.alpha[name].normal_()
    images, sets = torch.rand(3, 1, 8, 8), torch.rand(12, 10) < 0.3
    torch.testing.assert_close(
        wf.replicated(images, sets), wf(images.repeat_interleave(4, 0), sets)
    )


class Shortcut(nn.Module):
    """Joins what comes before the second layer to what comes after, or counts its samples early."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(6, 8), nn.Linear(8, 8)
        self.head = nn.Linear(16 if kind == "joined" else 8, 4)

    def forward(self, x):
        batch, early = len(x), self.first(x).tanh()
        late = self.second(early).tanh()
        if self.kind == "joined":
            late = torch.cat([early, late], 1)
        if self.kind == "added":
            late = early + late
        if self.kind == "counted":
            late = late.reshape(batch, -1, 8).mean(1)
        return self.head(late)


@pytest.mark.parametrize("pins", ["first.", "first. second. head."])
@pytest.mark.parametrize("kind", ["plain", "joined", "added", "counted"])
def test_replicas_are_run_apart_where_the_model_cannot_share(kind, pins):
    torch.manual_seed(0)
    wf = wfilter.apply_weight_filtering(Shortcut(kind), targets="*")  # all rows equal, as at first
    wf.pin_open([t.name for t in wf.targets if t.name.startswith(tuple(pins.split()))])
    images, labels = torch.rand(3, 6), torch.arange(12) % 5 - 1
    for _ in range(2):
        torch.testing.assert_close(
            wf.replicated(images, labels), wf(images.repeat_interleave(4, 0), labels)
        )
        with torch.no_grad():
            for name in {t.name for t in wf.targets} - set(wf.pinned):
                wf.alpha[name].normal_()
    assert wf.pins.shares is (kind == "plain" and pins == "first.")


def test_alphas_that_change_under_a_pin_are_refused():
    wf = wfilter.apply_weight_filtering(nn.Linear(6, 4), targets="*")
    images, state = torch.rand(2, 6), wf.state_dict()
    state = {name: value.clone() for name, value in state.items()}
    wf.pin_open(["weight"])
    wf(images, forget=1)
    wf.load_state_dict(state)
    for act in (lambda: wf(images, forget=1), lambda: wf.replicated(images, torch.arange(4))):
        with pytest.raises(RuntimeError, match=r"weight is pinned open.* wf\.pin_open\(\[\]\)"):
            act()
    wf.pin_open([])
    wf(images, forget=1)


def test_a_bad_loss_names_the_step_and_keeps_the_last_good_alphas():
    images, labels = samples()
    batches = [(images[:8], labels[:8]), (images[8:16] * float("nan"), labels[8:16])]
    wf = linear()
    good, _ = untrained(data=batches[:1], steps=1)
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 1 \(epoch 0, batch 1\)"):
        untrain(wf, batches, recipe=dataclasses.replace(QUICK, schedule="constant"), steps=2)
    soft = torch.where(wf.alphas > 0, 1.0, -1.0)
    assert torch.equal(soft, torch.where(good.alphas > 0, 1.0, -1.0))
    assert wf.alphas.isfinite().all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "train has no batches"),
        ([(samples()[0], samples()[1] + 9)], r"label 12 is outside 0\.\.3|label \d+ is outside"),
        ([("a", "b")], "a batch of type tuple is not understood"),
    ],
)
def test_bad_data_is_refused(data, message):
    with pytest.raises((ValueError, TypeError), match=message):
        untrained(data=data)


def test_the_paper_recipe_refuses_a_batch_of_one_and_images_without_labels():
    images, labels = samples()
    with pytest.raises(ValueError, match="a batch of 1 cannot be split"):
        untrained(data=[(images[:1], labels[:1])], recipe=PAPER)
    with pytest.raises(ValueError, match="the paper recipe needs labels"):
        untrained(data=[images], recipe=PAPER)


def test_one_class_is_refused():
    wf = wfilter.apply_weight_filtering(nn.Linear(6, 1), targets="*")
    with pytest.raises(ValueError, match="untraining needs at least 2 classes"):
        untrained(wf, data=[(samples()[0], torch.zeros(32).long())])


def test_a_cosine_schedule_needs_an_end():
    with pytest.raises(ValueError, match="a cosine schedule has no end"):
        untrain(linear(), iter([samples()]), recipe=QUICK, epochs=1)


def test_without_labels_the_base_model_chooses_the_row():
    images, _ = samples()
    wf = linear()
    with torch.no_grad():
        answers = wf(images).argmax(1)
    unlabelled, _ = untrained(data=[images], steps=2)
    labelled, _ = untrained(data=[(images, answers)], steps=2)
    assert torch.equal(unlabelled.alphas, labelled.alphas)


def test_dicts_pairs_and_plain_images_are_batches():
    images, labels = samples()
    for batch in ({"image": images, "label": labels}, [images, labels], (images, labels, 3)):
        assert split_batch(batch)[1] is labels
    assert split_batch(images) == (images, None)


def test_multi_label_rows_are_one_of_a_samples_labels():
    images, _ = samples()
    labels = torch.rand(32, 4, generator=torch.Generator().manual_seed(0)) < 0.4
    labels[labels.sum(1) == 0, 0] = True
    wf, history = untrained(data=InMemory(images, labels, 8), steps=8)
    assert len(history.records) == 8
    assert wf.alphas.isfinite().all()


def test_early_stopping_restores_the_best_alphas():
    images, labels = samples()
    recipe = dataclasses.replace(PAPER, patience=2, evaluations=4)
    data, limits = InMemory(images, labels, 8), {"steps": None, "epochs": 30}
    _, history = untrained(data=data, val=[(images, labels)], recipe=recipe, **limits)
    validations = [r.validation for r in history.records if r.validation is not None]
    assert history.stopped == "no improvement in 2 validations"
    assert len(validations) >= 3
    assert min(validations) < validations[-1]


def test_history_is_json():
    _, history = untrained(steps=2)
    facts = json.loads(history.to_json())
    assert facts["recipe"]["name"] == "distill"
    assert len(facts["records"]) == 2


def test_many_classes_take_row_sparse_gradients():
    wf = wfilter.apply_weight_filtering(nn.Linear(6, 300), targets="*")
    images, labels = samples(classes=300)
    before = wf.alphas.detach().clone()
    untrained(
        wf, data=InMemory(images, labels, 8), recipe=dataclasses.replace(DISTILL_SOFT), steps=1
    )
    assert wf.sparse
    touched = (wf.alphas != before).any(1).sum()
    assert 0 < touched <= 8 * DISTILL_SOFT.expansion


ALL_OWN = dataclasses.replace(DISTILL_SOFT, forget_share=1.0)  # as many pairs on either rank


def two_ranks(rank, port, recipe, classes, out):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    wf, _ = untrained(linear(classes), recipe=recipe, steps=4)
    if rank == 0:
        torch.save(wf.alphas.detach(), out)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("recipe", "classes"),
    [
        pytest.param(PAPER, 4, id="paper"),
        pytest.param(ALL_OWN, 4, id="distill-soft"),
        pytest.param(ALL_OWN, 300, id="sparse gradients"),  # so many classes that they are
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_processes_give_the_result_of_one(tmp_path, recipe, classes):
    out, port = tmp_path / "alphas.pt", 20000 + os.getpid() % 20000
    mp.spawn(two_ranks, (port, recipe, classes, str(out)), nprocs=2)
    alone, _ = untrained(linear(classes), recipe=recipe, steps=4)
    torch.testing.assert_close(torch.load(out), alone.alphas.detach(), rtol=1e-4, atol=1e-5)


def test_untraining_inside_forgetting_is_refused():
    wf = linear()
    with wf.forgetting(1), pytest.raises(RuntimeError, match="untrain inside a forgetting block"):
        untrained(wf)


def test_time_is_recorded():
    began = time.perf_counter()
    _, history = untrained(steps=2)
    assert 0 < history.seconds <= time.perf_counter() - began


def test_train_that_is_no_iterable_is_refused():
    wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="weight")
    with pytest.raises(TypeError, match="train is of type int, not batches"):
        wfilter.untrain(wf, 3)


@pytest.mark.parametrize(("blend", "kept"), [(0.5, 0), (0.0, 32)])
def test_base_logits_are_kept_only_of_images_that_stay_the_same(blend, kept):
    recipe = dataclasses.replace(QUICK, blend=blend)
    step = Run(linear(), InMemory(*samples()), None, recipe, 0)
    step.plan(None, 1, None, False, False)
    step._step((*samples(), torch.arange(32)))
    assert len(step.base_logits) == kept


def test_accuracies_of_a_step_leave_blended_images_out():
    step = Run(linear(), InMemory(*samples()), None, QUICK, 0)
    rows = torch.tensor([0, 1, 2, 3])
    pairs = Pairs(torch.arange(4), torch.zeros(4, 4), torch.tensor([False, False, True, True]))
    logits = torch.eye(4)[[0, 3, 2, 0]]  # right, wrong, right, wrong
    is_blended = torch.tensor([False, True, True, False])
    record = step._record(torch.tensor(1.0), logits, pairs, rows, is_blended)
    assert (record.retain_accuracy, record.forget_accuracy) == (1.0, 0.0)
