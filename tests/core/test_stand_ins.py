"""Eager forwards on copies: what stands in for parameters, and when the mode takes over."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import wfilter
from wfilter.core.modes import GateMode
from wfilter.core.stand_ins import StandIn

IMAGES = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([2, -1, 0])


class Net(nn.Module):
    """Two layers; subclasses change how they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


def filtered(net: nn.Module, targets: str = "*") -> wfilter.FilteredModel:
    torch.manual_seed(0)
    wf = wfilter.apply_weight_filtering(net.eval(), targets=targets, example_input=IMAGES[:1])
    with torch.no_grad():
        wf.alphas.copy_(torch.randn(wf.alphas.shape))
    return wf


def plan_of(wf):
    """What the paths keep of the copies, after a call."""
    (kept,) = wf.known.sites.values()
    return kept.copies


def runs_mode(wf, monkeypatch, call) -> tuple[object, bool]:
    """The result of a call, and whether a gating mode was entered in it."""
    entered = []
    right = GateMode.__enter__

    def enter(mode):
        entered.append(mode)
        return right(mode)

    with monkeypatch.context() as patch:
        patch.setattr(GateMode, "__enter__", enter)
        result = call()
    return result, bool(entered)


@pytest.mark.parametrize("forget", [LABELS, 3, {1, 4}, torch.rand(3, 5) < 0.5], ids=str)
def test_a_forward_enters_no_mode_and_equals_the_oracle(forget, monkeypatch):
    wf = filtered(Net())
    with torch.no_grad():
        _, entered = runs_mode(wf, monkeypatch, lambda: wf(IMAGES, forget))
        with wf.forgetting(3):
            _, inside = runs_mode(wf, monkeypatch, lambda: wf(IMAGES))
    assert (entered, inside) == (False, False)
    assert max(wf.verify(IMAGES, forget).values()) < 1e-5


def test_copies_and_mode_give_the_same_bits_and_gradients():
    found, net = [], Net()
    for hooked in (False, True):
        wf = filtered(copy.deepcopy(net))
        if hooked:
            wf.base.conv.register_forward_hook(lambda module, args, output: None)
        logits = wf(IMAGES, LABELS)
        logits.square().sum().backward()
        found.append((logits.detach(), wf.alphas.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_another_thread_sees_the_base_model_as_it_is_during_a_call():
    inside, done = threading.Event(), threading.Event()

    class Waits(Net):
        waits = False

        def forward(self, x):
            y = self.conv(x)
            if type(self).waits:
                inside.set()
                done.wait(10)
            return self.fc(self.norm(y).relu().mean((2, 3)))

    wf = filtered(Waits())
    plain, gated = wf(IMAGES), wf(IMAGES, LABELS)
    parameters, state = dict(wf.base.named_parameters()), dict(vars(wf.base.conv))
    Waits.waits, answers = True, []
    thread = threading.Thread(target=lambda: answers.append(wf(IMAGES, LABELS)))
    thread.start()
    assert inside.wait(10)
    Waits.waits = False
    during = wf.base(IMAGES)
    now = dict(wf.base.named_parameters())
    same_state = all(vars(wf.base.conv)[name] is value for name, value in state.items())
    done.set()
    thread.join()
    assert torch.equal(during, plain)
    assert now.keys() == parameters.keys()
    assert all(now[name] is parameters[name] for name in now)
    assert same_state
    assert torch.equal(answers[0], gated)


class InAList(Net):
    """Calls a layer that it also keeps in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.others = {"last": [self.fc]}

    def forward(self, x):
        return self.others["last"][0](self.norm(self.conv(x)).relu().mean((2, 3)))


class ByMethod(Net):
    """Keeps a method of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.fc.forward

    def forward(self, x):
        return self.last(self.norm(self.conv(x)).relu().mean((2, 3)))


class ByClosure(Net):
    """Keeps a function that encloses a layer."""

    def __init__(self) -> None:
        super().__init__()
        fc = self.fc
        self.last = lambda x: fc(x)

    def forward(self, x):
        return self.last(self.norm(self.conv(x)).relu().mean((2, 3)))


class Counts(Net):
    """Sets an attribute of its own in each forward."""

    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [InAList, ByMethod, ByClosure, Counts])
def test_models_with_other_ways_to_their_layers_run_under_the_mode(kind, monkeypatch):
    wf = filtered(kind())
    wf(IMAGES, LABELS)
    before = wf.base.calls if kind is Counts else 0
    _, entered = runs_mode(wf, monkeypatch, lambda: wf(IMAGES, LABELS))
    assert entered
    assert max(wf.verify(IMAGES, LABELS).values()) < 1e-5
    if kind is Counts:
        assert wf.base.calls > before


def test_a_use_without_a_rule_on_a_rare_way_ends_the_copies(monkeypatch):
    class Rare(Net):
        rare = False

        def forward(self, x):
            y = super().forward(x)
            return y + self.fc.weight.sum() if type(self).rare else y

    wf = filtered(Rare())
    wf(IMAGES, LABELS)
    assert plan_of(wf).is_safe
    Rare.rare = True
    found, entered = runs_mode(wf, monkeypatch, lambda: wf(IMAGES, LABELS))
    assert entered
    assert not plan_of(wf).is_safe
    again, entered = runs_mode(wf, monkeypatch, lambda: wf(IMAGES, LABELS))
    assert entered
    assert torch.equal(found, again)


def test_an_error_of_the_model_itself_is_raised_and_ends_nothing():
    wf = filtered(Net())
    wf(IMAGES, LABELS)
    with pytest.raises(RuntimeError, match=r"same dtype|expected|type"):
        wf(IMAGES.double(), LABELS)
    assert plan_of(wf).is_safe


def test_hooks_get_the_module_they_were_put_on_and_a_users_mode_its_parameters():
    wf, seen = filtered(Net()), []
    plain = wf(IMAGES, LABELS)
    handle = wf.base.fc.register_forward_hook(lambda module, args, output: seen.append(module))
    assert torch.equal(wf(IMAGES, LABELS), plain)
    handle.remove()
    assert seen == [wf.base.fc]

    class Spy(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.extend(value for value in args if type(value) is StandIn)
            return func(*args, **(kwargs or {}))

    with Spy():
        assert torch.equal(wf(IMAGES, LABELS), plain)
    assert len(seen) == 1


def test_changes_of_the_base_model_hold_from_the_next_call_on():
    wf = filtered(Net())
    with torch.no_grad():
        wf(IMAGES, LABELS)
        wf.base.norm.eps = 0.5
        wf.base.fc.weight.mul_(2)
        wf.double()
        assert max(wf.verify(IMAGES.double(), LABELS).values()) < 1e-12
    wf.base.fc = nn.Linear(4, 5)
    with pytest.raises(RuntimeError, match="not gated"):
        wf.float()(IMAGES, LABELS)


def test_a_shared_layer_is_one_copy():
    shared = nn.Linear(4, 4)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), shared, nn.ReLU(), shared)
    wf = filtered(net)
    wf(IMAGES, torch.tensor([1, -1, 0]))
    assert len(plan_of(wf).modules) == 3
    assert max(wf.verify(IMAGES, torch.tensor([1, -1, 0])).values()) < 1e-5
