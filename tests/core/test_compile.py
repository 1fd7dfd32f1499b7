"""Compiled forwards: one graph for all labels, no graph break, the numbers of the eager ones."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import wfilter
from helpers import apply, close, images, randomise, tiny
from wfilter.core.compiling import has_compiler

LABELS = torch.tensor([3, -1, 0, 1])


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# README, "Limits": its dynamo follows neither unflatten in a function mode nor id() under vmap.
OLD_TORCH = pytest.mark.skipif(
    torch.__version__ < torch.torch_version.TorchVersion("2.15"),
    reason="this torch cannot compile attention, folded batch axes and gates per element",
)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "name",
    [
        "cnn",
        pytest.param("attention", marks=OLD_TORCH),
        pytest.param("batch-major windows", marks=OLD_TORCH),
        "bypassed module",
    ],
)
@torch.no_grad()
def test_one_graph_serves_all_labels(name, backend, x):
    wf = apply(tiny(name), x)
    wf.inspect(x)
    expected = [wf(x, forget=torch.roll(LABELS, i)) for i in range(4)]
    compiled = torch.compile(wf, backend=backend, fullgraph=True)
    close(compiled(x, LABELS), expected[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(4):
            close(compiled(x, torch.roll(LABELS, i)), expected[i])
        close(compiled(x, torch.full_like(LABELS, -1)), wf(x))
    assert graphs() == 1


@torch.no_grad()
def test_sets_have_a_graph_of_their_own_and_the_base_model_another(wf, x):
    wf.inspect(x)
    compiled = torch.compile(wf, backend="eager", fullgraph=True)
    for sets in (torch.eye(4).bool(), torch.ones(4, 4).bool(), torch.zeros(4, 4).bool()):
        close(compiled(x, sets), wf(x, forget=sets))
    assert graphs() == 1
    close(compiled(x), wf(x))
    close(compiled(x, LABELS), wf(x, forget=LABELS))
    assert graphs() == 3


@pytest.mark.parametrize("granularity", ["out", pytest.param("element", marks=OLD_TORCH)])
@torch.no_grad()
def test_exact_path_compiles_to_one_graph_too(granularity, x):
    wf = apply(tiny("layer run once"), x, targets="*", granularity=granularity)
    wf.inspect(x)
    compiled = torch.compile(wf, backend="eager", fullgraph=True)
    for i in range(3):
        labels = torch.roll(LABELS, i)
        close(compiled(x, labels), wf(x, forget=labels))
    assert graphs() == 1


def test_compiled_gradients_equal_eager_ones(wf, x):
    wf.inspect(x)
    (expected,) = torch.autograd.grad(wf(x, forget=LABELS).square().sum(), wf.alphas)
    compiled = torch.compile(wf, backend="aot_eager", fullgraph=True)
    (gradient,) = torch.autograd.grad(compiled(x, LABELS).square().sum(), wf.alphas)
    close(gradient, expected)


@torch.no_grad()
def test_compile_method_checks_labels_and_follows_the_alphas(wf, x):
    plain = apply(tiny("cnn"), x)
    assert wf.compile(backend="eager", fullgraph=True) is wf
    close(wf(x, forget=LABELS), plain(x, forget=LABELS))
    with pytest.raises(ValueError, match=r"forget=9 is outside 0\.\.3"):
        wf(x, forget=torch.tensor([0, 9, 1, 1]))
    with pytest.raises(TypeError, match="forget has dtype uint8"):
        wf(x, forget=LABELS.clamp(0).to(torch.uint8))
    assert torch.equal(wf(x), plain(x))
    for forget in (2, {1, 3}, torch.eye(4).bool()):
        close(wf(x, forget=forget), plain(x, forget=forget))
    wf.alphas.mul_(0.5)
    plain.alphas.mul_(0.5)
    close(wf(x, forget=LABELS), plain(x, forget=LABELS))


@torch.no_grad()
def test_blocks_are_right_when_compiled(wf, x):
    plain = apply(tiny("cnn"), x)
    wf.compile(backend="eager")
    for row in (1, 2):
        with wf.forgetting(row):
            close(wf(x), plain(x, forget=row))
            close(wf(x, forget=LABELS), plain(x, forget=LABELS))
            with wf.forgetting(None):
                close(wf(x), plain(x))
    close(wf(x), plain(x))


@torch.no_grad()
def test_blocks_are_right_around_a_compiled_filtered_model(wf, x):
    plain = apply(tiny("cnn"), x)
    compiled = torch.compile(wf, backend="eager")
    close(compiled(x), plain(x))
    for row in (1, 2):
        with wf.forgetting(row):
            close(compiled(x), plain(x, forget=row))
    close(compiled(x), plain(x))


class Shifted(nn.Module):
    """Its images are not its first input."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, shift=None, images=None):
        seen = torch.ones(2, 4) if images is None else images
        return self.head(self.layer(seen if shift is None else seen + shift).relu())


@torch.no_grad()
def test_images_keep_their_keyword_in_a_block_around_a_compiled_filtered_model():
    x = images(2, 4, dtype=torch.float32)
    wf = apply(Shifted(), {"images": x})
    compiled = torch.compile(wf, backend="eager")
    with wf.forgetting(1):
        close(compiled(images=x), wf(images=x, forget=1))
        close(compiled(images=x, shift=x + 1), wf(images=x, shift=x + 1, forget=1))


