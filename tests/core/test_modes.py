"""Outputs scaled by gates: what may be changed in place, and batches no inspection foresaw."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from helpers import apply, close, images, tiny


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch.func.jvp's own
@pytest.mark.parametrize("forget", [torch.tensor([1, -1, 2]), 1], ids=["mixed", "one row"])
def test_outputs_are_scaled_in_place_only_where_nothing_needs_them(wf, x, forget):
    expected = wf(x[:3], forget=forget)
    assert expected.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(wf(x[:3], forget=forget), expected)
    with torch.inference_mode():
        torch.testing.assert_close(wf(x[:3], forget=forget), expected.detach())
    wf.alphas.requires_grad_(False)
    value, tangent = torch.func.jvp(lambda images: wf(images, forget=forget), (x[:3],), (x[:3],))
    torch.testing.assert_close(value, expected.detach())
    moved = torch.autograd.functional.jvp(lambda i: wf(i, forget=forget), x[:3], x[:3])[1]
    torch.testing.assert_close(tangent, moved)


class Split(nn.Module):
    """Runs its batch in parts."""

    def __init__(self, model, size):
        super().__init__()
        self.model, self.size = model, size

    def forward(self, x):
        return torch.cat([self.model(part) for part in x.split(self.size)])


@pytest.mark.parametrize("name", ["cnn", "batch-major windows", "batch-minor windows"])
@torch.no_grad()
def test_model_that_splits_large_batches_is_right_below_and_refused_above(name):
    wf = apply(Split(tiny(name), 12), images(1, 3, 8, 8), targets="model.[!h]*")
    x, labels = images(12, 3, 8, 8), torch.arange(12) % 5 - 1
    close(wf(x, forget=labels), reference.logits(wf, x, labels))
    with pytest.raises(RuntimeError, match=r"entries for 24 samples, where the inspection saw \d"):
        wf(torch.cat([x, x]), forget=torch.cat([labels, labels]))


@pytest.mark.parametrize("name", ["cnn", "batch-major windows", "batch-minor windows"])
@torch.no_grad()
def test_model_that_splits_a_batch_of_the_proof_is_right_in_every_batch(name):
    wf = apply(Split(tiny(name), 8), images(1, 3, 8, 8), targets="model.[!h]*")
    x, labels = images(20, 3, 8, 8), torch.arange(20) % 5 - 1
    close(wf(x, forget=labels), reference.logits(wf, x, labels))


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_the_gates_of_many_layers_are_shaped_and_split_in_one_call():
    x = images(4, 3, 8, 8)
    depth = 6
    layers = [nn.Conv2d(3, 3, 3, padding=1, bias=False, dtype=x.dtype) for _ in range(depth)]
    wf = apply(nn.Sequential(*layers, nn.Flatten()), x, targets="*")
    labels = torch.tensor([0, 1, 2, -1])
    with Counted() as base:
        wf(x)
    with Counted() as mixed:
        wf(x, forget=labels)
    added = mixed.calls - base.calls
    assert added["mul_.Tensor"] == depth
    assert added["split_with_sizes"] == added["embedding"] == added["sigmoid"] == 1
    assert sum(added.values()) <= depth + 16
