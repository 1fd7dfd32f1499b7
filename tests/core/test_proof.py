"""Right by numbers, or refused: the causes that marks cannot see, each in several models."""

import contextlib
import copy
import dataclasses
import functools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wfilter
from helpers import (
    CLASSES,
    apply,
    assert_same_state,
    close,
    family,
    images,
    randomise,
    snapshot,
)
from wfilter.core.state import kept

LABELS = torch.tensor([3, -1, 0, 1, 2, 3])


@pytest.fixture
def x():
    return images(6, 3, 8, 8)


class Net(nn.Module):
    """Two layers, something odd between them, a head; ``odd`` gets the model and the images."""

    def __init__(self, odd):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.inner = nn.Linear(6, 5)
        self.head = nn.Linear(5, CLASSES)
        self.odd = odd

    def forward(self, x):
        return self.odd(self, x)

    def body(self, x):
        return self.head(self.inner(self.conv(x).mean((2, 3)).tanh()).tanh())


def by_hand(wf, x, labels):
    """Each sample alone, on a copy whose parameters are multiplied in place."""
    outputs = []
    for image, row in zip(x, labels.tolist()):
        model = copy.deepcopy(wf.base)
        with torch.no_grad():
            parameters = dict(model.named_parameters())
            for name, alpha in wf.alpha.items() if row >= 0 else ():
                gate = torch.sigmoid(alpha[row])
                shape = [-1] + [1] * (parameters[name].ndim - 1)
                parameters[name].mul_(gate.view(shape))
        outputs.append(model(image[None]))
    return torch.cat(outputs)


@torch.no_grad()
def check(odd, x, path=None, **options):
    wf = apply(randomise(Net(odd)), x, targets=options.pop("targets", "*"), **options)
    close(wf(x, forget=LABELS), by_hand(wf, x, LABELS))
    with wf.forgetting(1):
        close(wf(x), by_hand(wf, x, torch.ones(6).long()))
    if path is not None:
        assert path in str(wf.plan)
    return wf


def right_or_refused(attempt, named):
    """The attempt checks itself; a refusal must name what is to be excluded."""
    with contextlib.suppress(ValueError):
        attempt()
        return
    with pytest.raises(ValueError, match=re.escape(named)):
        attempt()


def sorted_by(score):
    def odd(model, x):
        order = score(x).argsort()
        return model.body(x[order])[order.argsort()]

    return odd


@pytest.mark.parametrize(
    "odd",
    [
        sorted_by(lambda x: x.mean((1, 2, 3))),
        sorted_by(lambda x: -x.amax((1, 2, 3))),
        sorted_by(lambda x: x[:, 0, 0, 0]),
        sorted_by(lambda x: torch.rand(len(x))),
        sorted_by(lambda x: x.flatten(1).std(1)),
    ],
    ids=["brightness", "maximum", "pixel", "random", "contrast"],
)
def test_samples_sorted_and_put_back_are_right(odd, x):
    check(odd, x, "exact")


def mixes_by_maximum(model, x):
    return model.body(x / 255 if x.max() > 1.5 else x)


def drops_nan(model, x):
    return model.body(x - x.nanmean(0))


def bag(model, x):
    return model.body(x).mean(0, keepdim=True)


def capacity(model, x):
    score = x.mean((1, 2, 3))
    kept = score >= score.sort(descending=True).values[min(len(x), 2) - 1]
    return model.body(x) * kept[:, None]


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    other: torch.Tensor


@pytest.mark.parametrize(
    "odd",
    [mixes_by_maximum, drops_nan, bag, capacity, lambda m, x: m.body(x) + 1e-2 * x.amax()],
    ids=["maximum", "nanmean", "bag", "capacity", "brightest"],
)
def test_mixing_that_marks_cannot_show_is_refused(odd, x):
    with pytest.raises(ValueError, match=r"mixes the samples|no single axis|permutes"):
        check(odd, x)


