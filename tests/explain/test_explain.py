"""Explanations: each number against a hand-made one, and planted units that must be found."""

import os
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import wfilter
from helpers import apply, images, shuffle_alphas, tiny
from wfilter import explain, metrics
from wfilter.core.gates import HARD


def linear(rows, classes=None):
    """Filters of a linear layer with the alphas given, ``(num_classes, units)``."""
    alphas = torch.as_tensor(rows, dtype=torch.float32)
    model = nn.Sequential(nn.Linear(2, alphas.shape[1]), nn.Linear(alphas.shape[1], len(alphas)))
    wf = wfilter.apply_weight_filtering(model, targets="0.weight", class_names=classes)
    with torch.no_grad():
        wf.alphas.copy_(alphas)
    return wf


# ---- planted units -------------------------------------------------------------------------------

PLANTED = (7, 2, 9, 4)  # the unit that carries each class


def planted_model() -> nn.Module:
    """Twelve units, four of them each carry one class; the others mix everything weakly."""
    generator = torch.Generator().manual_seed(0)
    conv = nn.Conv2d(4, 12, 1, bias=False)
    head = nn.Linear(12, 4)
    with torch.no_grad():
        conv.weight.copy_(0.3 * torch.randn(12, 4, 1, 1, generator=generator))
        head.weight.copy_(0.3 * torch.randn(4, 12, generator=generator))
        for label, unit in enumerate(PLANTED):
            conv.weight[unit, :, 0, 0] = torch.eye(4)[label]
            head.weight[:, unit] = 6 * torch.eye(4)[label]
    return nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).eval()


def planted_data(count=64):
    labels = torch.arange(count) % 4
    pictures = 0.3 * images(count, 4, 3, 3, dtype=torch.float32)
    pictures[torch.arange(count), labels] += 1.0
    return pictures, labels


@pytest.fixture(scope="module")
def planted():
    pictures, labels = planted_data()
    wf = wfilter.apply_weight_filtering(planted_model(), example_input=pictures[:1])
    recipe = replace(wfilter.RECIPES["distill"], gates="soft", start=None, learning_rate=0.3)
    data = wfilter.InMemory(pictures, labels, batch_size=16)
    wfilter.untrain(wf, data, recipe=recipe, steps=60, progress=False)
    return wf


def test_after_untraining_the_planted_unit_of_each_class_comes_first(planted):
    found = [explain.top_units(planted, row, "0", k=1)[0].index for row in range(4)]
    assert tuple(found) == PLANTED


def test_opening_the_planted_units_first_restores_more_than_a_random_order(planted):
    pictures, labels = planted_data()
    for row in range(4):
        curves = explain.class_curves(planted, pictures[labels == row], row, steps=12)
        assert curves.insertion.values[1] > 0.9 > curves.insertion.values[0]
        assert curves.insertion.auc > curves.random_insertion.auc
        assert curves.deletion.auc < curves.random_deletion.auc


def test_the_planted_unit_is_excited_most_by_images_of_its_class(planted):
    pictures, labels = planted_data()
    for row, unit in enumerate(PLANTED):
        found = explain.exciting_images(planted, "0", unit, pictures, k=8)
        assert set(labels[found].tolist()) == {row}


def test_predictions_show_the_class_before_and_not_after(planted):
    pictures, labels = planted_data()
    for found in explain.predictions(planted, pictures[labels == 1][:3], 1, k=2):
        assert found.before[0][0] == 1
        assert found.after[0][0] != 1
        assert found.before[0][1] >= found.before[1][1]


# ---- units ---------------------------------------------------------------------------------------


def test_units_are_ranked_by_alpha_also_where_gates_are_exactly_zero():
    wf = linear([[-1001.0, -1003.0, -1002.0, 5.0], [5.0, 5.0, 5.0, 5.0]])
    found = explain.top_units(wf, 0, k=3)
    assert [unit.index for unit in found] == [1, 2, 0]
    assert [unit.gate for unit in found] == [0.0, 0.0, 0.0]


def test_equal_alphas_are_ranked_by_how_open_other_classes_leave_the_unit():
    wf = linear([[-HARD, -HARD, -HARD], [-HARD, HARD, HARD], [HARD, -HARD, HARD]])
    assert [unit.index for unit in explain.top_units(wf, 0, k=3)] == [2, 0, 1]


def test_top_units_over_all_layers_name_the_layer_of_each_unit(wf):
    expected = wf.alphas[2].detach().argsort()[:5].tolist()
    spans, start = {}, 0
    for target in wf.targets:
        spans.update({start + i: (target.name, i) for i in range(target.units)})
        start += target.units
    found = explain.top_units(wf, 2, k=5)
    assert [(unit.layer, unit.index) for unit in found] == [spans[i] for i in expected]


def test_a_class_and_a_layer_can_be_given_by_name():
    wf = linear([[5.0, -5.0], [-5.0, 5.0]], classes=["cat", "dog"])
    assert explain.top_units(wf, "dog", "0", k=1)[0].index == 0


