"""Filter every classifier of timm and torchvision, and check each against the oracle.

    python benchmarks/registry.py                       # all of them; about an hour on one core
    python benchmarks/registry.py --match 'timm/swin*'  # some of them
    python benchmarks/registry.py --redo fail           # once more what failed
    python benchmarks/registry.py --summary             # only rebuild the Markdown table

Each architecture is built without pretrained weights, with 10 classes and at the smallest input it
takes, filtered with ``targets="auto"`` and checked (see ``check``). Its row goes to
``results/registry.jsonl`` at once: the same command, given again, goes on where it stopped. Blocks
that repeat another one are left out, except in one architecture per family (``REPRESENTATIVES``),
which has its full depth. A crash, a time-out or too much memory is a row as well.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import hashlib
import json
import math
import multiprocessing
import os
import platform
import queue
import re
import subprocess
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import wfilter
from wfilter.oracle import one_at_a_time
from wfilter.targets import select_targets

RESULTS = Path(__file__).parent / "results"
CLASSES = 10
SAMPLES = 3
# What the samples forget: as sets and as labels; both begin with "class 3" and "nothing".
SETS = torch.zeros(SAMPLES, CLASSES, dtype=torch.bool)
SETS[0, 3] = SETS[2, 0] = SETS[2, 5] = SETS[2, 7] = True
LABELS = torch.tensor([3, -1, 9])
# Largest difference from the oracle, as a share of the largest logit.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
# A gradient below this share of the median target's is looked at: does the target do anything?
FAINT = {torch.float64: 1e-9, torch.float32: 1e-5}
GRADIENTS_LOOSER = 100
# Above this many parameters float32 is used: float64 convolutions are several times slower.
FLOAT64_PARAMETERS = {"short": 3e6, "full": 30e6}
KEY_BIAS = re.compile(
    r".*(^|[._])(k|key|to_k|wk)(_proj|_project|_conv)?(\..*)?\.?bias|.*conv_attn\.bias"
)
KEY_BIAS_REASON = "a bias on keys or scores adds the same to all of them; softmax cancels it"
NO_EFFECT = "setting it to 0 by hand in a baked model changes nothing either"
UNEXPLAINED = "unexplained"
# Edges to try, smallest first; the model's own size comes last.
EDGES = (64, 56, 96, 112, 120, 128, 160, 192)
VIDEO_SHAPES = ((8, 32, 32), (8, 64, 64), (16, 64, 64), (16, 224, 224))
# The smallest architecture of each timm family: examined at full depth in the sweep, and short in
# the tests.
SMALLEST = """
    beit_base_patch16_224 botnet26t_256 test_byobnet cait_xxs24_224 coat_tiny convit_tiny
    convmixer_768_32 convnext_atto cpubone_nano crossvit_9_240 csatv2 cs3darknet_focus_s
    davit_tiny deepseek_vit_412m deit_tiny_distilled_patch16_224 densenet121 dla46_c dpn48b
    edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientnet_b0 efficientvim_m1
    efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224 fasternet_t0 fastvit_t8
    focalnet_tiny_srf gcvit_xxtiny gemma4_vit_167m ghostnet_050 hardcorenas_a hgnetv2_b0
    hiera_tiny_224 sam2_hiera_tiny hrnet_w18_small iformer_t inception_next_atto
    inception_resnet_v2 inception_v3 inception_v4 lcnetv2_small levit_128s lowformer_b0
    mambaout_femto maxvit_pico_rw_256 poolformer_s12 resmlp_12_224 mobilenetv3_small_050
    mobilenetv5_base mobilevit_xxs mvitv2_tiny naflexvit_base_patch16_gap nasnetalarge nest_tiny
    nextvit_small nf_resnet26 pit_ti_224 pnasnet5large pvt_v2_b0 qwen3_vit_88m rdnet_tiny
    regnety_002 repghostnet_050 repvit_m0_9 res2net50_48w_2s resnest14d resnet10t
    resnetv2_50x1_bit rexnet_100 selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18
    starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window8_256
    swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_patch16_224 tresnet_m twins_svt_small vgg11
    visformer_tiny vit_tiny_patch16_224 vit_tiny_r_s16_p8_224 vit_relpos_small_patch16_224
    samvit_base_patch16_224 vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw legacy_xception
    xception41 xcit_nano_12_p16_224
