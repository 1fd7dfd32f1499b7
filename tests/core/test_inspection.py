"""What an inspection finds, and that it never guesses: right, or refused with the reason."""

import pytest
import torch
from torch import nn

import reference
import wfilter
from helpers import CLASSES, TINY, apply, close, family, randomise, tiny
from wfilter.core.guessing import example_inputs

LABELS = torch.tensor([3, -1, 0, 1])


class Body(nn.Module):
    """A convolution, something odd, a head."""

    def __init__(self, odd):
        super().__init__()
        self.odd = odd
        self.conv = nn.Conv2d(3, 5, 3)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.odd(self, x))


def why(wf, name):
    return next(row for row in wf.plan if row.name == name)


@pytest.mark.parametrize(
    ("model", "name", "path", "reason"),
    [
        ("cnn", "stem.weight", "fused", "conv2d, batch on axis 0"),
        ("cnn", "norm.weight", "fused", "batch_norm, batch on axis 0"),
        ("attention", "attention.in_proj_weight", "fused", "batch on axis 1"),
        ("attention", "attention.out_proj.weight", "fused", "multi_head_attention_forward"),
        ("attention", "position", "exact", "which has no rule"),
        ("batch-major windows", "inner.weight", "fused", "axis 0, folded batch-major"),
        ("batch-minor windows", "inner.weight", "fused", "axis 0, folded batch-minor"),
        ("bypassed module", "qkv.weight", "fused", "linear, batch on axis 0"),
        ("layer called twice", "shared.weight", "fused", "conv2d, batch on axis 0"),
        ("layer run once", "bias.weight", "exact", "run once for the whole batch"),
        ("tied weights", "first.weight", "fused", "linear, batch on axis 0"),
    ],
)
def test_plan_gives_path_and_reason(model, name, path, reason, x):
    row = why(apply(tiny(model), x, targets=TINY[model][1]), name)
    assert row.path == path
    assert reason in row.why


def test_plan_prints_as_a_table(wf):
    text = str(wf.plan)
    assert text.splitlines()[0].split() == ["name", "shape", "units", "path", "why"]
    assert "depthwise.weight" in text
    assert text.endswith("5 targets (5 fused), 24 units")


@torch.no_grad()
def test_batch_reversed_inside_the_model_is_exact(x):
    model = randomise(Body(lambda m, x: m.conv(x.flip(0)).mean((2, 3)).flip(0)))
    wf = apply(model, x)
    assert why(wf, "conv.weight").path == "exact"
    close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))


def global_attention(model, x, spread):
    """One query per image for all its windows, as in GCViT; the windows lie image after image."""
    features = model.conv(x)  # (batch, 5, 6, 6)
    windows = features.unflatten(3, (2, 3)).permute(0, 3, 2, 4, 1).flatten(2, 3).flatten(0, 1)
    query = spread(features.mean((2, 3)), 2)  # (batch * 2, 5), as the windows (batch * 2, 18, 5)
    scores = torch.einsum("wtc,wc->wt", windows, query).softmax(1)
    pooled = torch.einsum("wt,wtc->wc", scores, windows)
    return pooled.unflatten(0, (len(x), 2)).mean(1)


@pytest.mark.parametrize(
    "odd",
    [
        lambda m, x: (m.conv(x) + m.conv(x).flip(0)).mean((2, 3)),
        lambda m, x: m.conv(x - x.mean(0)).mean((2, 3)),
        lambda m, x: m.conv(x).cumsum(0).mean((2, 3)),
        lambda m, x: m.conv(x).roll(1, 0).mean((2, 3)),
        lambda m, x: (m.conv(x) - m.conv(x).nan_to_num().mean(0)).nan_to_num().mean((2, 3)),
        lambda m, x: global_attention(m, x, lambda query, count: query.repeat(count, 1)),
    ],
    ids=["flip", "mean", "cumsum", "roll", "NaN dropped", "query of another image"],
)
def test_model_that_mixes_samples_is_refused(odd, x):
    with pytest.raises(ValueError, match="Body mixes the samples of a batch"):
        apply(randomise(Body(odd)), x)


def test_weights_that_are_no_numbers_are_named_instead_of_mixing(x):
    model = randomise(Body(lambda m, x: m.conv(x).mean((2, 3))))
    with torch.no_grad():
        model.conv.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"conv\.weight of this Body contains NaN"):
        apply(model, x)


@pytest.mark.parametrize("mixes", [False, True])
def test_model_with_several_outputs_is_probed_in_all_of_them(mixes, x):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny("cnn")

        def forward(self, x):
            logits = self.inner(x)
            return {"logits": logits, "second": logits - (logits.mean(0) if mixes else 0)}

    if mixes:
        with pytest.raises(ValueError, match="Pair mixes the samples of a batch"):
            apply(Pair(), x, num_classes=CLASSES)
        return
    wf = apply(Pair(), x, num_classes=CLASSES)
    assert wf(x, forget=LABELS)["logits"].shape == (4, CLASSES)
    assert wf.verify(x, LABELS)["fused"] < 1e-12


@torch.no_grad()
def test_model_that_drops_nan_is_exact(x):
    model = randomise(Body(lambda m, x: m.conv(x.nan_to_num()).mean((2, 3)).nan_to_num()))
    wf = apply(model, x)
    close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))


@torch.no_grad()
def test_one_logit_per_sample_without_an_axis_of_its_own(x):
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 1), nn.Flatten(0))
    wf = apply(model.double(), x, targets="*", num_classes=2)
    labels = torch.tensor([0, 1, -1, 1])
    close(wf(x, forget=labels), reference.logits(wf, x, labels))


