"""Feature rows as a part of a filtered model: every way of running it has the same answer."""

import copy

import pytest
import torch
import torch._dynamo
from torch import nn

import wfilter
from helpers import LABELS, SETS, close, images, rerouted
from wfilter.core.oracle import one_at_a_time


@pytest.mark.parametrize("forget", [LABELS, SETS])
@pytest.mark.parametrize("name", ["cnn", "bypassed module"])
@pytest.mark.parametrize("granularity", ["out", "element"])
def test_a_mixed_batch_equals_one_sample_at_a_time(name, granularity, forget):
    wf, x = rerouted(name, granularity=granularity)
    close(wf(x, forget=forget), one_at_a_time(wf, x, forget))
    assert max(wf.verify(x, forget).values()) < 1e-9


def test_rows_change_the_answer_beside_gates():
    wf, x = rerouted()
    before = wf(x, forget=LABELS)
    wf.feature_rows = None
    after = wf(x, forget=LABELS)
    assert torch.equal(before[1], after[1])  # this sample forgets nothing
    assert not torch.allclose(before, after)


def test_forgetting_nothing_is_the_base_model_bit_for_bit():
    wf, x = rerouted()
    assert torch.equal(wf(x), wf.base(x))
    assert torch.equal(wf.features(x), wf.features(x, forget=torch.full((4,), -1)))


def test_features_are_the_edited_ones_that_the_logits_come_from():
    wf, x = rerouted()
    features = wf.features(x, forget=SETS)
    head = wf.base.get_submodule(wf.feature_rows.head.rpartition(".")[0])
    plain = head(features)
    logits = wf(x, forget=SETS)
    rows, wf.feature_rows = wf.feature_rows, None
    untouched = wf.features(x, forget=SETS)
    if not any(t.name.startswith("head") for t in wf.targets):
        is_forgotten, route = rows.chosen(head(untouched), SETS)
        unsure = torch.where(is_forgotten, rows.sureness[route].unsqueeze(1) * plain, plain)
        close(logits[~SETS], unsure[~SETS])
    assert torch.equal(features[1], untouched[1])
    assert not torch.allclose(features, untouched)


def test_a_block_equals_the_argument_for_the_model_and_its_base():
    wf, x = rerouted()
    expected = wf(x, forget={1, 3})
    with wf.forgetting({1, 3}):
        close(wf(x), expected)
        close(wf.base(x), expected)
        close(wf.features(x), wf.features(x, forget={1, 3}))


def test_the_head_alone_is_rerouted_in_a_block_too():
    wf, x = rerouted()
    name = wf.feature_rows.head.rpartition(".")[0]
    features = wf.features(x)
    chosen = torch.tensor([False, False, True, False])
    head = wf.base.get_submodule(name)
    with wf.forgetting(2):
        inside = head(features)
    assert not bool((inside.argmax(1) == 2).any())
    close(inside.softmax(1)[:, chosen], torch.zeros(4, 1, dtype=torch.float64) + 0.0)


def test_compiled_forwards_are_one_graph_and_agree():
    wf, x = rerouted()
    torch._dynamo.reset()
    with torch.no_grad():
        expected = [wf(x, forget=LABELS), wf(x, forget=SETS)]
        wf.compile(backend="aot_eager", fullgraph=True)
        for forget, answer in zip((LABELS, SETS), expected):
            close(wf(x, forget=forget), answer)
        assert torch.equal(wf(x), wf.base(x))


@pytest.mark.parametrize("forget", ["labels", "sets"])
def test_exported_programs_have_the_rows(forget, tmp_path):
    wf, _ = rerouted()
    wf = wf.float()
    found = wfilter.export(wf, tmp_path / "a.pt2", forget=forget, example_input=images(1, 3, 8, 8))
    program = torch.export.load(found.path).module()
    x = images(4, 3, 8, 8, dtype=torch.float32)
    chosen = LABELS if forget == "labels" else SETS
    with torch.no_grad():
        torch.testing.assert_close(program(x, chosen), wf(x, forget=chosen), atol=1e-3, rtol=1e-3)


def test_onnx_graphs_have_the_rows(tmp_path):
    pytest.importorskip("onnxruntime")
    wf, _ = rerouted()
    found = wfilter.export(
        wf.float(), tmp_path / "a.onnx", example_input=images(1, 3, 8, 8, dtype=torch.float32)
    )
    assert found.largest_difference < 1e-2


def test_a_baked_model_has_plain_layers_that_move_the_class():
    wf, x = rerouted()
    baked = wf.bake(forget=2).eval()
    path = wf.feature_rows.head.rpartition(".")[0]
    edit, rest = baked.get_submodule(path)
    assert isinstance(edit, nn.Linear)
    assert not rest.weight[2].any()
    assert not bool((baked(x).argmax(1) == 2).any())
    assert not any("wfilter" in type(m).__module__ for m in baked.modules())


def test_the_plan_and_a_copy_show_the_rows():
    wf, x = rerouted()
    assert "feature rows before the head: num_classes=4" in str(wf.plan)
    again = copy.deepcopy(wf)
    close(again(x, forget=SETS), wf(x, forget=SETS))


def test_rows_of_another_head_are_refused():
    wf, x = rerouted()
    wf.feature_rows.head = "elsewhere.weight"
    with pytest.raises(ValueError, match="no such parameter"):
        wf(x, forget=1)


def test_torch_calls_python_once_for_each_function_of_gates_and_rows():
    wf, x = rerouted()
    entered = []
    stack = torch.overrides._get_current_function_mode_stack
    layer = next(m for m in wf.base.modules() if isinstance(m, nn.Conv2d))
    hook = layer.register_forward_pre_hook(lambda *_: entered.append(len(stack())))
    wf(x, forget=LABELS)
    hook.remove()
    assert entered == [1]


def test_replicas_are_rerouted_each_by_its_own_set():
    wf, x = rerouted()
    wf.pin_open([wf.targets[0].name])
    forget = torch.tensor([0, 1, 2, 3, 0, -1, 2, 2])
    close(wf.replicated(x, forget), wf(x.repeat_interleave(2, 0), forget))


def in_block(wf, x):
    with wf.forgetting(2):
        return wf.base(x)


@torch.no_grad()
@pytest.mark.parametrize(
    "call",
    [
        lambda wf, x: wf(x, 2),
        lambda wf, x: wf(x, {1, 2}),
        lambda wf, x: wf(x, LABELS),
        lambda wf, x: wf(x, SETS),
        lambda wf, x: wf.features(x, LABELS),
        in_block,
    ],
)
def test_rows_are_never_left_out_without_a_word(call):
    wf, x = rerouted()
    head = wf.base.get_submodule(wf.feature_rows.head.rpartition(".")[0])
    head.forward = lambda h: (h.unsqueeze(1) * head.weight).sum(2) + head.bias
    with pytest.raises(RuntimeError, match="the head was not called in this forward"):
        call(wf, x)


def test_draws_are_the_same_under_autocast():
    wf, x = rerouted()
    wf.float()
    features = wf.features(x.float())
    route = torch.tensor([0, 1, 2, 3])
    expected = wf.feature_rows.drawn(features, route)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(wf.feature_rows.drawn(features, route), expected)
