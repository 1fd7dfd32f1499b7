"""What inductor would run on a GPU, seen without one: lowered, not run."""

from contextlib import contextmanager

import pytest
import torch

import gpu_lowering
from gpu_lowering import Setting, lower
from helpers import apply, tiny
from lowered import Outside
from pretended_gpu import pretended_gpu, to_device, why_not

FORGETS = ["labels", "sets", 3, {1, 2}]


@pytest.fixture(scope="module", autouse=True)
def _lowering_works():
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def resnet():
    return gpu_lowering.apply(gpu_lowering.build("resnet18").eval(), 224)


@pytest.fixture(scope="module")
def vit():
    """Two of ViT-T's twelve blocks, which are alike."""
    return gpu_lowering.apply(gpu_lowering.build("vit_tiny", depth=2).eval(), 224)


def nothing_stops_cuda_graphs(row):
    stops = row.host_reads, row.mutated_inputs, row.refused_by_cuda_graphs, row.waits_outside
    assert stops == (0, 0, [], 0)
    assert row.captured


def test_a_mixed_batch_of_a_resnet_costs_what_the_base_model_costs(resnet):
    base, *mixed = lower(Setting("resnet18"), resnet)
    assert [row.forget for row in mixed] == ["labels", "sets", "one row"]
    for row in mixed:
        assert (row.kernels, row.library_calls) == (base.kernels, base.library_calls)
        assert row.ratio < 1.01
        assert row.kernels_outside <= (4 if row.forget == "sets" else 2)  # labels: one
        nothing_stops_cuda_graphs(row)


def test_a_vit_scales_queries_keys_and_values_in_one_pass_each_block(vit):
    base, *mixed = lower(Setting("vit_tiny"), vit)
    for row in mixed:
        assert row.kernels == base.kernels + 2
        assert row.library_calls == base.library_calls
        assert row.ratio < 1.16  # that pass: cuBLAS writes the product, attention reads it
        nothing_stops_cuda_graphs(row)


def test_matrix_product_templates_take_the_gate_of_a_vit_in(vit):
    base, *mixed = lower(Setting("vit_tiny", mode="max-autotune"), vit)
    for row in mixed:
        assert (row.kernels, row.library_calls) == (base.kernels, base.library_calls)
        assert row.ratio < 1.03
        nothing_stops_cuda_graphs(row)


@pytest.mark.slow
def test_a_plainly_compiled_model_makes_its_gates_once(resnet):
    _, *mixed = lower(Setting("resnet18", way="torch.compile(wf)"), resnet)
    for row in mixed:
        assert row.ratio < 1.03
        nothing_stops_cuda_graphs(row)


@pytest.mark.slow
def test_a_package_makes_its_gates_once(resnet):
    base, *mixed = lower(Setting("resnet18", way=gpu_lowering.PACKAGE), resnet)
    assert [row.forget for row in mixed] == ["labels", "sets"]
    for row in mixed:
        assert row.kernels <= base.kernels + 3  # they make the gates
        assert row.ratio < 1.01
        nothing_stops_cuda_graphs(row)


@pytest.mark.slow
def test_a_package_of_a_vit_scales_queries_keys_and_values_in_one_pass(vit):
    base, labels, _ = lower(Setting("vit_tiny", way=gpu_lowering.PACKAGE), vit)
    assert labels.kernels == base.kernels + 2 + 1  # one in each block, and one makes the gates


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_so_it_is_in_every_dtype_and_memory_format(resnet, dtype, memory_format):
    base, *mixed = lower(Setting("resnet18", dtype, memory_format), resnet)
    for row in mixed:
        assert row.kernels == base.kernels
        assert row.ratio < 1.02
        nothing_stops_cuda_graphs(row)


@pytest.mark.slow
def test_a_step_of_untraining_moves_less_than_a_step_of_training(resnet):
    setting = Setting("resnet18", "float32", step="training", batch=8)
    _, *mixed = lower(setting, resnet)
    for row in mixed:
        assert row.ratio < 0.9
        nothing_stops_cuda_graphs(row)


@pytest.mark.parametrize("forget", FORGETS, ids=str)
@torch.no_grad()
def test_an_eager_forward_does_not_wait_for_the_device(x, forget):
    wf = apply(tiny("cnn"), x)
    wf(x, forget=torch.tensor([0, 1, 2, -1]))
    with pretended_gpu():
        to_device(wf)
        there = torch.empty(x.shape, dtype=x.dtype, device="cuda")
        values = {
            "labels": torch.empty(4, dtype=torch.int64, device="cuda"),
            "sets": torch.empty(4, 4, dtype=torch.bool, device="cuda"),
        }
        with Outside() as outside:
            wf(there, forget=values.get(str(forget), forget))
    assert outside.waits == []


@contextmanager
def inference_mode():
    with torch.inference_mode():
        yield


@contextmanager
def autocast():
    with torch.no_grad(), torch.autocast("cuda", torch.float16):
        yield


@pytest.mark.parametrize("labels_on", ["cpu", "cuda"])
@pytest.mark.parametrize("around", [torch.no_grad, inference_mode, autocast])
def test_cuda_graphs_take_changing_labels_and_sets_from_the_cpu_or_the_device(
    x, around, labels_on, monkeypatch
):
    # Labels on the CPU are looked at, which waits for nobody; fake ones have no values.
    monkeypatch.setattr("wfilter.core.forget.readable", lambda values: False)
    wf = apply(tiny("cnn"), x).float()
    wf(x.float(), forget=torch.tensor([0, 1, 2, -1]))
    wf.alphas.requires_grad_(False)
    with pretended_gpu() as gpu, around():  # as mode="reduce-overhead": cudagraphs are on
        to_device(wf)
        wf.compile(backend=gpu.backend, fullgraph=True)
        there = torch.empty(x.shape, device="cuda")
        forms = {"dtype": torch.int64, "size": (4,)}, {"dtype": torch.bool, "size": (4, 4)}
        for form in forms:
            seen = []
            for _ in range(3):  # other labels each time
                with Outside() as outside:
                    wf(there, forget=torch.empty(**form, device=labels_on))
                seen.append([id(graph) for graph in outside.graphs])
                assert outside.waits == []
            assert seen[0] == seen[1] == seen[2]
            for graph in outside.graphs:
                assert (graph.refused, graph.mutated, graph.host_reads) == ([], [], [])
                assert graph.captured == 1