def test_an_unknown_layer_is_refused_with_the_closest_names(wf):
    with pytest.raises(ValueError, match=r"layer='stom' is not one of .*stem\.weight"):
        explain.top_units(wf, 0, "stom")
    with pytest.raises(ValueError, match="k=0 is not a number of units"):
        explain.top_units(wf, 0, k=0)


def test_shared_units_are_those_in_the_top_of_two_classes_and_closed():
    wf = linear([[-9.0, -8.0, -7.0, 9.0], [-9.0, 9.0, -8.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    assert explain.shared_units(wf, "0", k=2) == {0: (0, 1)}
    assert explain.shared_units(wf, "0", k=3) == {0: (0, 1), 2: (0, 1)}
    assert explain.shared_units(wf, "0", k=2, at_least=1) == {0: (0, 1), 1: (0,), 2: (1,)}
    assert explain.shared_units(wf, "0", k=3, classes=[0, 2]) == {}


def test_the_graph_has_an_edge_for_every_shared_unit_and_keeps_the_most_shared():
    wf = linear([[-9.0, -8.0, 9.0], [-9.0, -8.0, 9.0], [-9.0, 9.0, 9.0]])
    graph = explain.class_unit_graph(wf, "0", k=3)
    assert set(graph.edges) == {(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)}
    assert sorted(graph.classes) == [0, 1, 2]
    assert explain.class_unit_graph(wf, "0", k=3, max_units=1).units == (0,)


def test_only_layers_with_a_closed_gate_are_live_and_drawn_by_default(wf):
    with torch.no_grad():
        wf.alphas.fill_(5.0)
        wf.alpha["depthwise.weight"][1, 0] = -5.0
    assert explain.live_layers(wf) == ("depthwise.weight",)
    assert explain.default_layers(wf) == ("depthwise.weight",)


def test_closed_gates_are_counted_by_layer_and_by_class():
    wf = linear([[-9.0, -9.0, 9.0, 9.0], [9.0, 9.0, 9.0, -9.0]])
    assert explain.closed_by_class(wf).tolist() == [2, 1]
    assert explain.closed_by_layer(wf)["0.weight"].tolist() == [0.5, 0.25]


def test_distance_from_exact_is_zero_for_exact_gates_and_half_at_most():
    wf = linear([[-HARD, HARD, 0.0], [HARD, -HARD, 2.0]])
    distance = explain.distance_from_exact(wf)
    assert distance[:, :2].tolist() == [[0, 0], [0, 0]]
    assert distance[0, 2] == 0.5
    assert float(distance[1, 2]) == pytest.approx(1 - torch.sigmoid(torch.tensor(2.0)).item())


# ---- similar classes -----------------------------------------------------------------------------


def test_similarity_of_exact_gates_is_the_jaccard_index_of_the_closed_sets():
    torch.manual_seed(1)
    closed = torch.rand(5, 30) < 0.4
    wf = linear(torch.where(closed, -HARD, HARD))
    for i in range(5):
        for j in range(5):
            both, either = (closed[i] & closed[j]).sum(), (closed[i] | closed[j]).sum()
            assert float(explain.similarity(wf)[i, j]) == pytest.approx(float(both / either))


def test_classes_of_a_planted_group_lie_together_and_form_a_cluster():
    torch.manual_seed(0)
    group = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])
    centres = 6 * torch.sign(torch.randn(3, 40))
    matrix = explain.similarity(linear(centres[group] + torch.randn(9, 40)))
    order = group[explain.class_order(matrix)].tolist()
    assert sum(a != b for a, b in pairwise(order)) == 2
    found = explain.clusters(matrix, 3)
    assert len({(int(g), c) for g, c in zip(group, found)}) == 3


def test_rank_correlation_is_spearmans_above_the_diagonal():
    from scipy.stats import spearmanr

    torch.manual_seed(0)
    a, b = torch.randint(0, 4, (7, 7)).float(), torch.rand(7, 7)
    above = torch.triu_indices(7, 7, 1)
    expected = spearmanr(a[above[0], above[1]], b[above[0], above[1]]).statistic
    assert explain.rank_correlation(a, b) == pytest.approx(expected)
    with pytest.raises(ValueError, match="expected the same square matrix"):
        explain.rank_correlation(a, b[:3, :3])


def test_head_similarity_is_the_cosine_of_the_heads_rows(tiny_cnn):
    weight = tiny_cnn.head.weight.detach()
    found = explain.head_similarity(tiny_cnn)
    expected = torch.cosine_similarity(weight[0], weight[2], dim=0)
    assert float(found[0, 2]) == pytest.approx(float(expected))


# ---- curves --------------------------------------------------------------------------------------


def by_hand(model, x, base, row):
    """Relative confidence with every weight multiplied by explicit gates."""
    weights = dict(model.named_parameters())

    def confidence(gates):
        gated = {}
        for name, gate in gates.items():
            axis = 1 if name == "up.weight" else 0
            shape = [1] * weights[name].ndim
            shape[axis] = -1
            gated[name] = weights[name].detach() * gate.view(shape)
        logits = torch.func.functional_call(model, gated, (x,))
        return metrics.relative_confidence(logits.detach(), base, row)

    return confidence


@pytest.mark.parametrize("kind", ["insertion", "deletion"])
@pytest.mark.parametrize("order", ["gate", "random"])
def test_curves_equal_those_of_weights_multiplied_by_hand(x, kind, order):
    model = tiny("cnn")
    wf = shuffle_alphas(
        wfilter.apply_weight_filtering(model, targets=nn.modules.conv._ConvNd, example_input=x)
    )
    names = [target.name for target in wf.targets]
    base = model(x).detach()
    expected = metrics.curve(
        by_hand(model, x, base, 1), wf.gates(1), kind=kind, order=order, steps=6, seed=3
    )
    found = getattr(explain, kind)(wf, x, 1, order, steps=6, seed=3, layers=names)
    torch.testing.assert_close(found.values, expected.values, atol=1e-9, rtol=1e-9)


def test_curves_leave_the_filters_as_they_were(wf, x):
    wf.pin_open(["stem.weight"])
    before = wf.alphas.detach().clone()
    pinned, same = wf.pinned, wf(x, forget=1)
    explain.class_curves(wf, x, 1, steps=3)
    assert torch.equal(wf.alphas, before)
    assert wf.pinned == pinned
    assert torch.equal(wf(x, forget=1), same)


def test_by_default_only_live_layers_are_deleted(wf, x):
    with torch.no_grad():
        wf.alphas.fill_(HARD)
        wf.alpha["up.weight"][1] = -HARD
    live = explain.deletion(wf, x, 1, steps=4)
    assert live == explain.deletion(wf, x, 1, steps=4, layers=["up.weight"])
    assert live != explain.deletion(wf, x, 1, steps=4, layers=[t.name for t in wf.targets])


def test_mean_curve_refuses_curves_over_different_shares():
    with pytest.raises(ValueError, match="Use the same steps for all"):
        explain.mean_curve([metrics.Curve((0.0, 1.0), (0.0, 1.0)), metrics.Curve((0.0,), (1.0,))])


def test_curves_without_images_are_refused(wf, x):
    with pytest.raises(ValueError, match="steps=20 over 0 images"):
        explain.insertion(wf, x[:0], 1)


# ---- responses and heads -------------------------------------------------------------------------


def test_a_negative_batch_norm_turns_which_image_excites_a_unit():
    conv, norm = nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1)
    nn.init.ones_(conv.weight)
    nn.init.constant_(norm.weight, -1.0)
    model = nn.Sequential(conv, norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2))
    pictures = torch.tensor([1.0, 3.0, 2.0]).view(3, 1, 1, 1)
    wf = wfilter.apply_weight_filtering(model.eval(), example_input=pictures)
    assert explain.exciting_images(wf, "0", 0, pictures, k=3) == [0, 2, 1]


