"""Which units make a class? The gates that close when it is forgotten.

    python examples/explain_a_class.py

Prints the units of the last layer that digit 3 needs most, which classes share units with it, and
how much of the class a few closed gates remove (deletion) compared with as many random ones. Draws
the test images that excite each of those units most into `explain_a_class.png`. Fifteen seconds on
one core.
"""

import torch

import wfilter
from wfilter import explain, plots
from wfilter.cli.demo import example_problem

DIGIT = 3

model, train, test = example_problem(__doc__)
images, labels = train.batch(torch.arange(min(len(train), 5000)))
wf = wfilter.apply_weight_filtering(model, class_names=train.class_names, example_input=images[:1])
wfilter.untrain(wf, wfilter.InMemory(images, labels), recipe="distill-soft", steps=100)

last = explain.default_layers(wf)[-1]
units = explain.top_units(wf, DIGIT, layer=last, k=5)
for unit in units:
    print(f"{unit.layer} unit {unit.index}: gate {unit.gate:.3f}")
alike = explain.similarity(wf)[DIGIT].clone()
alike[DIGIT] = -1
print("shares most units with", train.class_names[int(alike.argmax())])

pictures, _ = test.batch((test.labels == DIGIT).nonzero()[:, 0])
curves = explain.class_curves(wf, pictures, DIGIT, steps=10)
everything, truth = test.batch(torch.arange(len(test)))
excited = [explain.exciting_images(wf, u.layer, u.index, everything, k=8) for u in units]
shown = torch.tensor(excited).flatten()
plots.pictures(
    test.images[shown] / 255,
    "explain_a_class.png",
    [test.class_names[label] for label in truth[shown]],
    columns=8,
    lines=[f"{u.layer}\nunit {u.index}\ngate {u.gate:.2f}" for u in units],
)
print(f"deletion: area {curves.deletion.auc:.3f}, in random order {curves.random_deletion.auc:.3f}")
assert curves.deletion.auc < curves.random_deletion.auc, "the gates point at the right units"
