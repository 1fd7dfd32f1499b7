"""Untrain without the training set: on a few unlabelled images that were held out.

    python examples/without_training_set.py

The base model is its own teacher, so no labels are needed: its own answer chooses the row. Half of
the test images are used for untraining, without labels, the other half for the figures. About ten
seconds on one core.
"""

import torch

import wfilter
from wfilter.demo import example_problem

model, _, test = example_problem(__doc__)
seen, kept = torch.arange(len(test)).chunk(2)
unlabelled, _ = test.batch(seen)
wf = wfilter.apply_weight_filtering(model, example_input=unlabelled[:1])

wfilter.untrain(wf, wfilter.InMemory(unlabelled), recipe="distill-soft", steps=100)

report = wfilter.evaluate(wf, test.take(kept), metrics=["accuracy"])
print(report)
assert report.value("wfilter", "Acc_f") < 0.05
assert report.value("wfilter", "Acc_r") > report.value("original", "Acc_r") - 0.06
