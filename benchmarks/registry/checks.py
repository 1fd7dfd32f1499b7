"""What is checked of one filtered model, and the row that comes of it."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import wfilter
from registry.models import (
    CLASSES,
    SAMPLES,
    Architecture,
    Built,
    Unsuitable,
    build,
    calibrated,
    randomise,
)
from wfilter.core.oracle import one_at_a_time
from wfilter.core.targets import select_targets

# What the samples forget: as sets and as labels; both begin with "class 3" and "nothing".
SETS = torch.zeros(SAMPLES, CLASSES, dtype=torch.bool)
SETS[0, 3] = SETS[2, 0] = SETS[2, 5] = SETS[2, 7] = True
LABELS = torch.tensor([3, -1, 9])
# Largest difference from the oracle, as a share of the largest logit.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
# A gradient below this share of the median target's is looked at: does the target do anything?
FAINT = {torch.float64: 1e-9, torch.float32: 1e-5}
GRADIENTS_LOOSER = 100
KEY_BIAS = re.compile(
    r".*(^|[._])(k|key|to_k|wk)(_proj|_project|_conv)?(\..*)?\.?bias|.*conv_attn\.bias"
)
KEY_BIAS_REASON = "a bias on keys or scores adds the same to all of them; softmax cancels it"
NO_EFFECT = "setting it to 0 by hand in a baked model changes nothing either"
UNEXPLAINED = "unexplained"


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
        names.append((Path(code.co_filename).parts, code.co_name))
        trace = trace.tb_next
    ours = "wfilter" in names[-1][0][-3:] and any(n[1] == "apply_weight_filtering" for n in names)
    return "refused" if isinstance(error, ValueError) and ours else "fail"


def _where(error: Exception) -> str:
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
