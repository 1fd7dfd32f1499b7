"""Apply, remove, bake: round trips, and every refusal."""

import pickle

import pytest
import torch
from torch import nn

import reference
import wfilter
from helpers import (
    CLASSES,
    TinyCNN,
    apply,
    assert_same_state,
    close,
    family,
    randomise,
    snapshot,
    tiny,
)


def test_apply_then_remove_gives_back_the_very_model(tiny_cnn, x):
    tiny_cnn.train()
    tiny_cnn.norm.eval()
    tiny_cnn.stem.requires_grad_(False)
    before, module = snapshot(tiny_cnn), [*tiny_cnn.modules()]
    flags = [m.training for m in module]
    parameters = [(p, p.requires_grad) for p in tiny_cnn.parameters()]
    attributes = {m: sorted(vars(m)) for m in module}
    wf = apply(tiny_cnn, x)
    wf(x, forget=torch.tensor([0, 1, 2, -1]))
    with wf.forgetting(1):
        wf(x)
    assert wfilter.remove_weight_filtering(wf) is tiny_cnn
    assert_same_state(tiny_cnn, before)
    assert [m.training for m in tiny_cnn.modules()] == flags
    for (old, wanted), new in zip(parameters, tiny_cnn.parameters()):
        assert new is old
        assert new.requires_grad == wanted
    assert {m: sorted(vars(m)) for m in tiny_cnn.modules()} == attributes
    assert all(type(a) is type(b) for a, b in zip(module, tiny_cnn.modules()))


def test_removing_twice_and_removing_nothing_are_errors(tiny_cnn, x):
    with pytest.raises(RuntimeError, match=r"this TinyCNN has no filters \(any more\)"):
        wfilter.remove_weight_filtering(tiny_cnn)
    wf = apply(tiny_cnn, x)
    wfilter.remove_weight_filtering(wf)
    with pytest.raises(RuntimeError, match=r"has no filters \(any more\)\. Call apply_weight_filt"):
        wfilter.remove_weight_filtering(wf)
    with pytest.raises(RuntimeError, match="the filters of this model were removed"):
        wf(x)
    with pytest.raises(RuntimeError, match="the filters of this model were removed"):
        wf(x, forget=1)


def test_remove_takes_the_base_model_too_and_apply_works_again(tiny_cnn, x):
    wf = apply(tiny_cnn, x)
    assert wfilter.remove_weight_filtering(wf.base) is tiny_cnn
    again = apply(tiny_cnn, x)
    assert again(x, forget=1).shape == (4, CLASSES)


def test_two_applications_on_one_model_are_refused(tiny_cnn, x):
    wf = apply(tiny_cnn, x)
    message = (
        r"stem\.weight already has a filter\. Call remove_weight_filtering\(model\) to start over"
    )
    for again in (tiny_cnn, wf, nn.Sequential(tiny_cnn), nn.Sequential(wf)):
        with pytest.raises(RuntimeError, match=message):
            wfilter.apply_weight_filtering(again, example_input=x)


def test_failed_apply_leaves_the_model_as_it_was(tiny_cnn, x):
    tiny_cnn.train()
    before = snapshot(tiny_cnn)
    with pytest.raises(ValueError, match="num_classes=7, but TinyCNN gives 4 logits"):
        wfilter.apply_weight_filtering(tiny_cnn, 7, example_input=x)
    assert_same_state(tiny_cnn, before)
    assert all(module.training for module in tiny_cnn.modules())
    assert all(parameter.requires_grad for parameter in tiny_cnn.parameters())
    apply(tiny_cnn, x)


def test_num_classes_is_read_off_the_output_or_must_be_given(x):
    class Pair(TinyCNN):
        def forward(self, x):
            return {"logits": super().forward(x)}

    class Two(TinyCNN):
        def forward(self, x):
            return {"left": super().forward(x), "right": super().forward(x)}

    with pytest.raises(ValueError, match="cannot read the number of classes off Two's output"):
        wfilter.apply_weight_filtering(Two().double(), example_input=x)
    wf = wfilter.apply_weight_filtering(Two().double(), 4, example_input=x)
    assert wf(x, forget=torch.tensor([0, 1, 2, -1]))["right"].shape == (4, CLASSES)
    wf = wfilter.apply_weight_filtering(Pair().double(), example_input=x)
    assert wf(x, forget=torch.tensor([0, 1, 2, -1]))["logits"].shape == (4, CLASSES)


@pytest.mark.parametrize("bad", [0, -3, 2.0, True])
def test_num_classes_must_be_a_positive_int(tiny_cnn, x, bad):
    with pytest.raises(ValueError, match=r"num_classes=.* must be a positive int"):
        wfilter.apply_weight_filtering(tiny_cnn, bad, example_input=x)


