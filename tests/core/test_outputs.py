"""The one seam for what models return: where the logits are, and how the rest is carried along."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import wfilter
from wfilter.core.outputs import batch_axes, join, logits_of, take_apart

LOGITS, EXTRA = torch.arange(6.0).view(2, 3), torch.ones(2, 8)


@dataclass
class Answer:
    logits: torch.Tensor
    features: torch.Tensor | None = None
    temperature: float = 1.0


Pair = namedtuple("Pair", "scores extra")

RETURNED = {
    "tensor": LOGITS,
    "tuple": (LOGITS, None),
    "list": [LOGITS, EXTRA],
    "loss first": (torch.tensor(0.5), LOGITS),
    "named tuple": Pair(LOGITS, EXTRA),
    "dict": {"features": EXTRA, "logits": LOGITS},
    "ordered dict": OrderedDict(out=LOGITS, aux=EXTRA),
    "dataclass": Answer(LOGITS, EXTRA, 2.0),
    "nested": {"logits": LOGITS, "hidden": (EXTRA, [EXTRA])},
}


@pytest.mark.parametrize("output", RETURNED.values(), ids=RETURNED)
def test_logits_are_found_in_whatever_a_model_returns(output):
    assert logits_of(output) is LOGITS


@pytest.mark.parametrize("output", RETURNED.values(), ids=RETURNED)
def test_an_output_taken_apart_is_built_again_with_other_tensors_in_their_places(output):
    tensors, rebuild = take_apart(output)
    again = rebuild([tensor + 1 for tensor in tensors])
    assert type(again) is type(output)
    torch.testing.assert_close(logits_of(again), LOGITS + 1)
    assert len(take_apart(again)[0]) == len(tensors)


def test_what_is_no_tensor_stays_as_it_is():
    _, rebuild = take_apart(Answer(LOGITS, None, 2.0))
    assert rebuild([LOGITS]).temperature == 2.0
    assert rebuild([LOGITS]).features is None


def test_an_output_without_a_clear_place_for_logits_is_refused_in_words():
    with pytest.raises(TypeError, match="named 'logits'"):
        logits_of({"a": LOGITS, "b": EXTRA})


def test_outputs_of_single_samples_are_joined_along_the_axis_that_holds_samples():
    batch = {"logits": LOGITS, "by_class": LOGITS.T, "scale": torch.ones(4)}
    single = [
        {"logits": LOGITS[i : i + 1], "by_class": LOGITS.T[:, i : i + 1], "scale": torch.ones(4)}
        for i in range(2)
    ]
    axes = batch_axes(take_apart(batch)[0], take_apart(single[0])[0])
    assert axes == (0, 1, None)
    torch.testing.assert_close(join(single, axes), batch)


class Returns(nn.Module):
    """A linear classifier that returns its logits in some form."""

    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(4, 3), form

    def forward(self, x):
        return self.form(self.layer(x), x)


FORMS = {
    "tuple": lambda logits, x: (logits, None),
    "dict": lambda logits, x: {"logits": logits, "seen": x},
    "dataclass": Answer,
    "named tuple": Pair,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_filtered_model_returns_the_form_of_its_base_model(form):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    wf = wfilter.apply_weight_filtering(Returns(form), targets="*", example_input=x)
    output = wf(x, forget=torch.tensor([0, 1, 2, -1, 1]))
    assert type(output) is type(wf.base(x))
    assert max(wf.verify(x, torch.tensor([0, 1, 2, -1, 1])).values()) < 1e-5
    torch.testing.assert_close(logits_of(output)[3], logits_of(wf.base(x))[3])
