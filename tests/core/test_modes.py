"""Outputs scaled by gates: what may be changed in place, and batches the probe did not foresee."""

import pytest
import torch
from torch import nn

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
    """Runs its batch in parts of eight."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return torch.cat([self.model(part) for part in x.split(8)])


@pytest.mark.parametrize("name", ["cnn", "batch-major windows", "batch-minor windows"])
@torch.no_grad()
def test_model_that_splits_large_batches_is_right_below_and_refused_above(name):
    wf = apply(Split(tiny(name)), images(1, 3, 8, 8), targets="model.[!h]*")
    x, labels = images(8, 3, 8, 8), torch.arange(8) % 5 - 1
    close(wf(x, forget=labels), reference.logits(wf, x, labels))
    with pytest.raises(RuntimeError, match=r"entries for 16 samples, where the inspection saw \d"):
        wf(torch.cat([x, x]), forget=torch.cat([labels, labels]))
