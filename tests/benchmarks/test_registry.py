"""One architecture per timm family, and torchvision's kinds, through the checks of the sweep."""

import json
import sys

import pytest
import torch
from torch import nn

import wfilter
from registry import checks, models
from registry import page as registry_page
from registry import sweep as registry
from wfilter.core import attach
from wfilter.core import modes as gating

# Their own attention mixes the samples of a batch, or did: csatv2 multiplies q and k across it,
# gcvit before timm 1.0.31 repeats the global query in another order than the windows.
MIXING = {"timm/csatv2", "timm/gcvit_xxtiny"}
# Large at any input size: with the slow tests. The rest takes two minutes.
HEAVY = {
    "timm/efficientvim_m1",
    "timm/inception_v3",
    "timm/mobilenetv5_base",
    "timm/nextvit_small",
    "timm/resnet50_clip",
    "timm/samvit_base_patch16_224",
    "timm/selecsls42",
    "timm/vgg11",
    "torchvision/maxvit_t",
}
# Hundreds of layers each, and no kind of layer that the others lack.
SLOW = {"timm/nasnetalarge", "timm/pnasnet5large"}
# Clones its bias and zeroes a part of it in place: no rule sees through that, so exactly, slower.
EXACT = {"torchvision/swin_v2_t"}
FAMILIES = [key for key in models.REPRESENTATIVES if key not in MIXING | SLOW]
OTHERS = [
    "timm/tf_mobilenetv3_small_minimal_100",  # pads by the shape of its weight
    "timm/nf_regnet_b0",  # standardised weights
    "timm/resnet50_clip",  # attention pooling
    "torchvision/alexnet",
    "torchvision/googlenet",  # heads that only training uses
    "torchvision/maxvit_t",
    "torchvision/mobilenet_v3_small",
    "torchvision/regnet_y_400mf",
    "torchvision/resnet18",
    "torchvision/swin_t",
    "torchvision/swin_v2_t",
    "torchvision/vit_b_32",
    "quantised/quantized_mobilenet_v2",  # not yet converted: still in float
    "video/mvit_v2_s",
]


STORED = registry.load_rows(registry.RESULTS / "registry.jsonl")  # none in a source distribution


class Known(dict):
    def __missing__(self, key):
        assert not STORED or key in STORED, f"{key} is misspelt: no version had it"
        pytest.skip(f"the installed version has no {key}")


@pytest.fixture(scope="module")
def known():
    return Known((architecture.key, architecture) for architecture in models.architectures())


@pytest.mark.parametrize(
    "key",
    [pytest.param(k, marks=[pytest.mark.slow] * (k in HEAVY)) for k in [*FAMILIES, *OTHERS]],
)
def test_architecture_equals_the_oracle_on_the_fused_path(known, key):
    row = checks.examine(known[key])
    assert row["status"] == "pass", row
    assert ("exact" in row["paths"]) == (key in EXACT), row["exact"]


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(SLOW))
def test_architecture_with_hundreds_of_layers_equals_the_oracle(known, key):
    assert checks.examine(known[key])["status"] == "pass"


@torch.no_grad()
def mixes_samples(architecture):
    """By a NaN, not by values: what csatv2 mixes is the same for all samples until gates differ."""
    built = models.build(architecture)
    built.x[1] = float("nan")
    return bool(built.model(built.x)[0].isnan().any())


@pytest.mark.parametrize("key", sorted(MIXING))
@pytest.mark.filterwarnings("ignore")
def test_architecture_is_refused_exactly_if_it_mixes_samples(known, key):
    row = checks.examine(known[key])
    if mixes_samples(known[key]):
        assert row["status"] == "refused"
        assert "mixes the samples of a batch" in row["why"]
    else:
        assert row["status"] == "pass", row


def test_int8_architecture_is_refused(known):
    row = checks.examine(known["quantised/quantized_resnet18:int8"])
    assert row["status"] == "refused"
    assert "Filter the float model" in row["why"]