def test_mixing_inside_a_dataclass_is_refused_and_without_it_carried_along(x):
    with pytest.raises(ValueError, match="mixes the samples"):
        check(lambda m, x: Answer(m.body(x), m.body(x) - m.body(x).mean(0)), x)
    wf = apply(randomise(Net(lambda m, x: Answer(m.body(x), x.mean((2, 3))))), x)
    answer = wf(x, forget=LABELS)
    assert isinstance(answer, Answer)
    close(answer.logits, wf.run_gated(x, wf.mixed_gates(LABELS)).logits)


@pytest.mark.parametrize("granularity", ["out", "element"])
def test_a_model_that_writes_to_its_images_is_refused(granularity, x):
    def shifting(model, x):
        x -= 0.5
        return model.body(x)

    model = randomise(Net(shifting))
    with pytest.raises(ValueError, match="writes to the images"):
        wfilter.apply_weight_filtering(model, granularity=granularity, example_input=x)


def test_permuted_answers_are_refused(x):
    with pytest.raises(ValueError, match=r"permutes the samples|mixes the samples"):
        check(lambda m, x: m.body(x).flip(0), x)


def test_mixing_at_another_image_size_is_refused_when_that_size_comes(x):
    wf = check(lambda m, x: m.body(x) - (m.body(x).mean(0) if x.shape[-1] > 8 else 0), x)
    with pytest.raises(ValueError, match="mixes the samples"):
        wf(images(2, 3, 12, 12), forget=1)


class Own(torch.Tensor):
    """Somebody's kind of tensor."""


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: nn.Parameter(weight),
        lambda weight: weight.detach().numpy(),
        lambda weight: weight.data,
        lambda weight: weight.as_subclass(Own).as_subclass(torch.Tensor),
    ],
    ids=["new parameter", "numpy", "data", "subclass"],
)
def test_a_weight_used_where_no_mode_sees_it_is_right_or_refused(use, x):
    def odd(model, x):
        weight = torch.as_tensor(use(model.inner.weight))
        return model.head((model.conv(x).mean((2, 3)) @ weight.t()).tanh())

    right_or_refused(lambda: check(odd, x, targets=["conv.*", "inner.weight"]), "inner.weight")


@pytest.fixture
def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated, and still in use
        return torch.jit.script(product)


