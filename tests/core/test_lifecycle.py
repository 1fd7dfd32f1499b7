"""The life of a filtered model: any operation after any other, in any order.

A state machine draws operations; after each one the base weights are bit for bit those the model
began with, nothing of wfilter is left on it where nothing should be, and every answer is that of
``reference.py``.
"""

import copy
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn

import reference
import wfilter
from helpers import CLASSES, images, randomise, shuffle_alphas, tiny
from wfilter.core import filters

NAMES = ("ant", "bee", "cow", "dog")
ROWS = st.integers(0, CLASSES - 1)


class Small(nn.Module):
    """A convolution, BatchNorm and a head, on 4 x 4 images."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).tanh().mean((2, 3)))


class Mixed(nn.Module):
    """One layer run once for the whole batch: the filters take the exact path."""

    def __init__(self):
        super().__init__()
        self.register_buffer("grid", torch.rand(16, 2))
        self.table = nn.Linear(2, 1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head((x.flatten(1) * self.table(self.grid).t()).tanh())


MODELS = {"fused": Small, "exact": Mixed}
sets = st.frozensets(ROWS)
one_for_all = st.one_of(ROWS, st.sampled_from(NAMES), sets, st.frozensets(st.sampled_from(NAMES)))


def per_sample(batch: int):
    labels = st.lists(st.integers(-1, CLASSES - 1), min_size=batch, max_size=batch)
    matrix = st.lists(sets, min_size=batch, max_size=batch)
    return st.one_of(labels.map(torch.tensor), matrix.map(as_matrix))


def as_matrix(chosen) -> torch.Tensor:
    return torch.tensor([[row in members for row in range(CLASSES)] for members in chosen])


def rows_of(forget) -> list[int]:
    """One class or set as rows."""
    members = [forget] if isinstance(forget, (int, str)) else list(forget)
    return [NAMES.index(m) if isinstance(m, str) else m for m in members]


def classes_per_sample(forget, batch: int) -> torch.Tensor:
    """Any kind of forget as the bool matrix the reference takes."""
    if isinstance(forget, torch.Tensor):
        return forget
    rows = [] if forget is None else rows_of(forget)
    return as_matrix([rows] * batch)


def traces(model: nn.Module) -> list[str]:
    """What wfilter or parametrize left on a model."""
    found = [f"{n} is {type(m).__name__}" for n, m in model.named_modules() if foreign(m)]
    found += [f"hook on {n}" for n, m in model.named_modules() if m._forward_hooks]
    found += [f"pre-hook on {n}" for n, m in model.named_modules() if m._forward_pre_hooks]
    return found


def foreign(module: nn.Module) -> bool:
    return "Parametrized" in type(module).__name__ or "forward" in vars(module)


class Life(RuleBasedStateMachine):
    """A model, with or without filters on it, and what it must be equal to."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.wf = None
        self.count = 0

    def teardown(self):
        self.folder.cleanup()

    # ---- beginnings and ends --------------------------------------------------------------------

    @precondition(lambda self: self.wf is None)
    @rule(kind=st.sampled_from(sorted(MODELS)), element=st.booleans(), training=st.booleans())
    def apply(self, kind, element, training):
        torch.manual_seed(0)
        self.base = randomise(MODELS[kind]()).train(training)
        self.base.head.bias.requires_grad_(False)
        self.training, self.kind = training, kind
        self.weights = {n: v.clone() for n, v in self.base.state_dict().items()}
        self.wf = wfilter.apply_weight_filtering(
            self.base,
            targets="*",
            granularity="element" if element else "out",
            class_names=NAMES,
            example_input=images(1, 1, 4, 4),
        )
        shuffle_alphas(self.wf)

    @precondition(lambda self: self.wf is not None)
    @rule(by_base=st.booleans())
    def remove(self, by_base):
        wf, self.wf = self.wf, None
        removed = wfilter.remove_weight_filtering(wf.base if by_base else wf)
        assert removed is wf.base
        self.check_plain(removed, self.training)
        with pytest.raises(RuntimeError, match="were removed"):
            wf(images(1, 1, 4, 4), forget=1)
        with pytest.raises(RuntimeError, match="has no filters"):
            wfilter.remove_weight_filtering(wf)

    def check_plain(self, model, training):
        assert not traces(model)
        assert not filters.is_marked(model)
        assert all(module.training == training for module in model.modules())
        wanted = {name: name != "head.bias" for name, _ in model.named_parameters()}
        assert {n: p.requires_grad for n, p in model.named_parameters()} == wanted
        assert all(p.grad is None for p in model.parameters())

    # ---- answers --------------------------------------------------------------------------------

    def check(self, forget, batch=3, *, outside=None):
        """A forward equals the reference on a copy that no block touches."""
        self.count += 1
        x = images(batch, 1, 4, 4, seed=self.count)
        with torch.no_grad():
            answer = self.wf(x, forget=forget)
            expected = reference.logits(outside or self.wf, x, classes_per_sample(forget, batch))
        scale = expected.abs().max().clamp(min=1e-30)
        torch.testing.assert_close(answer / scale, expected / scale, atol=1e-9, rtol=0)

    @precondition(lambda self: self.wf is not None)
    @rule(forget=st.one_of(st.none(), one_for_all), batch=st.integers(1, 4))
    def forward_for_all(self, forget, batch):
        self.check(forget, batch)

    @precondition(lambda self: self.wf is not None)
    @rule(data=st.data(), batch=st.integers(1, 4))
    def forward_per_sample(self, data, batch):
        self.check(data.draw(per_sample(batch)), batch)

    @precondition(lambda self: self.wf is not None)
    @rule(
        bad=st.sampled_from(
            [
                *(7, -1, "elk", True, 1.5, {0, 9}, [0, 1], object()),
                *(torch.tensor([0, 9, 0]), torch.tensor([-2, 0, 0]), torch.zeros(3)),
                *(torch.zeros(2).long(), torch.ones(3, 2).bool()),
            ]
        )
    )
    def refused_forward(self, bad):
        with pytest.raises((ValueError, TypeError), match="forget"):
            self.wf(images(3, 1, 4, 4), forget=bad)

    @precondition(lambda self: self.wf is not None)
    @rule(forget=one_for_all)
    def backward(self, forget):
        self.wf(images(2, 1, 4, 4), forget=forget).sum().backward()
        self.wf.alphas.grad = None

    # ---- blocks ---------------------------------------------------------------------------------

    @precondition(lambda self: self.wf is not None)
    @rule(
        blocks=st.lists(st.one_of(st.none(), one_for_all), min_size=1, max_size=3),
        inner=per_sample(3),
        fault=st.sampled_from(["none", "mine", "forget", "shape", "refused"]),
    )
    def nested_blocks(self, blocks, inner, fault):
        outside = copy.deepcopy(self.wf)
        try:
            self.enter(blocks, inner, fault, outside)
        except (KeyError, ValueError, RuntimeError):
            assert fault != "none"
        else:
            assert fault in ("none", "refused")

    def enter(self, blocks, inner, fault, outside):
        """Open the blocks one in the other, look around in the innermost, and break there."""
        if blocks:
            with self.wf.forgetting(blocks[0]):
                self.see(blocks[0], outside)
                self.enter(blocks[1:], inner, fault, outside)
                self.see(blocks[0], outside) if fault == "none" else None
            return
        self.check(inner, outside=outside)
        if fault == "mine":
            raise KeyError("mine")
        if fault == "forget":
            self.wf(images(3, 1, 4, 4), forget=torch.tensor([0, 9, 0]))
        if fault == "shape":
            self.wf(images(3, 7, 4, 5))
        if fault == "refused":
            self.refused_inside()

    def see(self, forget, outside):
        x = images(2, 1, 4, 4)
        with torch.no_grad():
            expected = reference.logits(outside, x, classes_per_sample(forget, 2))
            for answer in (self.wf(x), self.wf.base(x)):
                torch.testing.assert_close(answer, expected, atol=1e-9, rtol=1e-9)

    def refused_inside(self):
        """What needs plain weights is refused in a block, and then changes nothing."""
        base = self.wf.base
        for action in (
            lambda: wfilter.remove_weight_filtering(self.wf),
            lambda: wfilter.remove_weight_filtering(base),
            lambda: self.wf.bake(0),
            lambda: self.wf.save(Path(self.folder.name) / "in_a_block"),
            lambda: copy.deepcopy(self.wf),
            lambda: pickle.dumps(self.wf),
        ):
            with pytest.raises(RuntimeError, match="inside a forgetting block"):
                action()
        with pytest.raises(RuntimeError, match="already has a filter"):
            wfilter.apply_weight_filtering(base, example_input=images(1, 1, 4, 4))

    # ---- changes of state -----------------------------------------------------------------------

    @precondition(lambda self: self.wf is not None)
    @rule(seed=st.integers(0, 9), hard=st.booleans())
    def change_alphas(self, seed, hard):
        shuffle_alphas(self.wf, seed)
        if hard:
            with torch.no_grad():
                self.wf.alphas.copy_(self.wf.alphas.sign() * wfilter.core.gates.HARD)

    @precondition(lambda self: self.wf is not None)
    @rule(mode=st.booleans())
    def train_or_eval(self, mode):
        self.wf.train(mode)
        assert self.wf.training == mode

    @precondition(lambda self: self.wf is not None)
    @rule(dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), row=ROWS)
    def to_another_dtype_and_back(self, dtype, row):
        """A conversion rounds the weights, so the copy is converted, used and thrown away."""
        other = copy.deepcopy(self.wf).to(dtype)
        with torch.no_grad():
            assert other(images(2, 1, 4, 4).to(dtype), forget=row).dtype == dtype
        other.double()
        x = images(2, 1, 4, 4)
        with torch.no_grad():
            expected = reference.logits(other, x, torch.tensor([row, row]))
            torch.testing.assert_close(other(x, forget=row), expected, atol=1e-9, rtol=1e-9)

    @precondition(lambda self: self.wf is not None)
    @rule(how=st.sampled_from(["deepcopy", "pickle"]))
    def go_on_with_a_copy(self, how):
        old = self.wf
        self.wf = copy.deepcopy(old) if how == "deepcopy" else pickle.loads(pickle.dumps(old))
        assert torch.equal(old.alphas, self.wf.alphas)
        self.check_plain(wfilter.remove_weight_filtering(old), self.training)

    @precondition(lambda self: self.wf is not None)
    @rule()
    def save_and_go_on_with_what_is_loaded(self):
        path = self.wf.save(Path(self.folder.name) / "filters.safetensors")
        alphas, old = self.wf.alphas.detach().clone(), self.wf
        with pytest.raises(RuntimeError, match="already has a filter"):
            wfilter.load(path, old.base, example_input=images(1, 1, 4, 4))
        plain = wfilter.remove_weight_filtering(old)
        self.wf = wfilter.load(path, plain, example_input=images(1, 1, 4, 4))
        assert torch.equal(self.wf.alphas, alphas)
        assert self.wf.class_names == NAMES
        self.wf.pin_open([])

    @precondition(lambda self: self.wf is not None)
    @rule(forget=one_for_all)
    def bake(self, forget):
        baked = self.wf.bake(forget)
        assert type(baked) is type(self.wf.base)
        self.check_plain(baked, training=False)
        x = images(2, 1, 4, 4)
        with torch.no_grad():
            expected = reference.filtered_copy(self.wf, rows_of(forget))(x)
            torch.testing.assert_close(baked(x), expected, atol=1e-9, rtol=1e-9)
            for parameter in baked.parameters():
                parameter.zero_()  # the base model must not notice

    # ---- what holds at every moment -------------------------------------------------------------

    @precondition(lambda self: self.wf is not None)
    @invariant()
    def base_model_is_untouched(self):
        state = self.wf.base.state_dict()
        assert list(state) == list(self.weights)
        assert all(torch.equal(state[name], value) for name, value in self.weights.items())
        assert not traces(self.wf.base)
        assert not any(module.training for module in self.wf.base.modules())
        assert not any(p.requires_grad for p in self.wf.base.parameters())
        assert self.wf.open_blocks == 0
        assert not torch.overrides._get_current_function_mode_stack()