"""
REPRESENTATIVES = tuple(f"timm/{name}" for name in SMALLEST.split())


# ---- which architectures ---------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """One row to be: ``key`` is ``library/name``."""

    key: str
    family: str

    @property
    def library(self) -> str:
        return self.key.split("/")[0]

    @property
    def name(self) -> str:
        return self.key.split("/")[1]


def architectures() -> list[Architecture]:
    """Every entry of both registries, one family after the other."""
    import timm
    import torchvision
    from timm.models._registry import _model_to_module

    found = [Architecture(f"timm/{n}", _model_to_module[n]) for n in timm.list_models()]
    for library, module in (
        ("torchvision", torchvision.models),
        ("video", torchvision.models.video),
        ("quantised", torchvision.models.quantization),
    ):
        for name in torchvision.models.list_models(module):
            builder = torchvision.models.get_model_builder(name)
            found.append(Architecture(f"{library}/{name}", builder.__module__.split(".")[-1]))
            if library == "quantised":
                found.append(Architecture(f"{library}/{name}:int8", found[-1].family))
    return sorted(found, key=lambda a: (a.library != "timm", a.library, a.family, a.key))


# ---- building --------------------------------------------------------------------------------


class SkipRandomInit(TorchDispatchMode):
    """Leave out the drawing of initial weights: ``randomise`` draws its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("normal_", "uniform_"):
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def without_random_init() -> Iterator[None]:
    """Inside, building a model costs no random numbers and touches little memory."""

    def leave(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    import timm.layers.weight_init

    with (
        mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", leave),
        mock.patch.object(torch.nn.init, "orthogonal_", leave),
        mock.patch.object(timm.layers.weight_init, "_trunc_normal_", leave),
        SkipRandomInit(),
    ):
        yield


def create(architecture: Architecture, shape: tuple[int, ...] | None) -> nn.Module:
    """The architecture with uninitialised weights, for images of ``shape`` where it must know."""
    if architecture.library == "timm":
        with without_random_init():
            return _create_timm(architecture.name, shape[-1] if shape else None)
    if architecture.name.endswith(":int8"):
        return _create_torchvision(architecture, shape)
    with without_random_init():
        return _create_torchvision(architecture, shape)


def _create_timm(name: str, edge: int | None) -> nn.Module:
    import timm

    if edge is None:
        return timm.create_model(name, num_classes=CLASSES)
    try:
        return timm.create_model(name, num_classes=CLASSES, img_size=edge)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        return timm.create_model(name, num_classes=CLASSES)


def _create_torchvision(architecture: Architecture, shape: tuple[int, ...] | None) -> nn.Module:
    from torchvision.models import get_model

    name, _, int8 = architecture.name.partition(":")
    options: dict[str, Any] = {"num_classes": CLASSES}
    if shape and name.startswith("vit_"):
        options["image_size"] = shape[-1]
    if shape and name == "maxvit_t":
        options["input_size"] = shape[-2:]
    if "googlenet" in name or "inception" in name:
        options |= {"init_weights": False, "aux_logits": True}
    if architecture.library == "quantised":
        options["quantize"] = bool(int8)
    with _small_mvit(shape):
        return get_model(name, **options)


@contextmanager
def _small_mvit(shape: tuple[int, ...] | None) -> Iterator[None]:
    """MViT's builders insist on 16 frames of 224 x 224; the class does not."""
    from torchvision.models.video import mvit

    def smaller(**options: Any) -> nn.Module:
        size = {"temporal_size": shape[1], "spatial_size": shape[2:]} if shape else {}
        return original(**{**options, **size})

    original = mvit.MViT
    with mock.patch.object(mvit, "MViT", smaller):
        yield


def shorten(model: nn.Module) -> int:
    """In place: leave out blocks that repeat their neighbours; how many were left out.

    Of each run of blocks with the same layers and shapes the first stays, and the second where the
    run begins its list: two Swin blocks differ by a shift that neither layers nor shapes show.
    """
    left_out = 0
    for name, child in list(model.named_children()):
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            left_out += _shorten_list(child)
        left_out += shorten(getattr(model, name))
    return left_out


def _shorten_list(blocks: nn.Sequential | nn.ModuleList) -> int:
    kept, signatures = [], []
    for name, block in blocks._modules.items():
        signature = _signature(block)
        repeats = signature is not None and signatures[-1:] == [signature]
        if not repeats or len(signatures) == 1:
            kept.append((name, block))
        signatures.append(signature)
    left_out = len(signatures) - len(kept)
    if left_out:
        numbered = all(name.isdigit() for name, _ in kept)
        blocks._modules.clear()
        for index, (name, block) in enumerate(kept):
            blocks._modules[str(index) if numbered else name] = block
    return left_out


def _signature(block: nn.Module | None) -> tuple[Any, ...] | None:
    """What two blocks must share to count as repeats; None for a block without parameters."""
    if block is None:
        return None
    shapes = tuple(tuple(p.shape) for p in block.parameters())
    text = re.sub(r"(drop_prob|p)=[0-9.e-]+", "", repr(block))
    return (text, shapes) if shapes else None


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """In place: weights of sane size, so that nothing is zero or one by construction."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim >= 2 and parameter.numel() > parameter.shape[0]:
            bound = (6 / (parameter.numel() / parameter.shape[0])) ** 0.5
            parameter.uniform_(-bound, bound).mul_(0.7)
        elif bool(parameter.isfinite().all()) and float(parameter.abs().max()) <= 20:
            parameter.add_(torch.empty_like(parameter).uniform_(-0.1, 0.3))
        else:
            parameter.uniform_(-0.1, 0.3)


@contextmanager
def calibrated(model: nn.Module) -> Iterator[None]:
    """Inside, a forward sets the statistics of each BatchNorm to about those of its input."""

    def set_statistics(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        values = inputs[0].detach().transpose(0, 1).flatten(1)  # (channels, ...)
        spread = values.var(1, correction=0)
        module.running_var.copy_(spread + 0.3 * spread.mean() + 1e-3)
        module.running_mean.copy_(values.mean(1) + 0.2 * spread.sqrt())

    hooks = [
        module.register_forward_pre_hook(set_statistics)
        for module in model.modules()
        if isinstance(getattr(module, "running_mean", None), Tensor)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Built:
    """A model ready to be filtered, an input for it, and how it came about."""

    model: nn.Module
    x: Tensor
    edge: int
    left_out: int
    parameters: int
    fingerprint: str


# Per family and depth: the attempt that worked last comes second for the next architecture, right
# after the smallest input, or first where the family has refused that one over and over.
_worked: dict[tuple[str, bool], tuple[Any, ...]] = {}
_refused_smallest: Counter[tuple[str, bool]] = Counter()


def build(architecture: Architecture, full_depth: bool = False) -> Built:
    """The smallest version of an architecture that runs: short and small, else longer, larger."""
    tries = _attempts(architecture, full_depth)
    smallest = (3, EDGES[0], EDGES[0])
    first_error: Exception | None = None
    while tries:
        short, shape, dtype = attempt = tries.pop(0)
        try:
            built = _build(architecture, short, shape, dtype)
        except Exception as error:
            if isinstance(error, Unsuitable):
                raise
            first_error = first_error or error
            if dtype == torch.float64 and re.search("dtype|Double|double|scalar type", str(error)):
                tries.insert(0, (short, shape, torch.float32))
            continue
        _worked[architecture.family, full_depth] = attempt
        _refused_smallest[architecture.family, full_depth] += shape != smallest
        return built
    assert first_error is not None
    raise first_error


class Unsuitable(Exception):
    """The architecture is no classifier, or cannot be run at all."""


def _attempts(architecture: Architecture, full_depth: bool) -> list[tuple[Any, ...]]:
    """(short?, shape, dtype) in the order to try; shape None is the model's own."""
    if architecture.library == "video":
        shapes: list[Any] = [(3, *shape) for shape in VIDEO_SHAPES]
    else:
        shapes = [(3, edge, edge) for edge in EDGES] + [None]
    if architecture.name.endswith(":int8"):
        return [(False, (3, 96, 96), torch.float32)]
    depths = [False] if full_depth else [True, False]
    tries = [(short, shape, torch.float64) for short in depths for shape in shapes]
    key = architecture.family, full_depth
    if key not in _worked:
        return tries
    skip = _refused_smallest[key] >= 3
    return [_worked[key], *tries] if skip else [tries[0], _worked[key], *tries[1:]]


def _build(
    architecture: Architecture, short: bool, shape: tuple[int, ...] | None, dtype: torch.dtype
) -> Built:
    model = create(architecture, shape)
    left_out = shorten(model) if short else 0
    shape = shape or _own_shape(model)
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > FLOAT64_PARAMETERS["short" if short else "full"]:
        dtype = torch.float32
    model.to(dtype).eval().requires_grad_(False)
    int8 = architecture.name.endswith(":int8")
    if not int8:
        randomise(model)
    x = torch.rand(SAMPLES, *shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), calibrated(model):
        logits = model(x)
    if not isinstance(logits, Tensor) or logits.shape != (SAMPLES, CLASSES):
        given = type(logits).__name__ if not isinstance(logits, Tensor) else tuple(logits.shape)
        raise Unsuitable(f"no classifier: its output is {given}, not ({SAMPLES}, {CLASSES}) logits")
    if not int8 and (not logits.isfinite().all() or torch.equal(logits[0], logits[1])):
        raise ValueError(f"random weights give useless logits at {shape}: {logits[0, :3].tolist()}")
    print_of = hashlib.sha256(f"{model}{_shapes(model)}{logits.tolist()}".encode()).hexdigest()
    return Built(model, x, shape[-1], left_out, parameters, print_of)


def _shapes(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tuple(tensor.shape)) for name, tensor in tensors]


