"""On a CUDA device: the CPU's answers, no wait for the device, and the compile modes meant for it.

Run with ``pytest -m gpu``; without a device these tests skip.
"""

import pytest
import torch

import wfilter
from helpers import apply, close, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LABELS = torch.tensor([3, -1, 0, 1])


@pytest.fixture
def pair(x):
    """The same filtered model on the CPU and on the device, inspected."""
    here, there = apply(tiny("cnn"), x), apply(tiny("cnn"), x).to("cuda")
    there.inspect(x.cuda())
    return here, there


@pytest.mark.parametrize("forget", [2, {1, 3}, LABELS, torch.eye(4).bool()], ids=str)
@torch.no_grad()
def test_the_device_gives_the_answers_of_the_cpu(pair, x, forget):
    here, there = pair
    expected = here(x, forget=forget)
    close(there(x.cuda(), forget=forget).cpu(), expected)
    if isinstance(forget, torch.Tensor):
        close(there(x.cuda(), forget=forget.cuda()).cpu(), expected)
    else:
        close(there.bake(forget).cuda()(x.cuda()).cpu(), expected)


@torch.no_grad()
def test_a_mixed_batch_never_waits_for_the_device(pair, x):
    there, images, labels = pair[1], x.cuda(), LABELS.cuda()
    sets = torch.eye(4).bool().cuda()
    there(images, forget=labels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        there(images, forget=labels)
        there(images, forget=sets)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_compile_modes_give_the_eager_answers(pair, x, mode):
    here, there = pair
    there.compile(mode=mode, fullgraph=True)
    for shift in range(3):
        labels = LABELS.roll(shift)
        close(there(x.cuda(), forget=labels.cuda()).cpu().clone(), here(x, forget=labels))


def test_untraining_on_the_device_moves_the_alphas_there(pair, x):
    there = pair[1]
    before = there.alphas.detach().clone()
    wfilter.untrain(there, wfilter.InMemory(x, torch.arange(4), 4), steps=2, device="cuda")
    assert there.alphas.is_cuda
    assert not torch.equal(there.alphas, before)