def test_a_weight_in_a_scripted_function_is_refused_by_name(scripted, x):
    def odd(model, x):
        pooled = model.conv(x).mean((2, 3))
        return model.head((model.inner(pooled) + scripted(pooled, model.inner.weight)).tanh())

    with pytest.raises(ValueError, match=r"inner\.weight is used where its gates cannot follow"):
        check(odd, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_difference_that_could_be_rounding_is_looked_at_in_float64(dtype, scripted, x):
    def odd(model, x):
        pooled = model.conv(x).mean((2, 3))
        unseen = 2e-3 * scripted(pooled, model.inner.weight)
        return model.head((model.inner(pooled) + unseen).tanh())

    model = randomise(Net(odd)).to(dtype)
    with pytest.raises(ValueError, match=r"inner\.weight is used where its gates cannot follow"):
        wfilter.apply_weight_filtering(model, targets="*", example_input=x.to(dtype))
    model.odd = lambda m, x: m.body(x) + 1e4  # an offset hides nothing, and is no fault
    wfilter.apply_weight_filtering(model, targets="*", example_input=x.to(dtype))


def test_a_model_that_amplifies_rounding_is_not_taken_for_one_that_mixes(x):
    model = randomise(Net(lambda m, x: torch.sin(3e6 * m.body(x)))).float()
    wf = wfilter.apply_weight_filtering(model, targets="*", example_input=x.float())
    assert {row.path for row in wf.plan} == {"fused"}
    model.odd = lambda m, x: torch.sin(3e6 * m.body(x)) + x.nanmean(0).sum()
    wfilter.remove_weight_filtering(wf)
    with pytest.raises(ValueError, match="mixes the samples"):
        wfilter.apply_weight_filtering(model, targets="*", example_input=x.float())


def test_the_proof_takes_few_forwards(x):
    calls = []

    def odd(model, x):
        calls.append(len(x))
        return model.body(x)

    check(odd, x)
    applied = calls[: calls.index(6)]  # images of the proof come in other numbers
    assert len(applied) <= 12, applied


def cached(model, x):
    if not hasattr(model, "kept_weight"):
        model.kept_weight = model.inner.weight * 2
    return model.head(F.linear(model.conv(x).mean((2, 3)), model.kept_weight).tanh())


def cached_in_a_dict(model, x):
    store = model.__dict__.setdefault("store", {})
    store.setdefault("w", model.inner.weight.t().contiguous())
    return model.head((model.conv(x).mean((2, 3)) @ store["w"]).tanh())


@functools.lru_cache
def transposed(model, width):
    return 2 * model.inner.weight.t()[:width]


def cached_outside_the_model(model, x):
    return model.head((model.conv(x).mean((2, 3)) @ transposed(model, 6)).tanh())


@pytest.mark.parametrize("odd", [cached, cached_in_a_dict, cached_outside_the_model])
def test_a_weight_that_the_model_caches_is_refused_and_the_model_left_clean(odd, x):
    model = randomise(Net(odd))
    before = set(vars(model))
    with pytest.raises(ValueError, match=r"inner\.weight"):
        wfilter.apply_weight_filtering(model, targets="inner.weight", example_input=x)
    assert set(vars(model)) - {"store"} == before
    assert not vars(model).get("store")
    wfilter.apply_weight_filtering(model, targets="conv.*", example_input=x)


@torch.no_grad()
def test_attention_biases_that_levit_caches_leave_nothing_of_a_block_behind():
    model, x = family("timm levit")
    before = model(x)  # fills its caches
    labels = torch.tensor([3, -1, 0, 1])

    def attempt():
        wf = apply(model, x, targets="*attention_biases")
        close(wf(x, forget=labels), by_hand(wf, x, labels))
        with wf.forgetting(1):
            wf(x)

    right_or_refused(attempt, "attention_biases")
    assert torch.equal(model(x), before)


class Reassigned(Net):
    """Assigns its buffer anew in every forward, and counts in a plain attribute."""

    def __init__(self):
        super().__init__(None)
        self.register_buffer("center", torch.zeros(1, 3, 1, 1))
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.center = x.mean((0, 2, 3), keepdim=True)
        self.calls += 1
        self.seen.append(x.shape)
        return self.body(x)


def test_apply_leaves_no_trace(x):
    model = randomise(Reassigned())
    buffer, before = model.center, snapshot(model)
    random = torch.get_rng_state()
    wf = wfilter.apply_weight_filtering(model, targets="*", example_input=x)
    wf.inspect(images(2, 3, 12, 12))
    assert model.center is buffer
    assert_same_state(model, before)
    assert model.calls == 0
    assert model.seen == []
    assert torch.equal(torch.get_rng_state(), random)


def test_state_is_put_back_after_an_error():
    model = nn.BatchNorm1d(3)
    before = snapshot(model)

    def fail():
        with kept(model):
            model(torch.randn(4, 3))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert_same_state(model, before)


def from_size(size):
    """Runs batches of this size and more in the opposite order."""

    def odd(model, x):
        order = torch.arange(len(x))
        order = order.flip(0) if len(x) >= size else order
        return model.body(x[order])[order]

    return odd


@pytest.mark.parametrize("size", [2, 3, 5, 6, 8, 9])
def test_a_layout_that_depends_on_the_size_of_the_batch_is_right(size):
    check(from_size(size), images(6, 3, 8, 8))


# ---- what has no values, or no batch ------------------------------------------------------------


def test_models_without_values_and_images_without_a_batch_are_refused_in_words(x):
    lazy = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(3))
    for model in (lazy, nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to("meta")):
        with pytest.raises(ValueError, match="has parameters without values"):
            wfilter.apply_weight_filtering(model, example_input=x)
    wf = check(lambda m, x: m.body(x), x)
    with pytest.raises(ValueError, match=r"that of a single one\. Pass a batch: image\[None\]"):
        wf(x[0], forget=1)


