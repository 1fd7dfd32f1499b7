"""A forward runs the base model itself, its own modules, and leaves it as it is."""

import threading
from typing import ClassVar

import pytest
import torch
from torch import nn

import wfilter

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


class ByIdentity(Net):
    """Keeps tables by the identity of its layers, as functions with a cache do."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = {id(self.conv): 2.0, id(self.fc): 3.0}

    def forward(self, x):
        y = self.norm(self.conv(x) * self.scales[id(self.conv)]).relu().mean((2, 3))
        return self.fc(y) * self.scales[id(self.fc)]


@pytest.mark.parametrize("kind", [InAList, ByMethod, ByClosure, Counts, ByIdentity])
def test_layers_that_a_model_knows_otherwise_than_as_children_are_gated(kind):
    wf = filtered(kind())
    assert max(wf.verify(IMAGES, LABELS).values()) < 1e-5
    plain, gated = wf(IMAGES), wf(IMAGES, LABELS)
    assert torch.equal(gated[1], plain[1])
    assert not torch.allclose(gated[0], plain[0])


class Registered(nn.Module):
    """A layer that keeps a number in a registry of its file, by its identity."""

    registry: ClassVar[dict[int, float]] = {}

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), scale

    def forward(self, x):
        return self.fc(x) * self.registry.setdefault(id(self), self.scale)


def test_layers_keep_their_identity_from_call_to_call():
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), Registered(1), Registered(2))
    wf = filtered(net)
    labels = torch.tensor([1, -1, 0])
    answers = [wf(IMAGES, labels) for _ in range(20)]
    assert len(Registered.registry) == 2
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_what_a_model_sets_on_itself_in_a_forward_stays():
    wf = filtered(Counts())
    before = wf.base.calls
    wf(IMAGES, LABELS)
    assert wf.base.calls == before + 1


def test_hooks_get_the_module_they_were_put_on():
    wf, seen = filtered(Net()), []
    plain = wf(IMAGES, LABELS)
    wf.base.fc.register_forward_hook(lambda module, args, output: seen.append(module))
    assert torch.equal(wf(IMAGES, LABELS), plain)
    assert seen == [wf.base.fc]


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
