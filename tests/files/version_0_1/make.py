"""The files beside this one: written once by version 0.1.0, read by every later version.

    git worktree add ../version_0_1 fbccfe6
    PYTHONPATH=../version_0_1 python tests/files/version_0_1/make.py

``test_old_files.py`` reads them; it takes the model and the images from here, which need nothing of
wfilter but what both versions have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parent
NAMES = ("round", "square", "cross")


def waves(*shape: int) -> Tensor:
    """Fixed numbers in -1..1, the same on every machine and in every version of torch."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).mul(0.7).sin().view(shape).float()


def make_model() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4, 3)
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(waves(*parameter.shape))
    return model


def make_images() -> tuple[Tensor, Tensor]:
    return waves(6, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2])


class Interrupted:
    """One batch an epoch, and somebody presses Ctrl-C before the epoch of that number."""

    def __init__(self, epoch: int):
        self.left = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return iter([make_images()])


def main() -> None:
    import wfilter

    if wfilter.__version__ != "0.1.0":
        raise SystemExit(f"these files are those of 0.1.0, not of {wfilter.__version__}.")

    def fresh() -> wfilter.FilteredModel:
        settings = {"targets": "*", "class_names": NAMES}
        return wfilter.apply_weight_filtering(make_model(), example_input=images, **settings)

    images, _ = make_images()
    run = {"recipe": "distill-soft", "steps": 6}
    wfilter.untrain(fresh(), Interrupted(3), **run, checkpoint=FOLDER / "run.ckpt")
    whole = fresh()
    wfilter.untrain(whole, [make_images()], **run)
    wf = fresh()
    with torch.no_grad():
        wf.alphas.copy_(3 * waves(*wf.alphas.shape))
        logits = wf(images, forget=torch.tensor([0, 1, 2, -1, 2, 1]))
    wf.save(FOLDER / "filters.safetensors")
    wfilter.evaluate(wf, [make_images()], metrics="accuracy").to_json(FOLDER / "report.json")
    told = {"logits": logits.tolist(), "alphas": whole.alphas.tolist()}
    (FOLDER / "told.json").write_text(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