def _own_shape(model: nn.Module) -> tuple[int, ...]:
    config = getattr(model, "pretrained_cfg", None) or {}
    return tuple(config.get("input_size") or (3, 224, 224))


# ---- checking --------------------------------------------------------------------------------


class Failed(Exception):
    """A check that did not hold."""


def check(model: nn.Module, x: Tensor, rounding: bool = False) -> dict[str, Any]:
    """Filter ``model`` with ``targets="auto"`` and hold the result against the oracle.

    Facts for the row. Raises ``ValueError`` where ``apply_weight_filtering`` refuses, and
    ``Failed`` when: ``wf(x)`` is not the base model's output bit for bit; a mixed batch of labels
    or of sets, or its alpha gradients, differ from the oracle's; a baked model differs from the
    filtered one; the base model was changed. With ``rounding``, differences may be twice as large
    as the base model's own between a batch and one sample at a time.
    """
    state, buffers = _state(model), [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        plain = model(x)
    wf = wfilter.apply_weight_filtering(model, example_input=x)
    try:
        facts = _facts(wf, x, plain, rounding)
    finally:
        wfilter.remove_weight_filtering(wf)
    if state != _state(model) or not all(map(torch.equal, buffers, model.buffers())):
        raise Failed("the base model's parameters or buffers were changed")
    return facts


def _facts(wf: wfilter.FilteredModel, x: Tensor, plain: Tensor, rounding: bool) -> dict[str, Any]:
    with torch.no_grad():
        wf.alphas.add_(torch.randn(wf.alphas.shape, generator=torch.Generator().manual_seed(2)))
        if not torch.equal(wf(x), plain):
            raise Failed("wf(x) is not the base model's output bit for bit")
    scale = float(plain.abs().max())
    differences = compare(wf, x, scale, rounding)
    return {
        "targets": len(wf.targets),
        "paths": dict(Counter(row.path for row in wf.plan)),
        "exact": dict(Counter(row.why for row in wf.plan if row.path != "fused")),
        "share": _share(wf),
        "unused": len(select_targets(wf.base)) - len(wf.targets),
        **{name: float(f"{value:.3g}") for name, value in differences.items()},
        "silent": _silent_targets(wf, x, scale),
        "ratio": round(_time_ratio(wf, x), 3),
    }


def check_thoroughly(built: Built) -> dict[str, Any]:
    """``check``, in float64 where float32 was too coarse, and twice where a target did nothing."""
    model, x = built.model, built.x
    try:
        facts = check(model, x)
    except Failed:
        if x.dtype == torch.float64:
            raise
        if _runs(model.double(), x.double()):
            facts = check(model, x := x.double())
        else:
            facts = check(model.float(), x, rounding=True)
    facts["dtype"] = str(x.dtype).removeprefix("torch.")
    return _without_dead_units(model, x, facts)


def _runs(model: nn.Module, x: Tensor) -> bool:
    try:
        model(x)
    except RuntimeError:
        return False
    return True


def _without_dead_units(model: nn.Module, x: Tensor, facts: dict[str, Any]) -> dict[str, Any]:
    """Draw new weights where a target did nothing: its few units may just have been dead."""
    for seed in (1, 2, 3):
        if not {UNEXPLAINED, NO_EFFECT} & {*facts["silent"].values()}:
            return facts
        randomise(model, seed)
        with torch.no_grad(), calibrated(model):
            model(x)
        again = check(model, x)["silent"]
        facts["silent"] = {n: w for n, w in facts["silent"].items() if n in again}
    for name, why in facts["silent"].items():
        if why == UNEXPLAINED:
            raise Failed(f"closing all gates of {name} changes nothing, and nothing says why")
    return facts


def _share(wf: wfilter.FilteredModel) -> float:
    """How much of the model's parameters is filtered."""
    filtered = sum(math.prod(target.shape) for target in wf.targets)
    return round(filtered / sum(p.numel() for p in wf.base.parameters()), 4)


def _state(model: nn.Module) -> list[tuple[str, int, int]]:
    """Changes when a parameter is replaced or written to."""
    return [(name, p.data_ptr(), p._version) for name, p in model.named_parameters()]


class RightBatchNorm(TorchDispatchMode):
    """Gradients of BatchNorm as they should be.

    On the CPU, torch 2.15 gives wrong ones, without a word, for a batch of one sample whose
    incoming gradient has its channels last in memory: only the oracle meets such batches.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "native_batch_norm_backward":
            args = (args[0].contiguous(), args[1].contiguous(), *args[2:])
        return func(*args, **(kwargs or {}))


def compare(
    wf: wfilter.FilteredModel, x: Tensor, scale: float, rounding: bool = False
) -> dict[str, float]:
    """Differences from the oracle as shares of ``scale``; leaves the gradient on the alphas."""
    weights = torch.randn(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(4)).to(x)
    right = one_at_a_time(wf, x, SETS)
    with RightBatchNorm():
        (right_gradient,) = torch.autograd.grad((right * weights).sum(), wf.alphas)
    logits = wf(x, forget=SETS)
    (wf.alphas.grad,) = torch.autograd.grad((logits * weights).sum(), wf.alphas)
    if not wf.alphas.grad.isfinite().all():
        raise Failed("alpha gradients are not finite")
    with torch.no_grad():
        last = one_at_a_time(wf, x[2:], LABELS[2:])
        found = {
            "sets": (logits - right) / scale,
            "labels": (wf(x, forget=LABELS) - torch.cat([right[:2], last])) / scale,
            "baked": (wf.bake(3).eval()(x) - wf(x, forget=3)) / scale,
        }
        differences = {name: float(value.abs().max()) for name, value in found.items()}
    differences["gradients"] = _gradients_apart(wf, right_gradient)
    tolerance = TOLERANCE[x.dtype]
    if rounding:
        tolerance = max(tolerance, 2 * _rounding(wf, x) / scale)
    for name, value in differences.items():
        if not value <= tolerance * (GRADIENTS_LOOSER if name == "gradients" else 1):
            raise Failed(f"{name}: differs from the oracle by {value:.1e}")
    return differences


@torch.no_grad()
def _rounding(wf: wfilter.FilteredModel, x: Tensor) -> float:
    """How far the base model itself is apart between a batch and one sample at a time."""
    alone = torch.cat([wf.base(sample) for sample in x.split(1)])
    return float((wf.base(x) - alone).abs().max())


def _gradients_apart(wf: wfilter.FilteredModel, right: Tensor) -> float:
    """Largest difference of any target's gradient, as a share of the target's largest."""
    assert wf.alphas.grad is not None
    sizes, apart = _by_target(wf, right), _by_target(wf, wf.alphas.grad - right)
    floor = 1e-5 * median(sizes.values())
    return max(apart[name] / max(sizes[name], floor, 1e-300) for name in apart)


def _by_target(wf: wfilter.FilteredModel, values: Tensor) -> dict[str, float]:
    """Each target's largest magnitude."""
    sizes = [target.units for target in wf.targets]
    parts = values.abs().amax(0).split(sizes)
    return {t.name: float(part.max()) for t, part in zip(wf.targets, parts)}


@torch.no_grad()
def _silent_targets(wf: wfilter.FilteredModel, x: Tensor, scale: float) -> dict[str, str]:
    """Targets whose gates do nothing on these samples, with the reason."""
    assert wf.alphas.grad is not None
    sizes = _by_target(wf, wf.alphas.grad)
    wf.alphas.grad = None
    floor = FAINT[x.dtype] * median(sizes.values())
    reasons = {}
    for name in (name for name, size in sizes.items() if size <= floor):
        least = TOLERANCE[x.dtype] * scale
        if _moves(wf, x, name) > least:
            continue
        if _moves_by_hand(wf, x, name) > least:
            reasons[name] = UNEXPLAINED
        else:
            reasons[name] = KEY_BIAS_REASON if KEY_BIAS.fullmatch(name) else NO_EFFECT
    return reasons


def _moves_by_hand(wf: wfilter.FilteredModel, x: Tensor, name: str) -> float:
    """How far a baked model's logits move when the parameter is set to 0."""
    plain = wf.bake(0).eval()
    before = plain(x)
    plain.get_parameter(name).zero_()
    return float((plain(x) - before).abs().max())


def _moves(wf: wfilter.FilteredModel, x: Tensor, name: str) -> float:
    """How far the logits move when all gates of one target close."""
    before, kept = wf(x, forget=0), wf.alpha[name].clone()
    wf.alpha[name].fill_(-1000.0)
    after = wf(x, forget=0)
    wf.alpha[name].copy_(kept)
    return float((after - before).abs().max())


@torch.no_grad()
def _time_ratio(wf: wfilter.FilteredModel, x: Tensor) -> float:
    """Time of a mixed batch as a multiple of the base model's: best of two, a tiny batch."""

    def best(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(2):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    return best(lambda: wf(x, forget=LABELS)) / best(lambda: wf.base(x))


# ---- one row ---------------------------------------------------------------------------------


def examine(architecture: Architecture, full_depth: bool = False) -> dict[str, Any]:
    """Build and check one architecture; whatever happens is a row."""
    start = time.process_time()
    row: dict[str, Any] = {"key": architecture.key, "family": architecture.family}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = build(architecture, full_depth)
            row |= {
                "edge": built.edge,
                "left_out": built.left_out,
                "parameters": built.parameters,
            }
            row |= {"status": "pass", **_facts_of(architecture.key, built)}
    except Unsuitable as error:
        row |= {"status": "refused", "why": str(error)}
    except Exception as error:
        row |= {"status": _status(error), "why": f"{type(error).__name__}: {error}"[:600]}
        if row["status"] == "fail":
            row["where"] = _where(error)
    return {**row, "seconds": round(time.process_time() - start, 2)}


# Fingerprint -> the architecture that was checked, and what was found.
_checked: dict[str, tuple[str, dict[str, Any]]] = {}


def _facts_of(key: str, built: Built) -> dict[str, Any]:
    """The checks, or those of an architecture that is the same network at this size.

    Many differ only in pretrained weights or default image size. The same layers, shapes and
    logits, from the same random weights, are taken for the same network.
    """
    if built.fingerprint in _checked:
        twin, facts = _checked[built.fingerprint]
        return {**facts, "same_as": twin}
    facts = check_thoroughly(built)
    _checked[built.fingerprint] = key, facts
    return facts


def _status(error: Exception) -> str:
    """Refused is what ``apply_weight_filtering`` itself says no to; all else is a failure."""
    trace, names = error.__traceback__, []
    while trace:
        code = trace.tb_frame.f_code
        names.append((Path(code.co_filename).parent.name, code.co_name))
        trace = trace.tb_next
    ours = names[-1][0] == "wfilter" and any(n[1] == "apply_weight_filtering" for n in names)
    return "refused" if isinstance(error, ValueError) and ours else "fail"


def _where(error: Exception) -> str:
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""


# ---- the sweep -------------------------------------------------------------------------------


def serve(pipe: Any) -> None:
    """A worker process: examine what comes through the pipe until None does."""
    torch.set_num_threads(1)
    while (architecture := pipe.recv()) is not None:
        pipe.send(examine(architecture, architecture.key in REPRESENTATIVES))
        gc.collect()


class Worker:
    """A process that examines one architecture at a time, replaced when it dies or hangs."""

    def __init__(self, seconds: float, gigabytes: float):
        self.seconds, self.gigabytes = seconds, gigabytes
        self.process: Any = None
        self.pipe: Any = None

    def examine(self, architecture: Architecture) -> dict[str, Any]:
        if self.process is None:
            self._start()
        self.pipe.send(architecture)
        deadline = time.monotonic() + self.seconds
        why = f"took more than {self.seconds:.0f} seconds"
        while time.monotonic() < deadline:
            try:
                if self.pipe.poll(0.2):
                    return self.pipe.recv()
            except EOFError:
                why = f"the process ended with code {self.process.exitcode}"
                break
            if self._resident() > self.gigabytes:
                why = f"took more than {self.gigabytes:.0f} GB of memory"
                break
        self.stop()
        status = "large" if "memory" in why else "fail"
        return {
            "key": architecture.key,
            "family": architecture.family,
            "status": status,
            "why": why,
            "seconds": self.seconds,
        }

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def _resident(self) -> float:
        """Gigabytes in use; 0 where the system does not tell."""
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0.0
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e9

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = self.pipe = None


def sweep(todo: list[Architecture], args: argparse.Namespace) -> None:
    """Examine all of ``todo``, appending a row for each as it is done."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    waiting: queue.SimpleQueue[Architecture | None] = queue.SimpleQueue()
    for item in [*todo, *[None] * args.jobs]:
        waiting.put(item)
    lock, facts = threading.Lock(), environment()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("architectures", total=len(todo))

        def work() -> None:
            worker, done = Worker(args.timeout, args.memory), 0
            while (architecture := waiting.get()) is not None:
                row = {**worker.examine(architecture), **facts}
                with lock, args.out.open("a") as log:
                    log.write(json.dumps(row) + "\n")
                progress.advance(task)
                if row["status"] != "pass":
                    progress.console.print(f"{row['key']}: {row['status']}, {row.get('why', '')}")
                done += 1
                if done % 100 == 0:  # a fresh process: fragmented memory goes back
                    worker.stop()
            worker.stop()

        threads = [threading.Thread(target=work) for _ in range(args.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def environment() -> dict[str, str]:
    """Versions, for every row."""
    import timm
    import torchvision

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS
    ).stdout.strip()
    return {
        "torch": torch.__version__,
        "timm": timm.__version__,
        "torchvision": torchvision.__version__,
        "commit": commit,
        "date": date.today().isoformat(),
    }


def load_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The latest row of each architecture."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {row["key"]: row for row in rows}


# ---- the summary -----------------------------------------------------------------------------

HEADER = """# Every classifier of timm and torchvision

`python benchmarks/registry.py`, {date}, torch {torch}, timm {timm}, torchvision {torchvision},
{cpu}. One row per architecture in `registry.jsonl`, with the commit it was checked at.

Each architecture is built without pretrained weights (all parameters random), with {classes}
classes, at the smallest input it takes, wrapped with `targets="auto"` and checked in eval mode on
{samples} samples: `wf(x)` is the base model's output bit for bit; a mixed batch of labels (one of
them -1) and one of random sets equal the one-sample-at-a-time oracle; so do the gradients of the
alphas, which are finite; every target has an effect, or a reason why it cannot; `bake` equals the
filtered model; no parameter or buffer of the base model was touched. Tolerance: {tight:.0e} of the
largest logit in float64, {loose:.0e} in float32 (models that compute in float32 by themselves or
have more than {limit:.0f} million parameters; again in float64 where that fails), or, where only
float32 runs, twice what the base model itself differs between a batch and one sample at a time.
Blocks that only repeat their neighbours are left out, except in one architecture per family, which
has its full depth. {same} architectures turned out to be the same network as another one at that
size (same layers, shapes and logits: they differ in pretrained weights or default image size) and
carry its findings.
"""


def summarise(rows: list[dict[str, Any]]) -> str:
    """The Markdown page: totals, families, then all that did not simply pass."""
    newest = max(rows, key=lambda row: row["date"])
    parts = [
        HEADER.format(
            **{k: newest[k] for k in ("date", "torch", "timm", "torchvision")},
            cpu=f"{platform.system()} {platform.machine()}, one core",
            same=sum("same_as" in row for row in rows),
            classes=CLASSES,
            samples=SAMPLES,
            tight=TOLERANCE[torch.float64],
            loose=TOLERANCE[torch.float32],
            limit=FLOAT64_PARAMETERS["short"] / 1e6,
        ),
        _coverage(rows),
        _table("library", _group(rows, lambda row: row["key"].split("/")[0])),
        _measures(rows),
        "## Families\n",
        _table("family", _group(rows, _family)),
        _not_passed(rows),
        _reasons("## Targets on the exact path", rows, "exact"),
        _silent(rows),
    ]
    return "\n".join(parts)


def _coverage(rows: list[dict[str, Any]]) -> str:
    """How much of the registries the rows cover, and which code checked them."""
    total = len(architectures())
    counts = Counter(row.get("commit") or "unknown" for row in rows)
    commits = ", ".join(f"{commit} ({count})" for commit, count in counts.most_common())
    head = f"{len(rows)} of {total} architectures examined"
    if len(rows) < total:
        head = f"**Partial: {head}.** Shares below are of these, not of the registries"
    return f"{head}. Rows by commit: {commits}.\n"


def _family(row: dict[str, Any]) -> str:
    library = row["key"].split("/")[0]
    return row["family"] if library == "timm" else f"{library}: {row['family']}"


def _group(
    rows: list[dict[str, Any]], key: Callable[[dict[str, Any]], str]
) -> dict[str, list[dict[str, Any]]]:
    groups = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _table(title: str, groups: dict[str, list[dict[str, Any]]]) -> str:
    names = (title, "architectures", "pass", "refused", "fail", "too large", "targets", "fused")
    lines = ["| " + " | ".join((*names, "x base")) + " |", "|---" + "|--:" * len(names) + "|"]
    for name, rows in groups.items():
        counts = Counter(row["status"] for row in rows)
        passed = [row for row in rows if row["status"] == "pass"]
        targets = sum(row["targets"] for row in passed)
        fused = sum(row["paths"].get("fused", 0) for row in passed)
        ratio = f"{median(row['ratio'] for row in passed):.2f}" if passed else "-"
        cells = [name, len(rows), *(counts[s] for s in ("pass", "refused", "fail", "large"))]
        share = f"{100 * fused / targets:.1f} %" if targets else "-"
        lines.append("| " + " | ".join(map(str, [*cells, targets, share, ratio])) + " |")
    return "\n".join(lines) + "\n"


def _measures(rows: list[dict[str, Any]]) -> str:
    """Largest differences by dtype, and what the columns mean."""
    lines = [
        "Targets and their fused share count architectures that pass; x base is the median time of",
        "a mixed batch over the base model's, on these tiny inputs an upper bound.\n",
        "| dtype | architectures | labels | sets | baked | gradients |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    passed = [row for row in rows if row["status"] == "pass"]
    for dtype, group in sorted(_group(passed, lambda row: row["dtype"]).items(), reverse=True):
        kinds = ("labels", "sets", "baked", "gradients")
        worst = (f"{max(row[kind] for row in group):.1e}" for kind in kinds)
        lines.append(f"| {dtype} | {len(group)} | " + " | ".join(worst) + " |")
    note = "Largest differences from the oracle: logits as a share of the largest logit, gradients"
    return "\n".join([*lines, "", f"{note} of each\ntarget as a share of its largest.\n"])


def _not_passed(rows: list[dict[str, Any]]) -> str:
    lines = ["## Not passed\n"]
    others = [row for row in rows if row["status"] != "pass"]
    reasons = _group(others, lambda row: f"{row['status']}: {_one_line(row['why'])}")
    for why, group in sorted(reasons.items()):
        lines.append(
            f"- {why}\n  " + ", ".join(f"`{row['key']}`" + _stands_for(row, rows) for row in group)
        )
    return "\n".join(lines if others else [*lines, "None."]) + "\n"


def _stands_for(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The smallest sibling of an architecture that is too large to be examined."""
    if row["status"] != "large":
        return ""
    series = re.match(r"[^_0-9]+", row["key"].split("/")[1])
    passed = [
        other
        for other in rows
        if (other["family"], other["status"]) == (row["family"], "pass")
        and re.match(r"[^_0-9]+", other["key"].split("/")[1])[0] == series[0]
    ]
    smallest = min(passed, key=lambda other: other["parameters"])
    return f" (represented by `{smallest['key']}`)"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _reasons(title: str, rows: list[dict[str, Any]], field: str) -> str:
    """How often each reason for the exact path was given, and by which families."""
    counts: Counter[str] = Counter()
    families = defaultdict(set)
    for row in rows:
        for why, count in row.get(field, {}).items():
            counts[why] += count
            families[why].add(_family(row))
    lines = [
        f"- {count} targets, {why}: {', '.join(sorted(families[why]))}"
        for why, count in counts.most_common()
    ]
    return "\n".join([title + "\n", *(lines or ["None."])]) + "\n"


def _silent(rows: list[dict[str, Any]]) -> str:
    counts: Counter[str] = Counter()
    families = defaultdict(set)
    for row in rows:
        for why in row.get("silent", {}).values():
            counts[why] += 1
            families[why].add(_family(row))
    lines = [
        f"- {count} targets, {why}: {', '.join(sorted(families[why]))}"
        for why, count in counts.most_common()
    ]
    unused = [row for row in rows if row.get("unused")]
    if unused:
        names = ", ".join(sorted({_family(row) for row in unused}))
        total = sum(row["unused"] for row in unused)
        lines.append(f"- {total} parameters left out, no forward uses them in eval mode: {names}")
    return "\n".join(["## Targets without effect\n", *(lines or ["None."])]) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="*", help="glob over library/name, such as 'timm/vit_*'")
    parser.add_argument("--representatives", action="store_true", help="one per family only")
    parser.add_argument("--redo", default="", help="do rows of this status again")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=900, help="seconds per architecture")
    parser.add_argument("--memory", type=float, default=10, help="gigabytes per worker")
    parser.add_argument("--out", type=Path, default=RESULTS / "registry.jsonl")
    parser.add_argument("--summary", action="store_true", help="only rebuild the Markdown page")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = load_rows(args.out)
    if not args.summary:
        todo = [a for a in architectures() if fnmatch.fnmatchcase(a.key, args.match)]
        if args.representatives:
            todo = [a for a in todo if a.key in REPRESENTATIVES]
        done = {key for key, row in rows.items() if row["status"] != args.redo}
        sweep([a for a in todo if a.key not in done], args)
        rows = load_rows(args.out)
    if not rows:
        raise SystemExit(f"no rows in {args.out}: --match {args.match} found no architecture.")
    order = {a.key: index for index, a in enumerate(architectures())}
    kept = sorted(rows.values(), key=lambda row: order.get(row["key"], len(order)))
    args.out.write_text("".join(json.dumps(row) + "\n" for row in kept))
    args.out.with_suffix(".md").write_text(summarise(kept))
    print(_table("library", _group(kept, lambda row: row["key"].split("/")[0])))


if __name__ == "__main__":
    main()
