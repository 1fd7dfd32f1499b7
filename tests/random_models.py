"""Small networks at random, put together from steps that networks really take, and from odd ones.

Each step maps ``(batch, 4, 8, 8)`` to the same shape. A harmless one treats every sample alone and
must be filtered; a hostile one mixes samples, keeps what it computed, or hides a weight, so that a
refusal is right as well. A wrong answer never is.
"""

import copy
import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLASSES, WIDTH, EDGE = 3, 4, 8


class Step(nn.Module):
    """``take`` says what is done with a convolution, a linear map over channels, or a vector.

    ``uses`` names the parts it has; one with ``-`` has no bias.
    """

    hostile, uses = False, "conv"

    def __init__(self):
        super().__init__()
        for part in self.uses.split():
            bias = not part.endswith("-")
            if part.startswith("conv"):
                self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=bias)
            elif part.startswith("linear"):
                self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)
            else:
                self.vector = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x):
        return self.take(x).tanh()

    def last(self, x):
        """The linear map, over the channels."""
        return self.linear(x.movedim(1, -1)).movedim(-1, 1)

    def score(self, x):
        return x.mean((1, 2, 3))


HARMLESS, HOSTILE = {}, {}


def step(uses="conv", *, hostile=False):
    def register(function):
        name = function.__name__
        kind = type(name, (Step,), {"take": function, "uses": uses, "hostile": hostile})
        (HOSTILE if hostile else HARMLESS)[name.replace("_", " ")] = kind
        return function

    return register


def back(order: Tensor) -> Tensor:
    return order.argsort()


# ---- layers used as they are --------------------------------------------------------------------


@step()
def convolution(self, x):
    return self.conv(x)


@step("linear")
def channels_last(self, x):
    return self.last(x)


@step("conv linear")
def residual(self, x):
    return x + self.last(self.conv(x).relu())


@step()
def twice(self, x):
    return self.conv(self.conv(x).tanh())


@step("conv linear")
def two_branches(self, x):
    return torch.cat([self.conv(x)[:, :2], self.last(x)[:, 2:]], 1)


@step()
def weight_read(self, x):
    return F.conv2d(x, bias=self.conv.bias, weight=self.conv.weight, padding=1)


@step("linear-")
def weight_in_an_einsum(self, x):
    return torch.einsum("bihw,oi->bohw", x, self.linear.weight)


@step("linear")
def weight_as_a_kernel(self, x):
    return F.conv2d(x, self.linear.weight[:, :, None, None], self.linear.bias)


@step("conv-")
def weight_transposed(self, x):
    return F.conv_transpose2d(x, self.conv.weight, padding=1)


@step("linear")
def weight_in_two_roles(self, x):
    return self.last(x) * torch.sigmoid(self.linear.weight.sum())


@step("vector")
def scaled(self, x):
    return x * self.vector[:, None, None] + self.vector.mean()


@step()
def grouped(self, x):
    kernel = self.conv.weight[:, :1]
    return F.conv2d(x, kernel, self.conv.bias, padding=1, groups=WIDTH)


@step("conv linear")
def gated_by_a_pool(self, x):
    return self.conv(x) * torch.sigmoid(self.linear(x.mean((2, 3))))[..., None, None]


@step("linear")
def attention(self, x):
    tokens = x.flatten(2).transpose(1, 2)
    query = self.linear(tokens)
    mixed = F.scaled_dot_product_attention(query, tokens, query)
    return mixed.transpose(1, 2).reshape(x.shape)


@step("linear")
def table_run_once(self, x):
    grid = torch.linspace(-1, 1, EDGE, dtype=x.dtype)
    table = self.linear(grid[:, None].expand(EDGE, WIDTH)).t()
    return x + table[:, :, None]


@step()
def in_place(self, x):
    y = self.conv(x)
    y += 0.1
    return y.mul_(2)


@step()
def under_no_grad(self, x):
    with torch.no_grad():
        return self.conv(x)


@step()
def checkpointed(self, x):
    return checkpoint(self.conv, x, use_reentrant=False)


# ---- the batch axis -----------------------------------------------------------------------------


@step()
def windows_major(self, x):
    windows = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5)
    y = self.conv(windows.reshape(-1, WIDTH, 4, 4)).reshape(-1, 2, 2, WIDTH, 4, 4)
    return y.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)


@step("linear")
def rows_minor(self, x):
    rows = x.permute(2, 0, 3, 1).flatten(0, 1)
    return self.linear(rows).unflatten(0, (EDGE, -1)).permute(1, 3, 0, 2)


@step("linear")
def batch_second(self, x):
    return self.linear(x.flatten(2).permute(2, 0, 1)).permute(1, 2, 0).reshape(x.shape)


@step("conv-")
def batch_among_channels(self, x):
    kernel = self.conv.weight.repeat(len(x), 1, 1, 1)
    y = F.conv2d(x.flatten(0, 1)[None], kernel, padding=1, groups=len(x))
    return y.unflatten(1, (-1, WIDTH))[0]