# ---- the list of representatives, whatever timm is installed ---------------------------------


def test_every_stored_timm_family_has_one_listed_representative():
    if not STORED:
        pytest.skip("the results of the sweep are not here")
    families = {row["family"] for key, row in STORED.items() if key.startswith("timm/")}
    assert sorted(STORED[key]["family"] for key in models.REPRESENTATIVES) == sorted(families)


def test_every_installed_timm_family_has_one_representative(known):
    families = {a.family for a in known.values() if a.library == "timm"}
    chosen = [a.family for a in models.representatives(known.values())]
    assert sorted(chosen) == sorted(families)


def test_family_that_is_not_listed_is_represented_by_its_smallest(known, monkeypatch):
    two = [a for a in known.values() if a.key.startswith(("timm/vgg", "timm/repghost"))]
    monkeypatch.setattr(models, "REPRESENTATIVES", ("timm/vgg16",))
    chosen = [a.key for a in models.representatives(two)]
    assert chosen == ["timm/repghostnet_050", "timm/vgg16"]


def test_family_that_is_not_listed_equals_the_oracle_or_is_refused(known):
    chosen = models.representatives(known.values())
    unlisted = [a for a in chosen if a.key not in models.REPRESENTATIVES]
    if not unlisted:
        pytest.skip("every family of the installed timm is listed")
    rows = [checks.examine(architecture) for architecture in unlisted]
    built = [row for row in rows if "edge" in row or row["status"] != "fail"]
    assert all(row["status"] in ("pass", "refused") for row in built), built
    if len(built) < len(rows):
        pytest.skip(f"could not be run at all: {[row for row in rows if row not in built]}")


# ---- the checks themselves can fail ----------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, models.CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


@pytest.fixture
def small():
    model = Small().double().eval()
    models.randomise(model)
    return model, torch.rand(models.SAMPLES, 3, 8, 8, dtype=torch.float64)


def test_right_model_passes(small):
    facts = checks.check(*small)
    assert facts["paths"] == {"fused": 2}
    assert facts["silent"] == {}


def trust_the_marks(monkeypatch):
    """Leave out the proof of ``apply``, which would put a wrong target on a slower path."""
    monkeypatch.setattr(attach, "prove", lambda wf, inspection, example: inspection)


def test_gates_of_the_wrong_sample_are_noticed(small, monkeypatch):
    trust_the_marks(monkeypatch)
    right = gating.GateMode._of
    monkeypatch.setattr(gating.GateMode, "_of", lambda *a: right(*a).flip(0))
    with pytest.raises(checks.Failed, match="sets: differs from the oracle"):
        checks.check(*small)


def test_apply_itself_puts_targets_with_gates_of_the_wrong_sample_on_a_slower_path(
    small, monkeypatch
):
    right = gating.GateMode._of
    monkeypatch.setattr(gating.GateMode, "_of", lambda *a: right(*a).flip(0))
    paths = checks.check(*small)["paths"]
    assert set(paths) == {"exact"}


def test_forgotten_bias_gate_is_noticed(small, monkeypatch):
    trust_the_marks(monkeypatch)
    right = gating.GateMode.gate

    def without_bias_gate(mode, output, axis, site, bias, bias_site):
        return right(mode, output, axis, site, bias, None)

    monkeypatch.setattr(gating.GateMode, "idle", lambda mode: [])
    monkeypatch.setattr(gating.GateMode, "gate", without_bias_gate)
    with pytest.raises(checks.Failed, match="differs from the oracle"):
        checks.check(*small)


def test_parameter_without_effect_is_noticed(small):
    model, x = small
    with torch.no_grad():
        model.norm.weight[:] = 0
    facts = checks.check(model, x)
    assert facts["silent"] == {"conv.weight": checks.NO_EFFECT, "conv.bias": checks.NO_EFFECT}


