"""Which parameters are chosen, and what is said when none are."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import wfilter
from helpers import CLASSES, Attention, Tied, TinyCNN, apply, close, randomise
from wfilter.core.oracle import one_at_a_time
from wfilter.core.targets import select_targets


def names(model, *args, **options):
    return [target.name for target in select_targets(model, *args, **options)]


def test_auto_takes_kernels_and_biases_of_convolutions_but_no_norm_and_no_head():
    assert names(TinyCNN()) == [
        "stem.weight",
        "depthwise.weight",
        "depthwise.bias",
        "up.weight",
        "up.bias",
    ]


def test_auto_takes_only_the_projections_where_the_model_has_attention():
    assert names(Attention()) == ["attention.in_proj_weight", "attention.in_proj_bias"]


def test_auto_takes_separate_query_key_and_value_layers():
    model = nn.ModuleDict({n: nn.Linear(4, 4) for n in ("q_proj", "to_k", "value", "proj")})
    chosen = {name.split(".")[0] for name in names(model)}
    assert chosen == {"q_proj", "to_k", "value"}


def test_auto_takes_the_linear_layers_of_a_mixer_but_not_its_head():
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Linear(64, 64), nn.Linear(64, 10))
    assert names(model) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("stem.weight", ["stem.weight"]),
        ("*.bias", ["norm.bias", "depthwise.bias", "up.bias", "head.bias"]),
        ("re:(stem|up).weight", ["stem.weight", "up.weight"]),
        (nn.Linear, ["head.weight", "head.bias"]),
        (nn.BatchNorm2d, ["norm.weight", "norm.bias"]),
        (lambda name, module, parameter: parameter.ndim == 2, ["head.weight"]),
        (["head.bias", nn.BatchNorm2d], ["norm.weight", "norm.bias", "head.bias"]),
        ({"stem.*"}, ["stem.weight"]),
    ],
)
def test_targets_are_globs_patterns_types_callables_and_lists_of_them(targets, expected):
    assert names(TinyCNN(), targets) == expected


def test_callable_gets_name_module_and_parameter():
    seen = {}

    def wanted(name, module, parameter):
        seen[name] = type(module), tuple(parameter.shape)
        return name == "up.weight"

    assert names(TinyCNN(), wanted) == ["up.weight"]
    assert seen["up.weight"] == (nn.ConvTranspose2d, (6, 2, 2, 2))


def test_pattern_is_matched_in_full():
    with pytest.raises(ValueError, match="matches none of the 9 parameters of TinyCNN"):
        names(TinyCNN(), "re:stem")


def test_exclude_takes_the_same_words_and_wins():
    assert names(TinyCNN(), "auto", ["*.bias", nn.ConvTranspose2d]) == [
        "stem.weight",
        "depthwise.weight",
    ]


def test_pattern_that_matches_nothing_names_the_closest_parameters():
    message = (
        r"targets='stm\.weigt' matches none of the 9 parameters of TinyCNN\. Closest names:\n"
        r"  stem\.weight, .*\. Call find_targets\(model\) to see them all\."
    )
    with pytest.raises(ValueError, match=message):
        names(TinyCNN(), "stm.weigt")


def test_one_pattern_of_a_list_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match="targets='nothing' matches none"):
        names(TinyCNN(), ["stem.*", "nothing"])


def test_exclude_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match="exclude='typo' matches none"):
        names(TinyCNN(), exclude="typo")


def test_type_and_callable_that_match_nothing_are_named():
    with pytest.raises(ValueError, match="targets=Conv3d matches none"):
        names(TinyCNN(), nn.Conv3d)

    def never(name, module, parameter):
        return False

    with pytest.raises(ValueError, match="targets=never matches none"):
        names(TinyCNN(), never)


def test_auto_without_anything_to_take_says_so():
    with pytest.raises(ValueError, match="found no convolution and no attention projection"):
        names(nn.Sequential(nn.Linear(4, 2)))


def test_excluding_everything_says_that_nothing_is_left():
    with pytest.raises(ValueError, match="leaves nothing to filter in TinyCNN"):
        names(TinyCNN(), "stem.*", "stem.*")


def test_selector_of_another_kind_is_a_type_error():
    with pytest.raises(TypeError, match="take globs, 're:' patterns, module types and callables"):
        names(TinyCNN(), [3])


def test_unknown_granularity_is_an_error():
    with pytest.raises(ValueError, match=r"granularity='row' is unknown\. Use 'out' or 'element'"):
        names(TinyCNN(), granularity="row")


def test_units_are_output_channels_or_elements():
    by = {t.name: (t.units, t.unit_axis) for t in select_targets(TinyCNN(), "*")}
    assert by["stem.weight"] == (6, 0)
    assert by["up.weight"] == (2, 1)  # transposed: (in, out / groups, height, width)
    assert by["up.bias"] == (4, 0)
    assert by["head.weight"] == (CLASSES, 0)
    elements = {t.name: t.units for t in select_targets(TinyCNN(), "*", granularity="element")}
    assert elements["up.weight"] == 48


def test_integer_parameters_are_never_targets():
    model = nn.Linear(4, 2)
    model.register_parameter("count", nn.Parameter(torch.ones(2).long(), requires_grad=False))
    assert names(model, "*") == ["weight", "bias"]


def test_tied_weights_are_one_target_with_both_owners():
    (target,) = select_targets(Tied(), "first.weight")
    assert target.owners == (("first", "weight"), ("second", "weight"))


def test_scalar_parameter_can_be_a_target(x):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.head = nn.Linear(192, CLASSES)

        def forward(self, x):
            return self.head(x.flatten(1) * self.scale)

    wf = apply(randomise(Scaled()), x, targets="scale")
    labels = torch.tensor([0, 1, 2, -1])
    close(wf(x, forget=labels), one_at_a_time(wf, x, labels))


def test_find_targets_is_a_dry_run():
    model = TinyCNN().train()
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    plan = wfilter.find_targets(model, exclude="*.bias")
    assert [row.name for row in plan] == ["stem.weight", "depthwise.weight", "up.weight"]
    assert [row.units for row in plan] == [6, 6, 2]
    assert [module.training for module in model.modules()] == flags
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    wfilter.apply_weight_filtering(model)


def test_find_targets_shows_what_no_forward_uses():
    class Aux(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.aux = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return self.conv(x).mean((2, 3))

    rows = {row.name: row for row in wfilter.find_targets(Aux())}
    assert rows["aux.weight"].path == "unused"
    assert "no forward uses it" in rows["aux.weight"].why


@pytest.mark.parametrize("name", ["k", "value", "key_conv", "v_proj"])
def test_a_layer_that_happens_to_be_called_like_a_projection_makes_no_attention(name):
    layers = {"stem": nn.Conv2d(3, 4, 3), name: nn.Conv2d(4, 4, 3), "last": nn.Conv2d(4, 4, 3)}
    model = nn.Sequential(OrderedDict(layers))
    chosen = [target.name for target in select_targets(model) if target.name.endswith("weight")]
    assert chosen == ["stem.weight", f"{name}.weight", "last.weight"]


@pytest.mark.parametrize("names", [("q", "k"), ("query", "key", "value"), ("q", "kv"), ("qkv",)])
def test_projections_that_come_together_are_attention(names):
    layers = {"stem": nn.Conv2d(3, 4, 3), **{name: nn.Linear(4, 4) for name in names}}
    model = nn.Sequential(OrderedDict(layers))
    chosen = {target.name.split(".")[0] for target in select_targets(model)}
    assert chosen == set(names)