@step()
def sorted_by_brightness(self, x):
    order = self.score(x).argsort()
    return self.conv(x[order])[back(order)]


@step("linear")
def sorted_by_contrast(self, x):
    order = x.flatten(1).std(1).argsort(descending=True)
    return self.last(x[order])[back(order)]


@step()
def permuted_at_random(self, x):
    order = torch.randperm(len(x))
    return self.conv(x[order])[back(order)]


@step()
def rolled(self, x):
    return self.conv(x.roll(1, 0)).roll(-1, 0)


@step("linear")
def reversed_samples(self, x):
    return self.last(x.flip(0)).flip(0)


@step()
def one_after_the_other(self, x):
    return torch.cat([self.conv(sample) for sample in x.split(1)])


@step()
def in_chunks(self, x):
    return torch.cat([self.conv(chunk) for chunk in x.split(2)])


@step()
def together_with_its_mirror(self, x):
    both = self.conv(torch.cat([x, x.flip(3)]))
    return both[: len(x)] + both[len(x) :]


@step()
def interleaved_with_its_mirror(self, x):
    both = self.conv(torch.stack([x, x.flip(3)], 1).flatten(0, 1))
    return both[::2] - both[1::2]


@step()
def folded_for_large_batches(self, x):
    if len(x) < 3:
        return self.conv(x)
    return self.conv(x.transpose(0, 1).transpose(0, 1).contiguous())


# ---- what vmap cannot run -----------------------------------------------------------------------


@step()
def boolean_mask(self, x):
    y = self.conv(x)
    y[y < 0] = 0
    return y


@step("conv linear")
def branch_on_each_sample(self, x):
    parts = [self.conv(s) if s.mean() > 0 else self.last(s) for s in x.split(1)]
    return torch.cat(parts)


@step("conv linear")
def routed_to_experts(self, x):
    first = self.score(x) > 0
    y = torch.empty_like(x)
    y[first], y[~first] = self.conv(x[first]), self.last(x[~first])
    return y


@step("conv linear")
def top_pixels(self, x):
    best = x.flatten(2).topk(3).values.mean(2)
    return self.conv(x) + self.linear(best)[..., None, None]


# ---- hostile: mixing ----------------------------------------------------------------------------


@step(hostile=True)
def minus_the_batch_mean(self, x):
    return self.conv(x) - 0.1 * x.mean(0)


@step(hostile=True)
def minus_the_nanmean(self, x):
    return self.conv(x - x.nanmean(0))


@step(hostile=True)
def scaled_if_any_is_bright(self, x):
    return self.conv(x / 2 if x.max() > 0.9 else x)


@step(hostile=True)
def weighted_by_rank(self, x):
    rank = self.score(x).argsort().argsort().to(x.dtype)
    return self.conv(x) * (1 + 0.05 * rank)[:, None, None, None]


@step(hostile=True)
def expert_of_two_places(self, x):
    kept = torch.zeros(len(x), dtype=torch.bool)
    kept[self.score(x).topk(min(2, len(x))).indices] = True
    return torch.where(kept[:, None, None, None], self.conv(x), x)


@step(hostile=True)
def last_of_the_batch(self, x):
    return self.conv(x) + 0.1 * x[-1:].mean()


@step(hostile=True)
def length_of_the_batch(self, x):
    return self.conv(x) * (1 + 0.01 * len(x))


@step(hostile=True)
def neighbour(self, x):
    return self.conv(x) + 0.05 * x.roll(1, 0)


# ---- hostile: state, and weights where no mode sees them ----------------------------------------


@step("linear-", hostile=True)
def weight_kept_at_first(self, x):
    if not hasattr(self, "first_weight"):
        self.first_weight = self.linear.weight * 1
    return x + torch.einsum("bihw,oi->bohw", x, self.first_weight)


@step("conv-", hostile=True)
def weight_kept_in_a_dict(self, x):
    store = self.__dict__.setdefault("store", {})
    kernel = store.setdefault(len(x), self.conv.weight.flip(2))
    return F.conv2d(x, kernel, padding=1)


@step(hostile=True)
def buffer_reassigned(self, x):
    self.seen = x.mean((0, 2, 3))
    return self.conv(x)


@step(hostile=True)
def running_mean(self, x):
    self.seen.mul_(0.9).add_(0.1 * x.mean((0, 2, 3)))
    return self.conv(x) + self.seen[:, None, None]


@step(hostile=True)
def answer_kept(self, x):
    before = getattr(self, "answer", None)
    self.answer = self.conv(x)
    return self.answer if before is None else self.answer + 0.1 * before.mean()


@step("linear-", hostile=True)
def new_parameter(self, x):
    return x + torch.einsum("bihw,oi->bohw", x, nn.Parameter(self.linear.weight))


@step("conv linear-", hostile=True)
def weight_as_numpy(self, x):
    weight = torch.from_numpy(self.linear.weight.detach().numpy())
    return self.conv(x) + torch.einsum("bihw,oi->bohw", x, weight)