def test_class_names_must_fit(tiny_cnn, x):
    with pytest.raises(ValueError, match="class_names has 2 entries for 4 classes"):
        apply(tiny_cnn, x, class_names=["a", "b"])
    with pytest.raises(ValueError, match="class_names has 'b' more than once"):
        apply(tiny_cnn, x, class_names=["a", "b", "b", "c"])
    for bad in ([0, 1, 2, 3], "abcd"):  # a file with such names would not load
        with pytest.raises(TypeError, match="must be a list of names, each a str"):
            apply(tiny_cnn, x, class_names=bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_init_must_be_finite(tiny_cnn, x, bad):
    with pytest.raises(ValueError, match=r"init=(nan|inf) must be a finite number"):
        wfilter.apply_weight_filtering(tiny_cnn, example_input=x, init=bad)


def test_new_filter_is_close_to_the_identity_but_not_equal_to_it(tiny_cnn, x):
    wf = wfilter.apply_weight_filtering(tiny_cnn, example_input=x)
    assert torch.equal(wf.alphas, torch.full_like(wf.alphas, 3.0))
    for gate in wf.gates(2).values():
        torch.testing.assert_close(gate, torch.full_like(gate, 0.9525741268))


def test_model_compiled_before_apply_is_refused(tiny_cnn, x):
    message = "already compiled, and filters attached now would be ignored"
    with pytest.raises(RuntimeError, match=message):
        apply(torch.compile(tiny_cnn, backend="eager"), x)
    tiny_cnn.depthwise.compile(backend="eager")
    with pytest.raises(RuntimeError, match=message):
        apply(tiny_cnn, x)


@torch.no_grad()
def test_base_model_compiled_after_apply_is_refused(tiny_cnn, x):
    wf = apply(tiny_cnn, x)
    wf.base.compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"was not gated in this forward.*call wf\.compile"):
        wf(x, forget=torch.tensor([0, 1, 2, -1]))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_scripted_model_is_refused(x):
    scripted = torch.jit.trace(nn.Conv2d(3, 4, 3).double(), x)
    with pytest.raises(ValueError, match="contains TorchScript modules"):
        apply(nn.Sequential(scripted, nn.Flatten()), x)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_kernel_made_from_other_parameters_is_not_passed_over_silently(x):
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(180, CLASSES))
    nn.utils.parametrizations.weight_norm(model[0])
    randomise(model)
    with pytest.raises(ValueError, match=r"0\.weight is computed from .* 'auto' cannot choose"):
        apply(model, x)
    with pytest.raises(ValueError, match=r"original1 is rescaled by the model before use"):
        apply(model, x, targets="0.parametrizations.*")
    wf = apply(model, x, targets="0.parametrizations.weight.original0")
    labels = torch.tensor([0, 1, 2, -1])
    with torch.no_grad():
        close(wf(x, forget=labels), reference.logits(wf, x, labels))


def test_element_gates_on_standardised_convolutions_are_refused():
    model, x = family("timm nf_resnet")
    with pytest.raises(ValueError, match=r"stem\.conv\.weight is standardised before use"):
        apply(model, x, granularity="element", targets="stem.conv.weight")
    with pytest.raises(ValueError, match=r"stem\.conv\.gain rescales a standardised weight"):
        apply(model, x, targets="stem.conv.*")


def test_standardised_convolution_is_gated_after_the_standardisation():
    model, x = family("timm nf_resnet")
    wf = apply(model, x, targets="stem.conv.weight")
    labels = torch.tensor([0, 1, 2, -1])
    with torch.no_grad():
        expected = reference.logits(wf, x, labels)
        assert (expected - model(x)).abs().amax(1)[:3].min() > 1e-6  # before it would cancel out
        close(wf(x, forget=labels), expected)
        baked = wf.bake(2)
        assert type(baked.stem.conv) is nn.Conv2d
        close(baked(x), reference.filtered_copy(wf, [2])(x))


# ---- bake ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_standardised_convolution_that_pads_like_tensorflow_is_baked_as_one_that_does(x):
    from timm.layers import StdConv2dSame
    from timm.layers.conv2d_same import Conv2dSame

    conv = StdConv2dSame(3, 6, 3, stride=2, bias=True)
    model = randomise(nn.Sequential(conv, nn.Flatten(), nn.Linear(96, CLASSES)))
    wf = apply(model, x, targets="0.*")
    baked = wf.bake(2)
    assert type(baked[0]) is Conv2dSame
    assert baked[0].weight.dtype == torch.float64
    close(baked(x), reference.filtered_copy(wf, [2])(x))


@torch.no_grad()
def test_baked_model_is_plain_and_independent_of_the_original(wf, x):
    expected = reference.filtered_copy(wf, [2])(x)
    before = snapshot(wf.base)
    baked = wf.bake(forget=2)
    assert type(baked) is TinyCNN
    assert list(baked.state_dict()) == list(before)
    assert not any("wfilter" in type(m).__module__ for m in baked.modules())
    assert vars(baked).keys() == vars(tiny("cnn")).keys()
    close(baked(x), expected)
    for parameter in baked.parameters():
        parameter.zero_()
    assert_same_state(wf.base, before)
    close(wf(x, forget=2), expected)