def lives(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class TestLife(Life.TestCase):
    settings = lives(20, 25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestLongLives(Life.TestCase):
    settings = lives(250, 50)


def test_filters_are_not_removed_by_way_of_the_base_model_inside_a_block(x):
    wf = wfilter.apply_weight_filtering(tiny("cnn"), example_input=x)
    with wf.forgetting(1), pytest.raises(RuntimeError, match="inside a forgetting block"):
        wfilter.remove_weight_filtering(wf.base)
    base = wfilter.remove_weight_filtering(wf.base)
    assert all(parameter.requires_grad for parameter in base.parameters())


@torch.no_grad()
def test_filters_with_rounded_gates_are_the_same_after_save_and_load(tmp_path, x):
    wf = shuffle_alphas(wfilter.apply_weight_filtering(tiny("cnn"), example_input=x))
    wf.hard = True
    path = wf.save(tmp_path / "filters.safetensors")
    loaded = wfilter.load(path, tiny("cnn"), example_input=x)
    assert loaded.hard
    assert torch.equal(loaded(x, forget=2), wf(x, forget=2))


@pytest.mark.parametrize("prune", [False, True])
def test_a_model_given_in_training_mode_is_baked_in_eval_mode(prune):
    # In training mode BatchNorm would bring gated channels back to their scale, and the class too.
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 4)
    ).train()
    images = torch.randn(5, 3, 8, 8)
    wf = wfilter.apply_weight_filtering(model, targets="0.weight", example_input=images[:1])
    with torch.no_grad():
        wf.alphas[2, :3] = -1.0
        wf.alphas[2, 3:] = -200.0  # exactly 0: pruning has something to take out
    baked = wf.bake(forget=2, prune=prune, example_input=images[:1])
    assert not any(module.training for module in baked.modules())
    torch.testing.assert_close(baked(images), wf(images, forget=2), rtol=1e-4, atol=1e-5)