@step("conv linear-", hostile=True)
def weight_data(self, x):
    return self.conv(x) + torch.einsum("bihw,oi->bohw", x, self.linear.weight.data)


@step("conv-", hostile=True)
def weight_by_its_dict(self, x):
    return F.conv2d(x, self.conv._parameters["weight"], padding=1)


@step("linear", hostile=True)
def weight_by_parameters(self, x):
    weight, bias = self.linear.parameters()
    return F.linear(x.movedim(1, -1), weight, bias).movedim(-1, 1)


@step("conv linear-", hostile=True)
def weight_as_a_number(self, x):
    return self.conv(x) * float(self.linear.weight[0, 0])


@step("conv linear", hostile=True)
def weight_decides(self, x):
    return self.conv(x) if self.linear.weight.sum() > 0.1 else self.last(x)


@step("conv-", hostile=True)
def weight_standardised(self, x):
    weight = self.conv.weight - self.conv.weight.mean((1, 2, 3), keepdim=True)
    return F.conv2d(x, weight / weight.std((1, 2, 3), keepdim=True), padding=1)


@step("conv- linear", hostile=True)
def weight_made_by_another(self, x):
    hyper = self.linear(x.mean((2, 3))).mean(0)  # one kernel for the batch
    return F.conv2d(x, self.conv.weight * hyper[:, None, None, None], padding=1)


@step("conv linear", hostile=True)
def type_asked(self, x):
    return self.conv(x) if type(self.conv) is nn.Conv2d else self.last(x)


@step(hostile=True)
def random_noise(self, x):
    return self.conv(x) + 0.1 * torch.randn_like(x)


@step(hostile=True)
def recurrent_over_samples(self, x):
    state, outputs = torch.zeros_like(x[:1]), []
    for sample in x.split(1):
        state = self.conv(sample) + 0.1 * state
        outputs.append(state)
    return torch.cat(outputs)


STEPS = {**HARMLESS, **HOSTILE}


# ---- outputs ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Answer:
    logits: Tensor
    features: Tensor
    note: str = "as it is"


OUTPUTS = {
    "tensor": lambda logits, features: logits,
    "with nothing": lambda logits, features: (logits, None),
    "dict": lambda logits, features: {"logits": logits, "features": features},
    "dataclass": Answer,
    "features across": lambda logits, features: {"logits": logits, "across": features.t()},
    "list": lambda logits, features: [logits, {"inner": (features, 3)}],
}


class Net(nn.Module):
    """The steps one after the other, or each beside the one before; then a head."""

    def __init__(self, steps, output="tensor", parallel=False, tied=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Conv2d(3, WIDTH, 1)
        self.steps = nn.ModuleList(STEPS[name]() for name in steps)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.output, self.parallel = output, parallel
        linear = [step.linear for step in self.steps if hasattr(step, "linear")]
        for later in linear[1:] if tied else ():
            later.weight = linear[0].weight
        self.double().eval()

    @property
    def hostile(self):
        return any(step.hostile for step in self.steps)

    def forward(self, x):
        x = self.stem(x)
        for step in self.steps:
            x = 0.5 * (x + step(x)) if self.parallel else step(x)
        features = x.mean((2, 3))
        return OUTPUTS[self.output](self.head(features), features)


# ---- the oracle: shares no code with the package ------------------------------------------------


def leaves(output) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        return [leaf for value in output.values() for leaf in leaves(value)]
    if isinstance(output, (tuple, list)):
        return [leaf for value in output for leaf in leaves(value)]
    return leaves(vars(output)) if dataclasses.is_dataclass(output) else []


def multiplied(fresh: nn.Module, alphas, rows) -> nn.Module:
    """A copy of a model that has never run, its parameters multiplied by the gates of ``rows``."""
    model = copy.deepcopy(fresh)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for row in rows:
            for name, alpha in alphas.items():
                gate = 1 / (1 + torch.exp(-alpha[row]))
                if gate.numel() == parameters[name].numel():
                    gate = gate.view(parameters[name].shape)
                else:
                    gate = gate.view(-1, *[1] * (parameters[name].ndim - 1))
                parameters[name].mul_(gate)
    return model


def alone(fresh, alphas, x, rows) -> list[list[Tensor]]:
    """For each sample the tensors of its output, run by itself on a model of its own."""
    with torch.no_grad():
        return [leaves(multiplied(fresh, alphas, own)(image[None])) for image, own in zip(x, rows)]


def largest_gap(output, singles) -> float:
    """How far a batch's output is from those of its samples, as a share of their largest entry.

    Features of 1e-11 that are what is left of two nearly equal numbers have no ten right digits.
    """
    worst = 0.0
    for index, whole in enumerate(leaves(output)):
        parts = [single[index] for single in singles]
        axis = parts[0].shape.index(1)
        right = torch.cat(parts, axis)
        if right.shape != whole.shape:
            return math.inf
        gap = (whole - right).abs().max() / right.abs().max().clamp(min=1e-6)
        worst = max(worst, float(gap) if bool(gap.isfinite()) else math.inf)
    return worst
