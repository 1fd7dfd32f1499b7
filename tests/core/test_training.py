"""Gradients of the alphas: alone, under checkpointing, and in several processes."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import reference
import wfilter
from helpers import (
    CLASSES,
    apply,
    assert_same_state,
    close,
    images,
    randomise,
    snapshot,
    tiny,
)

LABELS = torch.tensor([3, -1, 0, 1])


def test_base_model_in_training_mode_is_refused(wf, x):
    before = snapshot(wf.base)
    wf.base.train()
    for forget in (None, 1, LABELS):
        with pytest.raises(RuntimeError, match=r"put in training mode.* Call wf\.base\.eval\(\)"):
            wf(x, forget=forget)
    wf.train()
    wf(x, forget=LABELS)
    assert_same_state(wf.base, before)


def test_requires_grad_leaves_the_base_model_frozen(wf):
    wf.requires_grad_(False).requires_grad_(True)
    assert [name for name, p in wf.named_parameters() if p.requires_grad] == ["alphas"]


@pytest.mark.parametrize("granularity", ["out", "element"])
def test_training_alphas_leaves_base_weights_and_buffers_bit_identical(granularity, tiny_cnn, x):
    before = snapshot(tiny_cnn)
    wf = apply(tiny_cnn, x, granularity=granularity).train()
    assert wf.training
    assert not any(module.training for module in wf.base.modules())
    optimiser = torch.optim.Adam(wf.trainable_parameters(), lr=0.1)
    start = wf.alphas.detach().clone()
    for forget in (LABELS, torch.eye(4).bool(), 2, {0, 1}):
        optimiser.zero_grad()
        wf(x, forget=forget).square().sum().backward()
        optimiser.step()
    with wf.forgetting(1):
        wf(x).sum().backward()
    assert (wf.alphas - start).abs().max() > 0.05
    assert all(parameter.grad is None for parameter in wf.base.parameters())
    assert_same_state(wf.base, before)


def test_only_the_rows_asked_for_get_gradients(wf, x):
    wf(x, forget=torch.tensor([2, -1, 2, 0])).sum().backward()
    touched = wf.alphas.grad.abs().amax(1) > 0
    assert touched.tolist() == [True, False, True, False]


def test_sparse_gradients_equal_dense_ones(wf, x):
    wf(x, forget=LABELS).sum().backward()
    dense, wf.alphas.grad = wf.alphas.grad, None
    wf.sparse = True
    wf(x, forget=LABELS).sum().backward()
    assert wf.alphas.grad.is_sparse
    close(wf.alphas.grad.to_dense(), dense)


def test_gradients_reach_the_input_as_through_the_reference(wf, x):
    fast, slow = x.clone().requires_grad_(), x.clone().requires_grad_()
    wf(fast, forget=LABELS).square().sum().backward()
    reference.logits(wf, slow, LABELS).square().sum().backward()
    close(fast.grad, slow.grad)


def test_gradient_checkpointing_of_timm_is_refused_while_alphas_need_gradients():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=4)
    x = torch.rand(2, 3, 32, 32)
    wf = wfilter.apply_weight_filtering(model, example_input=x)
    model.set_grad_checkpointing(True)
    labels = torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match=r"gradient checkpointing is on in VisionTransformer"):
        wf(x, forget=labels)
    with torch.no_grad():
        assert wf(x, forget=labels).shape == (2, 4)
    model.set_grad_checkpointing(False)
    wf(x, forget=labels).sum().backward()


class Checkpointed(nn.Module):
    """Checkpoints a filtered part, without any flag that would tell."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        part = checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)
        return self.head(part.mean((2, 3)))


@pytest.mark.parametrize("granularity", ["out", "element"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_recomputation_inside_a_model_is_never_silently_wrong(reentrant, granularity, x):
    model = randomise(Checkpointed(reentrant)).requires_grad_(False)
    wf = apply(model, x, granularity=granularity)
    ours = r"runs without gradients inside a forward|runs under gradient checkpointing"
    functorch = r"setup_context|functorch|vmap"  # vmap itself refuses checkpoints
    with pytest.raises(RuntimeError, match=ours if granularity == "out" else f"{ours}|{functorch}"):
        wf(x, forget=LABELS).square().sum().backward()
    if granularity == "out":
        with torch.no_grad():
            close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))


def data_parallel(rank, world, address, results):
    """One step of DistributedDataParallel; rank 0 puts the gradient of the alphas in the queue."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    try:
        x = images(4, 3, 8, 8)
        wf = apply(tiny("cnn"), x).train()
        parallel = nn.parallel.DistributedDataParallel(wf)
        share = slice(rank * 4 // world, (rank + 1) * 4 // world)
        parallel(x[share], LABELS[share]).square().mean().backward()
        if rank == 0:
            results.append(wf.alphas.grad.clone())
    finally:
        dist.destroy_process_group()


def expected_gradient(x):
    wf = apply(tiny("cnn"), x)
    wf(x, forget=LABELS).square().mean().backward()
    return wf.alphas.grad


@pytest.mark.filterwarnings("ignore")
def test_distributed_data_parallel_gives_the_same_gradients(tmp_path, x):
    results = []
    data_parallel(0, 1, f"file://{tmp_path}/one", results)
    close(results[0], expected_gradient(x))


def two_processes(rank, address, path):
    warnings.simplefilter("ignore")
    results = []
    data_parallel(rank, 2, address, results)
    if rank == 0:
        torch.save(results[0], path)


@pytest.mark.slow
def test_two_processes_average_the_gradients_of_their_shares(tmp_path, x):
    path = tmp_path / "gradient.pt"
    torch.multiprocessing.spawn(two_processes, (f"file://{tmp_path}/two", path), nprocs=2)
    close(torch.load(path), expected_gradient(x))
