"""Your own loop, optimiser and loss: the alphas are ordinary parameters.

    python examples/own_training_loop.py

Learns to forget with a plain cross-entropy that asks a forgotten image for the second-best class.
Prints accuracies before and after. About ten seconds on one core.
"""

import torch
from torch.nn import functional as F

import wfilter
from wfilter.cli.demo import example_problem

model, train, test = example_problem(__doc__)
images, labels = train.batch(torch.arange(min(len(train), 5000)))
wf = wfilter.apply_weight_filtering(model, example_input=images[:1])

optimiser = torch.optim.Adam(wf.trainable_parameters(), lr=0.2)
generator = torch.Generator().manual_seed(0)
for _ in range(80):
    index = torch.randint(len(images), (128,), generator=generator)
    x, y = images[index], labels[index]
    forget = torch.randint(wf.num_classes, (128,), generator=generator)
    forget[:48] = y[:48]  # these forget their own class
    with torch.no_grad():
        wanted = wf(x).scatter(1, forget[:, None], -torch.inf).argmax(1)
    loss = F.cross_entropy(wf(x, forget=forget), wanted)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

x, y = test.batch(torch.arange(min(len(test), 1000)))
with torch.no_grad():
    own = (wf(x, forget=y).argmax(1) == y).float().mean()
    other = (wf(x, forget=(y + 1) % wf.num_classes).argmax(1) == y).float().mean()
    base = (wf(x).argmax(1) == y).float().mean()
print(f"base model {base:.1%}; own class forgotten {own:.1%}; another class forgotten {other:.1%}")
assert own < 0.03
assert other > base - 0.04