class Aliased(Net):
    """Keeps a view of a weight, outside its parameters."""

    def __init__(self, buffer):
        super().__init__(lambda model, x: model.body(x) + model.turned.sum())
        view = self.inner.weight.detach().t()[1:]
        if buffer:
            self.register_buffer("turned", view)
        else:
            self.turned = view


@pytest.mark.parametrize("buffer", [False, True])
def test_a_weight_under_another_name_is_refused(buffer, x):
    x = x.float()  # other dtypes have memory of their own
    with pytest.raises(ValueError, match=r"turned is the memory of inner\.weight"):
        wfilter.apply_weight_filtering(Aliased(buffer), targets="*.weight", example_input=x)
    wfilter.apply_weight_filtering(Aliased(buffer), targets="conv.*", example_input=x)


@torch.no_grad()
def test_a_weight_made_anew_in_each_forward_leaves_no_tensor_of_vmap_behind(x):
    model = randomise(Net(lambda model, x: model.body(x)))
    torch.nn.utils.spectral_norm(model.inner)
    wf = apply(model.eval(), x, targets="inner.*")
    mixed = wf(x, forget=LABELS)
    close(copy.deepcopy(wf)(x, forget=LABELS), mixed)
    close(wf(x[:1], forget=3), mixed[:1])


def test_inputs_that_are_not_understood_are_refused_in_words(x):
    wf = apply(randomise(Net(lambda model, x: model.body(x))), x)
    for wrong in (x[:, :2], x[0, :, :, 0]):
        with pytest.raises(RuntimeError, match="does not run on 5 samples like those given"):
            wf(wrong, forget=1)
    assert wf(x[:0], forget=1).shape == (0, CLASSES)
    with pytest.raises(ValueError, match="empty batch"):
        wfilter.apply_weight_filtering(
            Net(lambda model, x: model.body(x)).double(), example_input=x[:0]
        )
    with pytest.raises(TypeError, match="untrain takes a filtered model"):
        wfilter.untrain(wf.base, [(x, LABELS)])
    with pytest.raises(TypeError, match="pair of tensors"):
        wfilter.untrain(wf, (x, LABELS))
    with pytest.raises(RuntimeError, match="DataParallel"):
        wf._replicate_for_data_parallel()
    wfilter.remove_weight_filtering(wf)
    for use in (lambda: wf.bake(1), lambda: wf.forgetting(1)):
        with pytest.raises(RuntimeError, match="filters of this model were removed"):
            use()


@pytest.mark.parametrize("form", ["across", "pixels", "boxes"])
def test_models_that_are_no_classifiers_are_told_so(form, x):
    forms = {
        "across": lambda model, x: model.body(x).t(),
        "pixels": lambda model, x: model.conv(x),
        "boxes": lambda model, x: [{"boxes": model.conv(image[None])} for image in x],
    }
    with pytest.raises(ValueError, match=r"cannot read the number|A detection model"):
        wfilter.apply_weight_filtering(Net(forms[form]).double(), example_input=x)
    if form != "boxes":
        wf = wfilter.apply_weight_filtering(Net(forms[form]).double(), CLASSES, example_input=x)
        for use in (wfilter.untrain, wfilter.evaluate):
            with pytest.raises(ValueError, match="needs logits of shape"):
                use(wf, [(x, LABELS.clamp(0))])


def test_filters_made_in_inference_mode_can_be_trained(x):
    model = Net(lambda model, x: model.body(x)).double()
    with torch.inference_mode():
        wf = wfilter.apply_weight_filtering(model, example_input=x)
    wf(x, forget=1).sum().backward()
    assert wf.alphas.grad.abs().sum() > 0


# ---- axes, what vmap cannot run ------------------------------------------------


def test_a_linear_function_with_a_vector_is_right(x):
    class Vector(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(192))
            self.head = nn.Linear(1, CLASSES)

        def forward(self, x):
            return self.head(F.linear(x.flatten(1), self.weight)[:, None])

    wf = apply(randomise(Vector()), x, targets="weight")
    with torch.no_grad():
        close(wf(x, forget=LABELS), by_hand(wf, x, LABELS))


