"""A timm model fine-tuned on new data, then filtered: nothing special about either step.

    python examples/finetune_timm.py

Trains a small timm ConvNet on the digits (with --pretrained, where the network allows, it starts
from timm's weights), untrains it, prints the table, and draws the course of untraining into
`finetune_timm.png`. About a minute on one core.
"""

import sys

import timm
import torch
from torch.nn import functional as F

import wfilter
from wfilter import data, plots

torch.manual_seed(0)
train, test = (data.load("digits", split, size=32) for split in ("train", "test"))
network = timm.create_model(
    "resnet10t", pretrained="--pretrained" in sys.argv, in_chans=1, num_classes=10
)
loader = data.batches(train, 64, shuffle=True, drop_last=True)
optimiser = torch.optim.AdamW(network.parameters(), 2e-3)
network.train()
for _ in range(4):
    for x, y in loader:
        loss = F.cross_entropy(network(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

images, labels = train.batch(torch.arange(len(train)))
wf = wfilter.apply_weight_filtering(network, class_names=train.class_names, example_input=images)
training = wfilter.InMemory(images, labels, 32)
history = wfilter.untrain(wf, training, recipe="distill-soft", steps=80)
plots.history_plot(history, "finetune_timm.png")

report = wfilter.evaluate(wf, test, metrics=["accuracy"])
print(report)
assert report.value("wfilter", "Acc_f") < 0.05
assert report.value("wfilter", "Acc_r") > report.value("original", "Acc_r") - 0.05