def test_a_unit_that_the_layer_does_not_have_is_refused(wf, x):
    units = wf.targets[0].units
    with pytest.raises(ValueError, match=rf"unit={units} is outside 0\.\.{units - 1}"):
        explain.exciting_images(wf, wf.targets[0].name, units, x)


def test_responses_of_a_bypassed_module_are_refused(x):
    wf = apply(tiny("bypassed module"), x, targets="*")
    with pytest.raises(ValueError, match="qkv does not give one output per image"):
        explain.unit_responses(wf, "qkv", x)


def test_head_usage_finds_the_closed_head():
    from wfilter import zoo

    wf = wfilter.apply_weight_filtering(zoo.create("vit-digits"))
    with torch.no_grad():
        wf.alphas.fill_(HARD)
        wf.alpha["blocks.2.attn.qkv.weight"].view(10, 3, 4, 16)[6, 2, 1] = -HARD
    usage = explain.head_usage(wf)
    expected = torch.zeros(10, 3, 4)
    expected[6, 2, 1] = 1.0
    assert torch.equal(usage["blocks.2.attn.qkv.weight"], expected)
    assert not usage["blocks.1.attn.qkv.weight"].any()


def test_a_model_without_attention_has_no_heads(wf):
    assert explain.head_usage(wf) == {}


# ---- real weights --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif("WFILTER_DATA" not in os.environ, reason="WFILTER_DATA names no data folder")
def test_opening_the_top_5_percent_restores_each_cifar_class_more_than_a_random_5_percent():
    from wfilter import data, zoo

    spec = "wfilter:resnet18-cifar"
    train, test = data.load("cifar10", "train"), data.load("cifar10", "test")
    pictures, labels = train.batch(torch.arange(1000))
    model = zoo.build(spec, weights=zoo.weights_path(spec))
    wf = wfilter.apply_weight_filtering(model, example_input=pictures[:1])
    data = wfilter.InMemory(pictures, labels, batch_size=16)
    wfilter.untrain(wf, data, recipe="distill", steps=80)
    for row in range(10):
        shown, _ = test.batch((test.labels == row).nonzero()[:10, 0])
        by_gate, random = (
            explain.insertion(wf, shown, row, order, steps=20).values[:2]
            for order in ("gate", "random")
        )
        assert by_gate[1] - by_gate[0] > random[1] - random[0], test.class_names[row]