@torch.no_grad()
def test_outputs_whose_batch_is_not_first_keep_their_shape_on_every_path(x):
    class Across(Net):
        def __init__(self):
            super().__init__(None)
            self.shift = nn.Parameter(torch.rand(5))

        def forward(self, x):
            hidden = self.inner(self.conv(x).mean((2, 3))) + self.shift
            return {"logits": self.head(hidden), "hidden": hidden.t()}

    for targets in ("conv.*", "*"):
        wf = apply(randomise(Across()), x, targets=targets)
        output = wf(x, forget=LABELS)
        assert output["hidden"].shape == (5, 6)
        alone = [wf(image[None], forget=row[None])["hidden"] for image, row in zip(x, LABELS)]
        close(output["hidden"], torch.cat(alone, 1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(24, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(x.flatten(2).transpose(1, 2).reshape(len(x), 8, 24))[0][:, -1])


def masked(model, x):
    flat = x.clone()
    flat[flat < 0.5] = 0
    return model.body(flat)


def branches(model, x):
    return torch.cat([m if m.sum() > 0 else 2 * m for m in model.body(x).split(1)])


@pytest.mark.parametrize("odd", [masked, branches], ids=["boolean mask", "branches on values"])
@pytest.mark.parametrize("granularity", ["out", "element"])
def test_what_vmap_cannot_run_runs_one_sample_at_a_time(odd, granularity, x):
    wf = apply(randomise(Net(odd)), x, granularity=granularity)
    with torch.no_grad():
        alone = [wf(image[None], forget=row[None]) for image, row in zip(x, LABELS)]
        close(wf(x, forget=LABELS), torch.cat(alone))
    assert wf.verify(x, LABELS).popitem()[1] < 1e-9


def test_a_recurrent_network_is_right_one_sample_at_a_time(x):
    wf = apply(randomise(Recurrent()), x, targets="head.*")
    with torch.no_grad():
        close(wf(x, forget=LABELS), by_hand(wf, x, LABELS))
    wf = wfilter.remove_weight_filtering(wf)
    wf = apply(wf, x, targets="lstm.*")
    with torch.no_grad():
        close(wf(x, forget=LABELS), by_hand(wf, x, LABELS))


class Experts(nn.Module):
    """Each sample goes to one of two convolutions; NaN, as in an inspection, to neither."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        bright = x.mean((1, 2, 3))
        y = x.new_zeros(len(x), 4, x.shape[2] - 2, x.shape[3] - 2)
        for expert, chosen in (
            (self.first, bright > self.threshold),
            (self.second, bright <= self.threshold),
        ):
            y[chosen] = expert(x[chosen])
        return self.head(y.mean((2, 3)))


@pytest.mark.parametrize("threshold", [-100.0, 0.4, 0.5, 0.6, 100.0])
def test_experts_to_which_an_inspection_routes_no_image_are_right(threshold, x):
    wf = apply(randomise(Experts(threshold)), x, targets=["first.*", "second.*"])
    with torch.no_grad():
        close(wf(x, forget=LABELS), by_hand(wf, x, LABELS))


# ---- training mode, gradients -------------------------------------------------------------------


def test_training_mode_of_a_part_is_noticed(x):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    wf = apply(model.double(), x)
    compiled = torch.compile(wf, backend="eager")
    compiled(x, LABELS)
    wf.base[1].train()
    for call in (lambda: wf(x), lambda: wf(x, forget=1), lambda: compiled(x, LABELS)):
        with pytest.raises(RuntimeError, match=r"BatchNorm2d.*Call wf\.base\.eval\(\)"):
            call()


def test_gradients_to_images_through_checkpointing_are_refused_with_frozen_alphas(x):
    model = Net(lambda m, x: m.body(x))
    model.grad_checkpointing = True
    wf = apply(randomise(model), x).requires_grad_(False)
    image = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="gradient checkpointing is on"):
        wf(image, forget=1)
    model.grad_checkpointing = False
    wf(image, forget=LABELS).sum().backward()
    hand = x.clone().requires_grad_()
    by_hand(wf, hand, LABELS).sum().backward()
    close(image.grad, hand.grad)