def test_gate_without_effect_on_a_parameter_that_has_one_is_noticed(small, monkeypatch):
    model, x = small
    monkeypatch.setattr(checks, "_moves", lambda *_: 0.0)
    wf = wfilter.apply_weight_filtering(model, example_input=x)
    wf.alphas.grad = torch.zeros_like(wf.alphas)
    silent = checks._silent_targets(wf, x, scale=1.0)
    assert silent == {"conv.weight": "unexplained", "conv.bias": "unexplained"}


def test_touched_parameter_is_noticed(small, monkeypatch):
    model, x = small
    monkeypatch.setattr(checks, "_time_ratio", lambda *_: float(model.head.bias.add_(1)[0]))
    with pytest.raises(checks.Failed, match="parameters or buffers were changed"):
        checks.check(model.requires_grad_(False), x)


# ---- building --------------------------------------------------------------------------------


def test_shortening_keeps_one_block_of_each_kind():
    narrow, wide = (lambda: nn.Linear(4, 4)), (lambda: nn.Linear(8, 8))
    blocks = [narrow(), narrow(), narrow(), nn.Linear(4, 8), wide(), wide(), wide()]
    model = nn.Sequential(nn.Sequential(*blocks))
    assert models.shorten(model) == 3
    assert [m.in_features for m in model[0]] == [4, 4, 4, 8]
    assert model(torch.ones(1, 4)).shape == (1, 8)


def test_building_without_random_init_keeps_constants():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with models.without_random_init():
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        nn.init.trunc_normal_(model[0].weight)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model[1].weight, torch.ones(4))


# ---- the sweep -------------------------------------------------------------------------------


def run(monkeypatch, out, *options):
    monkeypatch.setattr(sys, "argv", ["registry.py", "--out", str(out), *options])
    registry.main()


def test_sweep_writes_rows_and_summary_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    run(monkeypatch, out, "--match", "timm/test_byobnet")
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["status"] == "pass"
    text = out.with_suffix(".md").read_text()
    assert "| byobnet | 1 | 1 | 0 | 0 | 0 | 30 | 100.0 % |" in text
    monkeypatch.setattr(registry.Worker, "examine", lambda *_: pytest.fail("examined twice"))
    run(monkeypatch, out, "--match", "timm/test_byobnet")


def test_time_out_is_a_row(known):
    row = registry.Worker(seconds=0.1, gigabytes=10).examine(known["timm/test_vit"])
    assert row["status"] == "fail"
    assert row["why"] == "took more than 0 seconds"


def test_too_much_memory_is_a_row(known):
    row = registry.Worker(seconds=60, gigabytes=0.001).examine(known["timm/test_vit"])
    assert row["status"] == "large"


def test_summary_names_what_did_not_pass():
    facts = {"date": "2026-01-01", "torch": "2", "timm": "1", "torchvision": "0"}
    rows = [
        {"key": "timm/a", "family": "f", "status": "fail", "why": "too\nbad", **facts},
        {"key": "timm/b", "family": "f", "status": "refused", "why": "no classifier", **facts},
    ]
    text = registry_page.summarise(rows)
    assert "**Partial: 2 of " in text
    assert "Rows by commit: unknown (2)." in text
    assert "| f | 2 | 0 | 1 | 1 | 0 | 0 | - | - |" in text
    assert "- fail: too bad\n  `timm/a`" in text


def test_summary_says_how_many_rows_are_of_which_timm():
    facts = {"date": "2026-01-01", "torch": "2", "torchvision": "0", "status": "refused", "why": ""}
    rows = [
        {"key": f"timm/{name}", "family": "f", "timm": version, **facts}
        for name, version in (("a", "1.0.31"), ("b", "1.0.30"), ("c", "1.0.30"))
    ]
    assert "timm 1.0.30 (2 rows) and 1.0.31 (1 rows)," in registry_page.summarise(rows)
    assert "timm 1.0.30," in registry_page.summarise(rows[1:])
