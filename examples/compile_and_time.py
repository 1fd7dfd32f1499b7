"""Compile a filtered model and time a mixed batch against the plain one.

    python examples/compile_and_time.py

One graph serves all labels, so the cost does not grow with the number of classes in a batch. Prints
the table, eager and, where a C++ compiler is installed, compiled. A minute on one core.
"""

import torch
from torchvision.models import resnet18

import wfilter
from wfilter.core.compiling import has_compiler
from wfilter.evaluation.bench import bench, format_table, randomise

images = torch.rand(16, 3, 64, 64)
wf = randomise(
    wfilter.apply_weight_filtering(resnet18(num_classes=10).eval(), example_input=images)
)

rows = bench(wf, images, name="resnet18", labels=10, rounds=5)
if has_compiler():
    rows += bench(wf, images, name="resnet18", labels=10, rounds=5, compiled=True)

print(format_table(rows))
mixed = next(row for row in rows if row.path == "mixed labels")
assert mixed.largest_difference is not None
assert mixed.largest_difference < 1e-3, "equal to one image at a time"
