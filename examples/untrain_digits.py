"""Untrain all ten digits in one round, then forget any of them.

    python examples/untrain_digits.py
    python examples/untrain_digits.py --dataset cifar10 --data /path/to/data

Prints what the run says of itself, and the table of accuracies: of the original and of the
filters, mean over the ten classes. Draws accuracies before and after, class by class, into
`untrain_digits.png`.
Ten seconds on one core for the digits.
"""

import torch

import wfilter
from wfilter import plots
from wfilter.cli.demo import example_problem

model, train, test = example_problem(__doc__)
images, labels = train.batch(torch.arange(min(len(train), 5000)))

wf = wfilter.apply_weight_filtering(model, class_names=train.class_names, example_input=images[:1])
history = wfilter.untrain(wf, wfilter.InMemory(images, labels))
print(history.verdict)
report = wfilter.evaluate(wf, test, metrics=["accuracy"], seconds=history.seconds)

print(report)
own, others = (
    {
        row: tuple(report.of_class(m, column, row) for m in ("original", "wfilter"))
        for row in range(10)
    }
    for column in ("Acc_f", "Acc_r")
)
plots.forgetting_plot((own, others), "untrain_digits.png", train.class_names)

original = report.value("original", "Acc_r")
assert report.value("wfilter", "Acc_f") <= 0.005, "forgotten classes are not recognised"
assert report.value("wfilter", "Acc_r") >= original - 0.005, "the others are"
