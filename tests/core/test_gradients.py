"""Gradients to images (saliency) are right or refused, with frozen alphas and trained ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers import CLASSES, apply, close, images, randomise
from reference import logits

LABELS = torch.tensor([3, -1, 0, 1])
ROWS = torch.full((4,), 1)


class Net(nn.Module):
    """Two layers and a head; ``middle`` is called as ``middle(inner layer, features)``."""

    def __init__(self, middle):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.inner = nn.Linear(6, 5)
        self.head = nn.Linear(5, CLASSES)
        self.middle = middle

    def forward(self, x):
        return self.head(self.middle(self.inner, self.conv(x).mean((2, 3)).tanh()).tanh())


class OwnLinear(torch.autograd.Function):
    """A linear map whose backward reads the weight it saved."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, gradient.sum(0)


class OwnProduct(OwnLinear):
    """The same by a product that no rule covers."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias


class RunsAgain(torch.autograd.Function):
    """Runs the layer again in its backward, as reversible networks do."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(ctx.layer(x), x, gradient)[0], None


def product(layer, x):
    return x @ layer.weight.t() + layer.bias


MIDDLES = {
    "own linear": lambda layer, x: OwnLinear.apply(x, layer.weight, layer.bias),
    "own product": lambda layer, x: OwnProduct.apply(x, layer.weight, layer.bias),
    "runs again": lambda layer, x: RunsAgain.apply(x, layer),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "not reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "product, not reentrant": lambda layer, x: checkpoint(product, layer, x, use_reentrant=False),
}


def gradients(model, x, forget):
    x = x.clone().requires_grad_()
    model(x, forget).square().sum().backward()
    return x.grad


@pytest.mark.parametrize("forget", [LABELS, 1], ids=["labels", "one row"])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("middle", MIDDLES)
@pytest.mark.filterwarnings("ignore")  # vmap's, of kernels without a rule
def test_a_filtered_layer_that_the_backward_pass_runs_without_gates_is_refused(
    middle, frozen, forget
):
    x = images(4, 3, 8, 8)
    wf = apply(randomise(Net(MIDDLES[middle])), x, targets="*").requires_grad_(not frozen)
    with pytest.raises(RuntimeError, match=r"filtered layer runs (without|under)|vmap"):
        gradients(wf, x, forget)
    labels = LABELS if isinstance(forget, torch.Tensor) else ROWS
    with torch.no_grad():
        close(wf(x, forget), logits(wf, x, labels))


@pytest.mark.parametrize("forget", [LABELS, 1], ids=["labels", "one row"])
@pytest.mark.parametrize("middle", MIDDLES)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_the_same_parts_give_right_gradients_where_they_are_not_filtered(middle, forget):
    x = images(4, 3, 8, 8)
    wf = apply(randomise(Net(MIDDLES[middle])), x, targets=["conv.*", "head.*"])
    labels = LABELS if isinstance(forget, torch.Tensor) else ROWS
    right = gradients(lambda x, _: logits(wf, x, labels), x, None)
    close(gradients(wf.requires_grad_(False), x, forget), right)


def test_a_checkpoint_around_the_whole_call_is_right():
    x = images(4, 3, 8, 8)
    wf = apply(randomise(Net(product)), x, targets="*")
    right = gradients(wf, x, LABELS)
    alphas, wf.alphas.grad = wf.alphas.grad, None

    def again(x, forget):
        return checkpoint(wf, x, forget, use_reentrant=False)

    close(gradients(again, x, 1), gradients(wf.requires_grad_(False), x, 1))
    wf.requires_grad_(True)
    wf.alphas.grad = None
    close(gradients(wf, x, LABELS), right)
    close(wf.alphas.grad, alphas)
