"""``FilteredModel``: what to forget, laws, state, dtypes."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
import wfilter
from helpers import (
    CLASSES,
    TINY,
    apply,
    close,
    images,
    randomise,
    shuffle_alphas,
    tiny,
)

LABELS = torch.tensor([3, -1, 0, 1])
few = settings(max_examples=15, deadline=None)
labels_of = st.lists(st.integers(-1, CLASSES - 1), min_size=1, max_size=5).map(torch.tensor)
LAW_MODELS = ("cnn", "batch-major windows", "layer run once")


@pytest.fixture(scope="module", params=LAW_MODELS)
def law(request):
    return apply(tiny(request.param), images(1, 3, 8, 8), targets=TINY[request.param][1])


# ---- laws ---------------------------------------------------------------------------------------


@few
@given(labels=labels_of, seed=st.integers(0, 100))
@torch.no_grad()
def test_permuting_samples_permutes_logits(law, labels, seed):
    x = images(len(labels), 3, 8, 8)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    close(law(x[order], forget=labels[order]), law(x, forget=labels)[order])


@few
@given(row=st.integers(0, CLASSES - 1), batch=st.integers(1, 5))
@torch.no_grad()
def test_equal_labels_equal_one_row(law, row, batch):
    x = images(batch, 3, 8, 8)
    close(law(x, forget=torch.full((batch,), row)), law(x, forget=row))


@few
@given(labels=labels_of)
@torch.no_grad()
def test_minus_one_equals_the_base_model(law, labels):
    x = images(len(labels), 3, 8, 8)
    nothing = labels == -1
    close(law(x, forget=labels)[nothing], law(x)[nothing]) if nothing.any() else None
    close(law(x, forget=torch.full_like(labels, -1)), law(x))


@few
@given(labels=labels_of)
@torch.no_grad()
def test_set_of_one_class_equals_the_class(law, labels):
    x = images(len(labels), 3, 8, 8)
    sets = torch.arange(CLASSES) == labels[:, None]
    close(law(x, forget=sets), law(x, forget=labels))


@few
@given(members=st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=4, unique=True))
@torch.no_grad()
def test_order_inside_a_set_does_not_matter(law, members):
    x = images(2, 3, 8, 8)
    close(law(x, forget=set(members)), reference.filtered_copy(law, members)(x))
    close(law(x, forget=set(members)), reference.filtered_copy(law, members[::-1])(x))


# ---- what to forget -----------------------------------------------------------------------------


@torch.no_grad()
def test_class_names_stand_for_indices(tiny_cnn, x):
    wf = apply(tiny_cnn, x, class_names=["cat", "dog", "eel", "fox"])
    assert wf.class_names == ("cat", "dog", "eel", "fox")
    assert torch.equal(wf(x, forget="eel"), wf(x, forget=2))
    assert torch.equal(wf(x, forget={"eel", "cat"}), wf(x, forget={0, 2}))
    assert torch.equal(wf.bake("fox")(x), wf.bake(3)(x))
    with wf.forgetting("dog"):
        inside = wf(x)
    close(inside, wf(x, forget=1))


@torch.no_grad()
def test_gates_have_one_row_per_class_label_or_set(wf):
    assert wf.gates(None)["stem.weight"].tolist() == [1.0] * 6
    torch.testing.assert_close(wf.gates(2)["up.bias"], torch.sigmoid(wf.alpha["up.bias"][2]))
    mixed = wf.gates(LABELS)
    assert mixed["up.weight"].shape == (4, 2)
    assert torch.equal(mixed["up.weight"][1], torch.ones(2, dtype=torch.float64))
    close(mixed["stem.weight"][0], wf.gates(3)["stem.weight"])
    assert wf.gates(torch.eye(4).bool())["stem.weight"].shape == (4, 6)


def test_alpha_is_a_view_of_the_alphas(wf):
    with torch.no_grad():
        wf.alpha["up.weight"].fill_(7.0)
    assert (wf.alphas == 7.0).sum() == CLASSES * 2
    assert wf.trainable_parameters() == [wf.alphas]


@torch.no_grad()
def test_empty_batch_and_single_sample_work(wf, x):
    assert wf(x[:0], forget=LABELS[:0]).shape == (0, CLASSES)
    close(wf(x[:1], forget=LABELS[:1]), reference.logits(wf, x[:1], LABELS[:1]))


@pytest.mark.parametrize("granularity", ["out", "element"])
@pytest.mark.parametrize("name", ["cnn", "attention", "layer run once"])
def test_empty_batch_gives_no_rows_on_every_path(name, granularity, x):
    wf = apply(tiny(name), x, targets="*", granularity=granularity)
    for forget in (LABELS[:0], torch.ones(0, CLASSES).bool(), 1):
        assert wf(x[:0], forget=forget).shape == (0, CLASSES)
    with pytest.raises(ValueError, match="for a batch of 0"):
        wf(x[:0], forget=LABELS)


@torch.no_grad()
def test_closed_gates_silence_and_open_gates_do_nothing(wf, x):
    wf.alphas.fill_(wfilter.core.gates.HARD)
    close(wf(x, forget=LABELS), wf(x))
    wf.alphas.fill_(-wfilter.core.gates.HARD)
    close(wf(x, forget=2), wf.base.head.bias.expand(4, -1))


def test_failed_call_leaves_nothing_behind(wf, x):
    with pytest.raises(ValueError, match="entries for a batch of 4"):
        wf(x, forget=LABELS[:2])
    with pytest.raises(RuntimeError):
        wf(x[:, :2], forget=LABELS)
    assert not torch.overrides._get_current_function_mode_stack()
    with torch.no_grad():
        close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))


# ---- state --------------------------------------------------------------------------------------


def test_state_dict_has_plain_names_and_round_trips(wf, x):
    state = wf.state_dict()
    assert set(state) == {"alphas", *(f"base.{name}" for name in tiny("cnn").state_dict())}
    other = wfilter.apply_weight_filtering(randomise(tiny("cnn"), seed=5), example_input=x)
    other.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(other(x, forget=LABELS), wf(x, forget=LABELS))
    tiny("cnn").load_state_dict(wf.base.state_dict())


@pytest.mark.parametrize("name", ["cnn", "attention", "layer run once"])
@torch.no_grad()
def test_deepcopy_and_pickle_are_independent_and_equal(name, x):
    wf = apply(tiny(name), x, targets="*")
    expected = wf(x, forget=LABELS)
    buffer = io.BytesIO()
    torch.save(wf, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(wf), pickle.loads(pickle.dumps(wf))]
    copies.append(torch.load(buffer, weights_only=False))
    for other in copies:
        assert torch.equal(other(x, forget=LABELS), expected)
        shuffle_alphas(other, seed=7)
        for parameter in other.base.parameters():
            parameter.mul_(1.5)
        close(other(x, forget=LABELS), reference.logits(other, x, LABELS))
        wfilter.remove_weight_filtering(other)
    assert torch.equal(wf(x, forget=LABELS), expected)


def test_averaged_model_copies_the_filters(wf, x):
    averaged = torch.optim.swa_utils.AveragedModel(wf)
    with torch.no_grad():
        wf.alphas.zero_()
        assert not torch.allclose(averaged(x, forget=LABELS), wf(x, forget=LABELS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["cnn", "attention", "batch-major windows", "layer run once"])
@torch.no_grad()
def test_half_precision_models_keep_their_dtype(name, dtype, x):
    expected = reference.logits(apply(tiny(name), x, targets="*"), x, LABELS)
    converted = apply(tiny(name), x, targets="*").to(dtype)
    half = apply(tiny(name).to(dtype), x.to(dtype), targets="*")
    assert half.alphas.dtype == torch.float32  # gates keep their precision
    for wf in (converted, half):
        out = wf(x.to(dtype), forget=LABELS)
        assert out.dtype == dtype
        close(out.double(), expected, tolerance=0.1)
        assert wf(x.to(dtype), forget=2).dtype == dtype
        with wf.forgetting(2):
            assert wf(x.to(dtype)).dtype == dtype
        assert wf.bake(2)(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("name", ["cnn", "attention", "layer run once"])
def test_autocast_gives_what_the_base_model_would(name, x):
    wf = apply(tiny(name).float(), x.float(), targets="*")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = wf(x.float(), forget=LABELS)
        assert out.dtype == wf(x.float()).dtype
    out.float().square().sum().backward()
    assert wf.alphas.grad.dtype == torch.float32
    assert wf.alphas.grad[3].abs().max() > 0
    with torch.no_grad():
        close(out.float(), reference.logits(wf, x.float(), LABELS), tolerance=0.1)


@torch.no_grad()
def test_channels_last_is_kept_and_right(tiny_cnn, x):
    expected = reference.logits(apply(tiny("cnn"), x), x, LABELS)
    wf = apply(tiny_cnn.to(memory_format=torch.channels_last), x)
    seen = []
    wf.base.norm.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    close(wf(x.to(memory_format=torch.channels_last), forget=LABELS), expected)
    assert seen[-1].is_contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def test_move_to_another_dtype_moves_base_model_and_alphas(wf, x):
    wf.float()
    assert wf.alphas.dtype == wf.base.stem.weight.dtype == torch.float32
    assert wf(x.float(), forget=LABELS).dtype == torch.float32


def test_inference_mode_and_grad_mode_can_alternate(wf, x):
    with torch.inference_mode():
        first = wf(x, forget=LABELS)
        with wf.forgetting(1):
            wf(x)
    wf(x, forget=LABELS).sum().backward()
    with wf.forgetting(1):
        wf(x).sum().backward()
    close(wf(x, forget=LABELS).detach(), first.clone())


@torch.inference_mode()
def test_all_of_a_life_can_be_in_inference_mode(x):
    wf = apply(tiny("cnn"), x)
    expected = wf(x, forget=1).clone()
    with wf.forgetting(1):
        close(wf(x), expected)
        wf.alphas.zero_()
        close(wf(x), wf(x, forget=1))


@torch.no_grad()
def test_functional_transforms_see_the_same_model(wf, x):
    def logits(alphas, images=x):
        return torch.func.functional_call(wf, {"alphas": alphas}, (images, LABELS))

    alphas = wf.alphas.detach()
    gradient = torch.func.grad(lambda alphas: logits(alphas).square().sum())(alphas)
    with torch.enable_grad():
        wf(x, forget=LABELS).square().sum().backward()
    close(gradient, wf.alphas.grad)
    several = torch.stack([alphas, alphas / 2])
    close(torch.func.vmap(logits)(several)[1], logits(alphas / 2))
    one = torch.func.vmap(lambda image, label: wf(image[None], forget=label[None])[0])
    close(one(x, LABELS), wf(x, forget=LABELS))
    with pytest.raises(IndexError):
        one(x, torch.tensor([0, -2, 0, 0]))


# ---- reading ------------------------------------------------------------------------------------


def test_verify_reports_the_path_taken_and_a_tiny_difference(wf, x):
    assert wf.verify(x, LABELS).keys() == {"fused"}
    assert wf.verify(x, LABELS)["fused"] < 1e-12
    exact = apply(tiny("layer run once"), x, targets="*")
    assert exact.verify(x, LABELS).keys() == {"exact"}


def test_verify_takes_every_kind_of_forget_but_nothing(wf, x):
    for forget in (2, {1, 2}, torch.eye(4).bool()):
        assert wf.verify(x, forget)["fused"] < 1e-12
    with pytest.raises(TypeError, match="Pass what to forget"):
        wf.verify(x, None)


def test_repr_names_classes_targets_and_units(wf):
    assert "num_classes=4, granularity='out', 5 targets (5 fused), 24 units" in repr(wf)
