"""Untrain in two processes with torchrun; the filters are those of one process up to rounding.

    torchrun --nproc-per-node 2 examples/two_processes.py
    python examples/two_processes.py        (the same with one process)

Every process takes its share of each batch's pairs and the gradients are averaged. Prints the
accuracies. Half a minute on two cores.
"""

import os

import torch
import torch.distributed as dist

import wfilter
from wfilter.cli.demo import example_problem

if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
model, train, test = example_problem(__doc__)  # the same seed, so the same model everywhere
images, labels = train.batch(torch.arange(min(len(train), 5000)))
wf = wfilter.apply_weight_filtering(model, example_input=images[:1])

wfilter.untrain(wf, wfilter.InMemory(images, labels), recipe="distill-soft", steps=80)

report = wfilter.evaluate(wf, test, metrics=["accuracy"])
if dist.is_initialized():
    alphas = [torch.empty_like(wf.alphas.detach()) for _ in range(dist.get_world_size())]
    dist.all_gather(alphas, wf.alphas.detach())
    assert all(torch.equal(alphas[0], other) for other in alphas), "all processes agree"
if not dist.is_initialized() or dist.get_rank() == 0:
    print(report)
assert report.value("wfilter", "Acc_f") < 0.05
if dist.is_initialized():
    dist.destroy_process_group()
