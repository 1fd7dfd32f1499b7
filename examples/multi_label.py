"""Images with several labels: two digits side by side, either of which can be forgotten.

    python examples/multi_label.py

A sigmoid for each class instead of one softmax; labels are a bool matrix. Prints how often a digit
is found before and after its class is forgotten, and draws images with the digits found in them
once the first one is forgotten into `multi_label.png`. About twenty seconds on one core.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wfilter
from wfilter import data, plots


def pairs(name: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of two digits, and which digits they show."""
    digits = data.load("digits", name)
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(len(digits), (2, count), generator=generator)
    (left, first), (right, second) = digits.batch(index[0]), digits.batch(index[1])
    shown = F.one_hot(first, 10).bool() | F.one_hot(second, 10).bool()
    return torch.cat([left, right], dim=3), shown


torch.manual_seed(0)
(images, shown), (test, expected) = pairs("train", 3000, 0), pairs("test", 600, 1)
layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()]
network = nn.Sequential(
    *layers, nn.Conv2d(64, 96, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(768, 10)
)
optimiser = torch.optim.Adam(network.parameters(), 2e-3)
for _ in range(240):
    batch = torch.randint(len(images), (128,))
    loss = F.binary_cross_entropy_with_logits(network(images[batch]), shown[batch].float())
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

wf = wfilter.apply_weight_filtering(network, example_input=images[:1])
wfilter.untrain(wf, wfilter.InMemory(images, shown), recipe="distill-soft", steps=120)

with torch.no_grad():
    found = torch.stack([wf(test, forget=row) > 0 for row in range(10)])  # (row, image, class)
    before = (network(test) > 0)[expected].float().mean()
own = torch.stack([found[row, expected[:, row], row].float().mean() for row in range(10)]).mean()
others = torch.stack(
    [found[row][expected & (torch.arange(10) != row)].float().mean() for row in range(10)]
).mean()
first = expected.int().argmax(1)  # the smaller digit of each image, forgotten here
captions = []
for i in range(12):
    digits = found[first[i], i].nonzero()[:, 0].tolist()
    captions.append(f"forgets {first[i]}: " + " ".join(map(str, digits)))
plots.pictures(test[:12], "multi_label.png", captions, columns=4)
print(f"digits found: base model {before:.1%}, forgotten class {own:.1%}, others {others:.1%}")
assert own < 0.1
assert others > before - 0.1