@torch.no_grad()
def test_baked_model_of_a_set_and_of_the_empty_set(wf, x):
    close(wf.bake({1, 3})(x), reference.filtered_copy(wf, [1, 3])(x))
    assert torch.equal(wf.bake(set())(x), wf(x))


@torch.no_grad()
def test_baked_model_pickles_loads_and_can_be_filtered_again(wf, x):
    baked = wf.bake(1)
    assert torch.equal(pickle.loads(pickle.dumps(baked))(x), baked(x))
    fresh = tiny("cnn")
    fresh.load_state_dict(baked.state_dict(), strict=True)
    assert torch.equal(fresh(x), baked(x))
    assert apply(baked, x)(x, forget=0).shape == (4, CLASSES)


def test_baked_model_has_the_gradients_of_the_model_given_and_eval_mode(tiny_cnn, x):
    tiny_cnn.train()
    tiny_cnn.stem.requires_grad_(False)
    baked = apply(tiny_cnn, x).bake(0)
    assert not baked.training
    assert not baked.stem.weight.requires_grad
    assert baked.head.weight.requires_grad


@torch.no_grad()
def test_snap_makes_gates_exact_and_reports_what_that_moved(wf, x):
    gates = torch.cat(list(wf.gates(2).values()))
    effect = wf.snap_effect(x, 2, snap=0.2)
    assert effect.closed == int((gates < 0.2).sum()) > 0
    assert effect.opened == int((gates > 0.8).sum()) > 0
    assert effect.closed + effect.opened + effect.between == gates.numel()
    plain, snapped = wf.bake(2), wf.bake(2, snap=0.2)
    assert effect.largest_move == pytest.approx(float((plain(x) - snapped(x)).abs().max()))
    assert effect.largest_move > 0
    closed = wf.gates(2)["stem.weight"] < 0.2
    opened = wf.gates(2)["stem.weight"] > 0.8
    assert not snapped.stem.weight[closed].any()
    assert torch.equal(snapped.stem.weight[opened], wf.base.stem.weight[opened])
    assert wf.snap_effect(x, 2, snap=0.0).largest_move == 0


@pytest.mark.parametrize("bad", [-0.1, 0.6, 2])
def test_snap_out_of_range_is_refused(wf, bad):
    with pytest.raises(ValueError, match=rf"snap={bad} is outside 0\.\.0\.5"):
        wf.bake(1, snap=bad)


def test_bake_of_labels_is_refused(wf):
    with pytest.raises(TypeError, match="bake takes one class or one set of classes"):
        wf.bake(torch.tensor([0, 1]))


@torch.no_grad()
def test_tied_weights_stay_tied_when_baked(x):
    wf = apply(tiny("tied weights"), x, targets="first.weight")
    baked = wf.bake(1)
    assert baked.first.weight is baked.second.weight
    close(baked(x), reference.filtered_copy(wf, [1])(x))


@torch.no_grad()
def test_module_with_two_names_keeps_its_weights_after_every_path(x):
    model = tiny("module with two names")
    before = snapshot(model)
    for granularity in ("out", "element"):
        wf = apply(model, x, targets="body.*", granularity=granularity)
        wf(x, forget=torch.tensor([0, 1, 2, -1]))
        with wf.forgetting(3):
            wf(x)
        wf.bake(0)
        assert_same_state(model, before)
        wfilter.remove_weight_filtering(wf)


class Named(nn.Module):
    """A float model, one of whose modules has a method of the name that int8 modules use."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def weight(self):
        return self.inner.weight

    def forward(self, x):
        return self.inner(x)


def test_a_method_named_weight_is_not_taken_for_int8():
    wf = wfilter.apply_weight_filtering(Named(), targets="*", example_input=torch.ones(2, 4))
    assert [target.name for target in wf.targets] == ["inner.weight", "inner.bias"]


class Experts(nn.Module):
    """Sends bright images to one expert and dark ones to another; the inspection's are not dark."""

    def __init__(self):
        super().__init__()
        self.bright, self.dark = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x):
        expert = self.dark if bool((x < -100).all()) else self.bright
        return expert(x).mean((2, 3))


def test_what_auto_leaves_out_is_named_in_the_plan(x):
    wf = apply(Experts().double(), x)
    assert wf.left_out == ("dark.weight", "dark.bias")
    assert "left out by 'auto', since no forward of the inspection used it: dark" in str(wf.plan)
    with pytest.raises(ValueError, match=r"dark.weight is a target, but no forward uses it"):
        apply(Experts().double(), x, targets="*")
