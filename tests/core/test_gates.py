"""Gates for a row, for labels and for sets; and every way to ask for them wrongly."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import CLASSES, apply, close
from wfilter.core.gates import (
    HARD,
    ByTarget,
    label_gates,
    row_gates,
    set_gates,
    set_vector,
    slices,
)
from wfilter.core.targets import select_targets

few = settings(max_examples=25, deadline=None)
TINY_FLOATS = st.floats(-30, 30, allow_nan=False)


def alphas(classes=CLASSES, units=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(classes, units, generator=generator, dtype=torch.float64)


@few
@given(st.lists(st.lists(TINY_FLOATS, min_size=3, max_size=3), min_size=2, max_size=4))
def test_gates_are_the_sigmoid_of_the_row(rows):
    given_alphas = torch.tensor(rows, dtype=torch.float64)
    expected = [[1 / (1 + math.exp(-value)) for value in row] for row in rows]
    gates = label_gates(given_alphas, torch.arange(len(rows)))
    torch.testing.assert_close(gates, torch.tensor(expected, dtype=torch.float64))


def test_label_minus_one_gives_gates_of_exactly_one():
    gates = label_gates(alphas(), torch.tensor([-1, 0, -1]))
    assert torch.equal(gates[[0, 2]], torch.ones(2, 7, dtype=torch.float64))


def test_empty_set_gives_gates_of_exactly_one():
    gates = set_gates(alphas(), torch.zeros(2, CLASSES, dtype=torch.bool))
    assert torch.equal(gates, torch.ones(2, 7, dtype=torch.float64))


@few
@given(st.lists(st.booleans(), min_size=CLASSES, max_size=CLASSES))
def test_gates_of_a_set_are_the_product_over_its_classes(chosen):
    chosen = torch.tensor(chosen)
    expected = torch.sigmoid(alphas())[chosen].prod(0)
    torch.testing.assert_close(set_gates(alphas(), chosen[None])[0], expected)
    torch.testing.assert_close(set_gates(alphas(), chosen), expected)


def test_hard_alphas_are_exactly_closed_and_open_in_every_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        hard = torch.tensor([[-HARD, HARD], [HARD, HARD]], dtype=dtype)
        expected = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=dtype)
        assert torch.equal(label_gates(hard, torch.tensor([0, 1])), expected)
        assert torch.equal(set_gates(hard, torch.eye(2).bool()), expected)


def test_sparse_and_dense_gradients_of_labels_agree():
    given_alphas = alphas().requires_grad_()
    labels = torch.tensor([2, -1, 2])
    (dense,) = torch.autograd.grad(label_gates(given_alphas, labels).sum(), given_alphas)
    (sparse,) = torch.autograd.grad(
        label_gates(given_alphas, labels, sparse=True).sum(), given_alphas
    )
    assert sparse.is_sparse
    torch.testing.assert_close(sparse.to_dense(), dense)


def test_label_minus_one_sends_no_gradient_to_any_row():
    given_alphas = alphas().requires_grad_()
    gates = label_gates(given_alphas, torch.tensor([-1, -1]))
    assert not torch.autograd.grad(gates.sum(), given_alphas)[0].any()


def test_by_target_gives_views_in_order():
    targets = select_targets(nn.Linear(3, 2), "*")
    whole = torch.zeros(5, 4)
    by = ByTarget(targets, whole)
    assert list(by) == ["weight", "bias"]
    assert len(by) == 2
    by["bias"][1] = 1.0
    assert whole[1].tolist() == [0, 0, 1, 1]
    assert slices(targets) == {"weight": slice(0, 2), "bias": slice(2, 4)}
    assert "bias: (5, 2)" in repr(by)


# ---- bad input, at the public door --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32, torch.float64])
def test_labels_of_another_dtype_are_refused(wf, x, dtype):
    name = str(dtype).removeprefix("torch.")
    message = rf"forget has dtype {name}\. Labels must be int64 \(use labels\.long\(\)\)"
    with pytest.raises(TypeError, match=message):
        wf(x, forget=torch.zeros(4, dtype=dtype))


@pytest.mark.parametrize("length", [4, CLASSES, 3])
def test_bool_vector_is_refused_also_when_as_long_as_the_batch_or_the_classes(wf, x, length):
    message = r"forget is a bool tensor of shape \(\d,\)\.\nA set of classes per sample needs shape"
    with pytest.raises(ValueError, match=message):
        wf(x, forget=torch.ones(length, dtype=torch.bool))
    with pytest.raises(ValueError, match=message):
        wf.gates(torch.ones(length, dtype=torch.bool))


def test_sets_of_the_wrong_shape_are_refused(wf, x):
    for shape in ((3, CLASSES), (4, CLASSES + 1), (4, CLASSES, 1)):
        with pytest.raises(ValueError, match=r"needs shape \(4, 4\)"):
            wf(x, forget=torch.zeros(shape, dtype=torch.bool))


def test_labels_of_the_wrong_length_are_refused(wf, x):
    message = r"forget has 8 entries for a batch of 4\. Pass one label per sample, or one int for"
    with pytest.raises(ValueError, match=message):
        wf(x, forget=torch.zeros(8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"for a batch of 4"):
        wf(x, forget=torch.zeros(4, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"one int for all \(a set of classes for all: \{1, 2\}\)"):
        wf(x, forget=[1, 2])


@torch.no_grad()
@pytest.mark.parametrize(
    "forget",
    [
        np.array([3, -1, 0, 1]),
        [3, -1, 0, 1],
        (3, -1, 0, 1),
        ["fox", -1, "cat", np.int64(1)],
        [torch.tensor(3), -1, 0, 1],
    ],
    ids=repr,
)
def test_labels_may_be_arrays_and_lists(tiny_cnn, x, forget):
    wf = apply(tiny_cnn, x, class_names=["cat", "dog", "eel", "fox"])
    close(wf(x, forget=forget), wf(x, forget=torch.tensor([3, -1, 0, 1])))


@torch.no_grad()
@pytest.mark.parametrize("forget", [np.int64(2), np.uint8(2), torch.tensor(2), {np.int32(2)}])
def test_one_class_may_be_a_numpy_integer_or_a_tensor_without_axes(wf, x, forget):
    close(wf(x, forget=forget), wf(x, forget=2))


def test_sets_may_be_a_numpy_matrix_and_other_dtypes_are_refused_alike(wf, x):
    sets = np.eye(4, dtype=bool)
    close(wf(x, forget=sets), wf(x, forget=torch.from_numpy(sets)))
    for bad in (np.zeros(4), np.zeros(4, np.int32), np.zeros(4, np.uint8)):
        with pytest.raises(TypeError, match="Labels must be int64"):
            wf(x, forget=bad)
    with pytest.raises(TypeError, match="is not understood"):
        wf(x, forget=[True, False, True, False])
    with pytest.raises(ValueError, match="forget is a bool tensor of shape"):
        wf(x, forget=np.array([True, False, True, False]))


@pytest.mark.parametrize("bad", [CLASSES, 12, -2, -100])
def test_labels_out_of_range_are_refused(wf, x, bad):
    labels = torch.tensor([0, bad, 1, -1])
    message = (
        rf"forget={bad} is outside 0\.\.3: these filters were made for 4 classes\. "
        "Use -1 for a sample that forgets nothing"
    )
    with pytest.raises(ValueError, match=message):
        wf(x, forget=labels)
    with pytest.raises(ValueError, match=message):
        wf.gates(labels)


@pytest.mark.parametrize("bad", [CLASSES, -2, -CLASSES])
def test_labels_out_of_range_are_refused_by_the_gather_too(bad):
    with pytest.raises(IndexError):
        label_gates(torch.zeros(CLASSES, 3), torch.tensor([0, bad]))


@pytest.mark.parametrize("bad", [CLASSES, 12, -1, -2])
def test_one_class_out_of_range_is_refused(wf, x, bad):
    for call in (lambda: wf(x, forget=bad), lambda: wf.bake(bad), lambda: wf(x, forget={0, bad})):
        with pytest.raises(ValueError, match=rf"forget={bad} is outside 0\.\.3"):
            call()


@pytest.mark.parametrize("bad", [1.0, True, [0, 1, 2, 3.0], [{1}] * 4, {1.5}, {True}, {"a": 1}])
def test_what_is_not_a_class_or_a_set_is_a_type_error(wf, x, bad):
    with pytest.raises(TypeError, match=r"forget=.* is not understood"):
        wf(x, forget=bad)


def test_class_name_without_class_names_is_refused(wf, x):
    with pytest.raises(ValueError, match="forget='cat' is a class name, but these filters know"):
        wf(x, forget="cat")


def test_unknown_class_name_lists_the_known_ones(tiny_cnn, x):
    wf = apply(tiny_cnn, x, class_names=["cat", "dog", "eel", "fox"])
    with pytest.raises(ValueError, match="forget='cow' is not one of cat, dog, eel, fox"):
        wf(x, forget="cow")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_alphas_that_are_not_finite_are_refused_with_their_target(wf, x, value):
    with torch.no_grad():
        wf.alpha["depthwise.weight"][2, 1] = value
    message = r"the alphas of depthwise\.weight contain NaN or infinity"
    calls = (
        lambda: wf(x, forget=2),
        lambda: wf(x, forget=torch.tensor([2, 0, 0, 0])),
        lambda: wf(x, forget=torch.eye(4).bool()),
        lambda: wf.bake(2),
        lambda: wf.save("never.safetensors"),
        lambda: wf.forgetting(2).__enter__(),
    )
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert torch.equal(wf(x), wf.base(x))


def test_sets_are_right_under_half_precision_autocast():
    """A closed gate's logarithm does not fit float16, where 0 * -inf would be NaN."""
    alphas = torch.full((3, 4), -7e4)
    sets = torch.tensor([[False, False, False], [True, False, False]])
    with torch.autocast("cpu", dtype=torch.float16):
        found = set_gates(alphas, sets)
    assert torch.equal(found, torch.tensor([[1.0] * 4, [0.0] * 4]))


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("rows", [(), (2,), (0, 2)])
def test_gates_of_rows_are_those_of_their_set(rows, hard):
    alphas = torch.randn(4, 6, dtype=torch.float64)
    chosen = set_vector(rows, 4, alphas.device)
    torch.testing.assert_close(
        row_gates(alphas, rows, hard=hard), set_gates(alphas, chosen, hard=hard)
    )


@torch.no_grad()
def test_numpy_names_and_arrays_without_axes_mean_what_they_say(tiny_cnn, x):
    wf = apply(tiny_cnn, x, class_names=["ant", "bee", "cow", "dog"])
    for some in (x, x[:1]):
        close(wf(some, forget=np.array(2)), wf(some, forget=2))
    names = ["dog", "bee", "ant", "bee"]
    close(wf(x, forget=np.array(names)), wf(x, forget=names))