def test_batch_norm_without_running_statistics_is_refused(x):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(144, CLASSES),
    )
    with pytest.raises(ValueError, match="mixes the samples of a batch"):
        apply(model.double(), x)


@torch.no_grad()
def test_global_query_that_stays_with_its_image_is_fused(x):
    model = Body(
        lambda m, x: global_attention(m, x, lambda q, count: q.repeat_interleave(count, 0))
    )
    wf = apply(randomise(model), x)
    assert why(wf, "conv.weight").path == "fused"
    close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))


@pytest.mark.filterwarnings("ignore")
def test_gcvit_is_refused_exactly_if_it_mixes_samples():
    import timm

    model = timm.create_model("gcvit_xxtiny", num_classes=10, img_size=64).eval()
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        alone = model(torch.cat([image, image]))[:1]
        other = model(torch.cat([image, torch.rand(1, 3, 64, 64)]))[:1]
    if (alone - other).abs().max() > 1e-4:  # so it is before timm 1.0.31
        with pytest.raises(ValueError, match="GlobalContextVit mixes the samples of a batch"):
            wfilter.apply_weight_filtering(model, example_input=image)
        return
    wf = apply(model.double(), image.double())
    images = torch.rand(4, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        close(wf(images, forget=LABELS), reference.logits(wf, images, LABELS))


@torch.no_grad()
def test_layer_called_on_different_layouts_is_exact(x):
    def odd(model, x):
        folded = model.conv(x.unflatten(3, (2, 4)).movedim(3, 1).flatten(0, 1)).mean((2, 3))
        return model.conv(x).mean((2, 3)) + folded.unflatten(0, (len(x), 2)).sum(1)

    wf = apply(randomise(Body(odd)), x)
    assert "different batch layouts" in why(wf, "conv.weight").why
    close(wf(x, forget=LABELS), reference.logits(wf, x, LABELS))


def test_auxiliary_head_unused_in_eval_is_left_out_by_auto_and_refused_when_named():
    from torchvision.models import GoogLeNet

    model = GoogLeNet(num_classes=10, init_weights=False).eval()
    image = torch.rand(1, 3, 32, 32)
    with pytest.raises(ValueError, match="is a target, but no forward uses it in eval mode"):
        wfilter.apply_weight_filtering(model, targets="aux1.*", example_input=image)
    wf = wfilter.apply_weight_filtering(model, example_input=image)
    assert not [target.name for target in wf.targets if target.name.startswith("aux")]


def test_parameter_read_from_a_cache_is_refused_at_the_first_forward():
    model, x = family("timm levit")
    with pytest.raises((RuntimeError, ValueError), match="attention_biases"):
        apply(model, x, targets="*attention_biases")(x, forget=LABELS)


def test_probe_leaves_buffers_as_they_were(x):
    class Counting(Body):
        def __init__(self):
            super().__init__(lambda m, x: m.conv(x).mean((2, 3)))
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x):
            self.largest.copy_(torch.maximum(self.largest, x.max()))
            return super().forward(x)

    model = Counting().double()
    apply(model, x)
    assert model.largest == 0


def test_integer_input_is_refused():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, CLASSES))
    with pytest.raises(TypeError, match=r"input has dtype int64\. Weight filtering needs a float"):
        apply(model, torch.zeros(1, 3, dtype=torch.int64), targets="0.*")


def test_input_that_cannot_be_guessed_says_what_was_tried():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return self.conv(x.view(-1, 3, 5, 11)).mean((2, 3))

    with pytest.raises(ValueError, match=r"Pass example_input=images \(a small batch\)\. Tried:"):
        wfilter.apply_weight_filtering(Picky())
    wf = wfilter.apply_weight_filtering(Picky(), example_input=torch.zeros(1, 3, 5, 11))
    assert wf.num_classes == 4


def test_first_guess_is_what_the_model_says():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=3)
    assert next(example_inputs(model)).shape == (1, 3, 64, 64)
    assert next(example_inputs(nn.Linear(7, 2))).shape == (1, 7)


def test_target_unused_for_another_image_size_is_refused(x):
    def odd(model, x):
        return model.conv(x).mean((2, 3)) if x.shape[-1] < 12 else x.new_ones(len(x), 5)

    wf = apply(randomise(Body(odd)), x)
    big = torch.rand(2, 3, 12, 12, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"conv\.weight is filtered but not used for inputs of"):
        wf(big, forget=torch.tensor([0, 1]))


def test_windows_that_depend_on_the_image_size_are_found_again():
    model, small = family("torchvision swin")
    wf = apply(model, small)
    other = torch.rand(3, 3, 48, 48, dtype=torch.float64)
    labels = torch.tensor([2, -1, 5])
    with torch.no_grad():
        close(wf(other, forget=labels), reference.logits(wf, other, labels))
        close(wf(small, forget=LABELS), reference.logits(wf, small, LABELS))


def test_the_shape_that_apply_has_proved_is_not_looked_at_again():
    model, x = randomise(Body(lambda model, x: model.conv(x).mean((2, 3)))), torch.rand(4, 3, 8, 8)
    wf, calls = apply(model, x.double()), []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    wf(x.double(), forget=LABELS)
    assert len(calls) == 1
    wf(torch.rand(4, 3, 9, 9).double(), forget=LABELS)
    assert len(calls) > 2
