"""CSE: pull channels that tell the class from the others to the channel's mean, untrained.

Here only the head's input is gated, while the paper gates several blocks. Gating one place hardly
forgets: a small network on digits still answers nearly all images of the class right.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wfilter.baselines.batches import Task
from wfilter.baselines.edits import edited
from wfilter.data.batches import Batches
from wfilter.metrics.features import collect_features


class ChannelGate(nn.Module):
    """g h + (1 - g) mean, channel by channel.

    Example:
        >>> ChannelGate(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 5.0]))(torch.ones(1, 2))
        tensor([[5., 1.]])
    """

    gate: Tensor
    mean: Tensor

    def __init__(self, gate: Tensor, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("gate", gate)
        self.register_buffer("mean", mean)

    def forward(self, features: Tensor) -> Tensor:
        """Features (samples, channels), gated."""
        return self.gate * features + (1 - self.gate) * self.mean


def cse(
    model: nn.Module,
    forget: int | Sequence[int],
    train: Batches,
    *,
    coverage: float = 0.85,
    threshold: float = 0.1,
    smoothness: float = 0.5,
    mask: bool = False,
) -> nn.Module:
    """A copy whose most telling channels are gated towards the mean over all images.

    Source: Pramanik et al., CVPR 2026 (contrastive subnet erasure), applied at one place only, the
    features that the head sees; the authors gate the outputs of several blocks, and
    contrast the class with those they pick as similar, where we take all others. A channel's score
    s is that of `salience`. Of the fewest channels with ``coverage`` of all scores, each has the
    gate 1 - clip((s - t) / (s + l), 0, 1).

    Args:
        model: left untouched.
        forget: class or classes.
        train: batches of all classes.
        coverage: the share of all scores that the gated channels have.
        threshold: t; channels with a lower score keep the gate 1.
        smoothness: l.
        mask: mask the forgotten classes' logits too.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> batch = (torch.randn(32, 4), torch.arange(2).repeat(16))
        >>> type(cse(model, 0, [batch])[0]).__name__
        'ChannelGate'
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage={coverage} is outside 0 < coverage <= 1.")
    task = Task.of(model, forget, train)
    features, labels = collect_features(model, task.train)
    task.check_seen(set(labels.tolist()))
    forgotten = task.is_forgotten(labels)
    scores = salience(features[forgotten], features[~forgotten])
    order = scores.argsort(descending=True)
    needed = int((scores[order].cumsum(0) < coverage * scores.sum()).sum()) + 1
    gate = torch.ones_like(scores)
    chosen = order[:needed]
    strength = (scores[chosen] - threshold) / (scores[chosen] + smoothness)
    gate[chosen] = 1 - strength.clamp(0, 1)
    gated = ChannelGate(gate.to(features), features.mean(0))
    return edited(model, task, gated, mask=mask)


def salience(
    target: Tensor,
    background: Tensor,
    *,
    ridge: float = 0.01,
    share: float = 0.3,
    most: int = 50,
) -> Tensor:
    """For each channel how much more it moves with the target than with the background, (width,).

    Both are standardised together; with S (target) and B (background) their second
    moments, S v = r (B + d I) v is solved for the largest r, where d is ``ridge`` times B's mean
    diagonal. A channel's score is the sum of r v[c]^2 over the first min(``most``,
    ``share`` * width) unit vectors v, at least one. A shift of the mean counts only where the
    target has fewer samples than the background: of two parts standardised together, the smaller
    lies farther from the common mean, equal ones equally far.

    Example:
        >>> torch.manual_seed(0)
        <torch._C.Generator object at ...>
        >>> target, background = torch.randn(20, 4), torch.randn(180, 4)
        >>> int(salience(target + torch.tensor([0, 0, 9.0, 0]), background).argmax())
        2
    """
    joint = torch.cat([target, background]).double()
    scale = (joint.var(0, unbiased=False) + 1e-6).sqrt()
    moments = []
    for part in (target.double(), background.double()):
        standardised = (part - joint.mean(0)) / scale
        moments.append(standardised.T @ standardised / len(part))
    width = len(scale)
    moments[1] += ridge * moments[1].trace() / width * torch.eye(width, dtype=torch.float64)
    half = torch.linalg.inv(torch.linalg.cholesky(moments[1]))  # whitens the background
    ratios, vectors = torch.linalg.eigh(half @ moments[0] @ half.T)
    directions = nn.functional.normalize(half.T @ vectors, dim=0).flip(1)
    used = max(1, min(most, int(share * width)))
    largest: Tensor = ratios.flip(0)[:used].clamp(min=0)
    return directions[:, :used].square() @ largest