@torch.no_grad()
def test_one_dynamic_graph_serves_labels_sets_and_batches_of_two_or_more(wf, x):
    plain = apply(tiny("cnn"), x)
    wf.compile(backend="eager", fullgraph=True, dynamic=True)
    close(wf(x, forget=LABELS), plain(x, forget=LABELS))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (2, 6, 5, 7):
            other, labels = images(batch, 3, 8, 8), torch.arange(batch) % 4
            sets = torch.rand(batch, 4) < 0.5
            for forget in (labels, sets, 2, {1, 3}):
                close(wf(other, forget=forget), plain(other, forget=forget))
    assert graphs() == 1
    close(wf(x[:1], forget=LABELS[:1]), plain(x[:1], forget=LABELS[:1]))
    close(wf(x), plain(x))
    assert graphs() == 3  # one more for a single image, one for nothing to forget


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it where it is no error
def test_a_compiled_step_gives_the_eager_gradients_row_sparse_ones_too(wf, x):
    for sparse in (False, True):
        plain = apply(tiny("cnn"), x)
        wf.sparse = plain.sparse = sparse
        wf.compile(backend="aot_eager", fullgraph=True)
        (expected,) = torch.autograd.grad(plain(x, forget=LABELS).square().sum(), plain.alphas)
        (gradient,) = torch.autograd.grad(wf(x, forget=LABELS).square().sum(), wf.alphas)
        assert gradient.is_sparse == sparse
        close(gradient.to_dense(), expected.to_dense())


@torch.no_grad()
def test_no_value_leaves_the_graph_on_its_way(wf, x):
    """A value read on the host would make a GPU wait."""
    read = []

    def backend(graph, inputs):
        names = [getattr(n.target, "__name__", str(n.target)) for n in graph.graph.nodes]
        read.extend(set(names) & {"item", "tolist", "nonzero", "cpu", "masked_select", "unique"})
        return graph

    torch.compile(wf, backend=backend, fullgraph=True)(x, LABELS)
    wf.compile(backend=backend, fullgraph=True)(x, forget=LABELS)
    assert graphs() == 2
    assert read == []


def moved_to_a_pretended_gpu(wf):
    """In place, inside a FakeTensorMode: CUDA parameters without values, so none can be read."""
    for module in wf.modules():
        for kept in (module._parameters, module._buffers):
            for name, old in kept.items():
                if old is not None:
                    new = torch.empty(old.shape, dtype=old.dtype, device="cuda")
                    kept[name] = (
                        torch.nn.Parameter(new, False) if kept is not module._buffers else new
                    )


@pytest.mark.parametrize("name", ["cnn", "attention", "batch-major windows"])
def test_a_mixed_batch_on_a_gpu_reads_no_value_back(name, x):
    wf = apply(tiny(name), x)
    wf.inspect(x)
    with FakeTensorMode():
        moved_to_a_pretended_gpu(wf)
        there = torch.empty(x.shape, dtype=x.dtype, device="cuda")
        labels = torch.empty(4, dtype=torch.int64, device="cuda")
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
            int(labels.max())  # what must not happen
        for forget in (labels, torch.empty(4, 4, dtype=torch.bool, device="cuda")):
            output = wf(there, forget=forget)
            assert output.device.type == "cuda"
            assert output.shape == (4, 4)


def test_without_a_cpp_compiler_one_line_says_so_and_forwards_stay_eager(wf, x, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.warns(UserWarning, match=r"needs a C\+\+ compiler.*stay eager\. Install"):
        wf.compile()
    close(wf(x, forget=LABELS), apply(tiny("cnn"), x)(x, forget=LABELS))
    assert graphs() == 0


@torch.no_grad()
def test_batch_sizes_cost_at_most_two_more_graphs(wf, x):
    plain = apply(tiny("cnn"), x)
    wf.compile(backend="eager")
    for batch in (4, 6, 5, 7, 1, 3):
        other, labels = images(batch, 3, 8, 8), torch.arange(batch) % 4
        close(wf(other, forget=labels), plain(other, forget=labels))
    assert graphs() <= 3


@torch.no_grad()
def test_graph_break_in_the_base_model_is_refused_since_gates_would_get_lost(x):
    class Breaking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Conv2d(3, 4, 3)
            self.second = torch.nn.Conv2d(4, 4, 3)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x).mean((2, 3))

    wf = apply(randomise(Breaking()), x)
    wf.inspect(x)
    compiled = torch.compile(wf, backend="eager")
    close(compiled(x), wf(x))
    for refused in (compiled, wf.compile(backend="eager")):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
            refused(x, LABELS)


@torch.no_grad()
def test_copies_of_a_compiled_model_are_plain_and_right(wf, x):
    import copy

    plain = apply(tiny("cnn"), x)
    wf.compile(backend="eager")
    wf(x, forget=LABELS)
    close(copy.deepcopy(wf)(x, forget=LABELS), plain(x, forget=LABELS))
    assert set(wf.state_dict()) == set(plain.state_dict())
    wfilter.remove_weight_filtering(wf)


@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C++ compiler on a CPU")
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_inductor_gives_the_numbers_of_the_eager_forward(x):
    wf = apply(tiny("bypassed module"), x)
    expected = wf(x, forget=LABELS)
    wf.compile(fullgraph=True)
    close(wf(x, forget=LABELS), expected)


@torch.no_grad()
def test_frozen_graphs_follow_the_alphas_or_are_refused(x):
    x = x.float()
    wf = apply(tiny("cnn").float(), x)
    chosen = torch.eye(4).bool()
    with torch._inductor.config.patch(freezing=True):
        with pytest.raises(Exception, match=r"would keep the alphas.*Call wf\.compile\(\)"):
            torch.compile(wf, fullgraph=True)(x, forget=chosen)
        torch._dynamo.reset()
        wf.compile(fullgraph=True)
        for forget in (chosen, LABELS):
            wf(x, forget=forget)
            wf.alphas.neg_()
            close(wf(x, forget=forget), copy.deepcopy(wf)(x, forget=forget), 1e-5)
