"""Networks run from their first gate that moves on give the logits of the whole network."""

import torch
from torch import nn

import wfilter
from helpers import apply, images, tiny
from wfilter.untraining.kept import Blend, Kept
from wfilter.untraining.prefix import record


class Shortcut(nn.Module):
    """A part before the gates is read again after them, and one function changes it in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.first(x).relu_()
        return self.head(torch.relu(self.second(h)) + h)


class ReadsValues(Shortcut):
    """Python looks at a value of the image's part, which a replay does not have."""

    def forward(self, x):
        h = self.first(x)
        return self.head(self.second(h) * (2.0 if float(h.abs().sum()) > 0 else 1.0))


def pinned(model, *open_ones):
    wf = wfilter.apply_weight_filtering(model.eval(), targets="*", example_input=torch.ones(1, 6))
    wf.pin_open([t.name for t in wf.targets if t.name.startswith(open_ones)])
    moving = wf.alphas.detach() < 100
    with torch.no_grad():
        wf.alphas[moving] = torch.randn(int(moving.sum()))
    return wf


def test_a_replay_has_the_logits_and_gradients_of_the_whole_forward():
    torch.manual_seed(0)
    wf = pinned(Shortcut(), "first")
    x, forget = torch.randn(5, 6), torch.tensor([0, 1, 2, 3, -1])
    prefix = record(wf, wf.alphas, x, forget)
    assert len(prefix.needed) == 2  # before the second layer's gates, and around them
    prefix.exact = True
    others = torch.randn(5, 6)
    with torch.no_grad():
        _, kept = prefix.values(others, forget)
    found = []
    for logits in (prefix.logits(kept, forget), wf(others, forget)):
        wf.alphas.grad = None
        logits.square().sum().backward()
        found.append((logits.detach(), wf.alphas.grad.clone()))
    torch.testing.assert_close(found[0], found[1])


def test_a_replay_is_right_for_other_gates_and_sets_than_the_recorded_ones():
    x = images(6, 3, 8, 8)
    wf = apply(tiny("cnn"), x[:2])
    forget = torch.arange(6) % wf.num_classes
    prefix = record(wf, wf.alphas, x, forget)
    with torch.no_grad():
        _, kept = prefix.values(x, forget)
        wf.alphas.copy_(torch.randn_like(wf.alphas))
        sets = torch.rand(6, wf.num_classes) < 0.5
        torch.testing.assert_close(
            prefix.logits(kept, sets).float(), wf(x, sets).float(), rtol=0.02, atol=0.01
        )


def test_a_model_with_images_on_another_axis_goes_without():
    x = images(6, 3, 8, 8)
    wf = apply(tiny("attention"), x[:2])  # its projections have (length, batch, width)
    assert record(wf, wf.alphas, x, torch.arange(6) % wf.num_classes) is None


def test_a_model_that_reads_values_of_the_image_goes_without_or_stays_right():
    torch.manual_seed(0)
    wf = pinned(ReadsValues(), "first")
    x, forget = torch.randn(5, 6), torch.arange(5) % 4
    assert record(wf, wf.alphas, x, forget) is None
    kept = Kept(wf, wf.alphas, x.__getitem__, 5)
    kept.fill([4, 2])
    assert "runs the whole network" in kept.where
    with torch.no_grad():
        torch.testing.assert_close(kept.logits(torch.arange(5), forget), wf(x, forget))


@torch.no_grad()
def test_kept_images_of_any_number_are_blended_and_padded(monkeypatch):
    torch.manual_seed(0)
    wf = pinned(Shortcut(), "first")
    x = torch.randn(11, 6)
    for most in (2**30, 0):  # in memory, on disk
        monkeypatch.setattr("wfilter.untraining.kept.IN_MEMORY", most)
        kept = Kept(wf, wf.alphas, x.__getitem__, 11)
        base = kept.fill([8, 2])
        torch.testing.assert_close(base, wf(x), rtol=0.01, atol=0.01)
        assert ("in memory" if most else "on disk") in kept.where
        index, forget = torch.tensor([10, 3, 3, 0, 7, 1, 2, 4, 5, 6]), torch.arange(10) % 4
        torch.testing.assert_close(
            kept.logits(index, forget), wf(x[index], forget), rtol=0.01, atol=0.01
        )
        whole = Blend(index.flip(0), torch.zeros(10))  # all of the other image
        torch.testing.assert_close(
            kept.logits(index, forget, whole), wf(x[index.flip(0)], forget), rtol=0.01, atol=0.01
        )
