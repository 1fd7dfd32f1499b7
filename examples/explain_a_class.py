"""Which units make a class? The gates that close when it is forgotten.

    python examples/explain_a_class.py

Prints the units that digit 3 needs most, which classes share units with it, and how much of the
class a few closed gates remove (deletion) compared with as many random ones. Fifteen seconds on one
core.
"""

import torch

import wfilter
from wfilter import explain
from wfilter.cli.demo import example_problem

DIGIT = 3

model, train, test = example_problem(__doc__)
images, labels = train.batch(torch.arange(min(len(train), 5000)))
wf = wfilter.apply_weight_filtering(model, class_names=train.class_names, example_input=images[:1])
wfilter.untrain(wf, wfilter.InMemory(images, labels), recipe="distill-soft", steps=100)

for unit in explain.top_units(wf, DIGIT, k=5):
    print(f"{unit.layer} unit {unit.index}: gate {unit.gate:.3f}")
alike = explain.similarity(wf)[DIGIT].clone()
alike[DIGIT] = -1
print("shares most units with", train.class_names[int(alike.argmax())])

pictures, _ = test.batch((test.labels == DIGIT).nonzero()[:, 0])
curves = explain.class_curves(wf, pictures, DIGIT, steps=10)
print(f"deletion: area {curves.deletion.auc:.3f}, in random order {curves.random_deletion.auc:.3f}")
assert curves.deletion.auc < curves.random_deletion.auc, "the gates point at the right units"
