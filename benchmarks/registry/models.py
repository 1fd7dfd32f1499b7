"""Every architecture of timm, torchvision and transformers, built as small as it runs."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from registry import huggingface
from wfilter.core.outputs import Logits

CLASSES = 10
SAMPLES = 3
# Above this many parameters float32 is used: float64 convolutions are several times slower.
FLOAT64_PARAMETERS = {"short": 3e6, "full": 30e6}
# Edges to try, smallest first; the model's own size comes last.
EDGES = (64, 56, 96, 112, 120, 128, 160, 192)
VIDEO_SHAPES = ((8, 32, 32), (8, 64, 64), (16, 64, 64), (16, 224, 224))
# The smallest architecture of each timm family known so far: examined at full depth in the sweep,
# and short in the tests. A family that a newer timm adds is represented without being listed.
SMALLEST = """
    beit_base_patch16_224 botnet26t_256 test_byobnet cait_xxs24_224 coat_tiny convit_tiny
    convmixer_768_32 convnext_atto cpubone_nano crossvit_9_240 csatv2 cs3darknet_focus_s
    cspnext_tiny davit_tiny deepseek_vit_412m deit_tiny_distilled_patch16_224 densenet121 dla46_c
    dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientnet_b0
    efficientvim_m1 efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224 fasternet_t0 fastvit_t8
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
    """Every entry of the registries, one family after the other."""
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
    found += [Architecture(f"transformers/{name}", name) for name in huggingface.families()]
    return sorted(found, key=lambda a: (a.library != "timm", a.library, a.family, a.key))


def representatives(found: Iterable[Architecture]) -> list[Architecture]:
    """One architecture of each timm family: the one in ``REPRESENTATIVES``, else the smallest."""
    families: dict[str, list[Architecture]] = defaultdict(list)
    for architecture in found:
        if architecture.library == "timm":
            families[architecture.family].append(architecture)
    chosen = []
    for family in families.values():
        listed = [a for a in family if a.key in REPRESENTATIVES]
        chosen += listed or [min(family, key=_size)]
    return chosen


def _size(architecture: Architecture) -> float:
    """How many parameters it has; infinitely many if it cannot be built."""
    try:
        return sum(p.numel() for p in create(architecture, None).parameters())
    except Exception:
        return math.inf


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
    if architecture.library == "transformers":
        return _create_transformers(architecture.name)
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


def _create_transformers(name: str) -> nn.Module:
    """The small network of a family; the checks want its logits alone."""
    if name in huggingface.UNSUITABLE:
        raise Unsuitable(huggingface.UNSUITABLE[name])
    return Logits(huggingface.make(name, CLASSES))


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
    if architecture.library == "transformers":
        edge = huggingface.FAMILIES.get(architecture.name, ({}, 0))[1]
        return [(False, (3, edge, edge), torch.float64)]
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
