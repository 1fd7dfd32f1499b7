"""Fold one class's gates into the weights and ship a plain model that needs no wfilter.

    python examples/bake_and_ship.py

Untrains, keeps the filters in one small file, bakes digit 3 away, and writes the plain model as
safetensors and as a torch.export program. Prints the sizes. Fifteen seconds on one core.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import wfilter
from wfilter import zoo
from wfilter.cli.demo import example_problem

model, train, test = example_problem(__doc__)
images, labels = train.batch(torch.arange(min(len(train), 5000)))
wf = wfilter.apply_weight_filtering(model, class_names=train.class_names, example_input=images[:1])
wfilter.untrain(wf, wfilter.InMemory(images, labels), recipe="distill-soft", steps=60)
x, _ = test.batch(torch.arange(50))

with tempfile.TemporaryDirectory() as folder:
    filters = wf.save(Path(folder, "filters.safetensors"))
    baked = wf.bake(forget=3)
    save_file(baked.state_dict(), Path(folder, "without-3.safetensors"))
    program = wfilter.export(baked, Path(folder, "without-3.pt2"), example_input=x)
    print(f"filters {filters.stat().st_size} bytes; {program}")

    with torch.no_grad():
        expected = wf(x, forget=3)
        if test.name.startswith("digits"):
            plain = zoo.create("cnn-digits")  # anyone's copy of the architecture
            plain.load_state_dict(load_file(Path(folder, "without-3.safetensors")))
            assert torch.allclose(plain(x), expected, atol=1e-4)
    answers = torch.export.load(program.path).module()(x)
    assert torch.allclose(answers, expected, atol=1e-4), "the shipped model forgets the same"

    again = wfilter.load(filters, wfilter.remove_weight_filtering(wf), example_input=x)
    with torch.no_grad():
        assert torch.equal(again(x, forget=3), expected), "filters come back bit for bit"
