"""``FilteredModel``: the base model and its filters as one module."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from wfilter.core import gates as _gates
from wfilter.core.bake import bake
from wfilter.core.filters import WeightFilter, is_marked, parametrized
from wfilter.core.forgetting import Blocks, Scope, refuse_mixed_threads
from wfilter.core.gates import ByTarget
from wfilter.core.inspection import Finding, Plan, make_plan, make_sites, parameter_of, probe
from wfilter.core.modes import GateMode
from wfilter.core.prune import prune as prune_model
from wfilter.core.targets import Target

if TYPE_CHECKING:
    from wfilter.evaluation.report import Report

Forget = Union[None, int, str, "set[int]", "set[str]", "frozenset[int]", "frozenset[str]", Tensor]


@dataclass(frozen=True)
class Compiled:
    """The two forwards through ``torch.compile``: of a mixed batch, and of the base model."""

    gated: Callable[[Tensor, Tensor], Any]
    plain: Callable[[Tensor], Any]


@dataclass(frozen=True)
class SnapEffect:
    """What exact gates would change: counts of units, and the move of the logits."""

    closed: int
    opened: int
    between: int
    largest_move: float
    predictions_changed: float


class FilteredModel(nn.Module):
    """A frozen classifier that can behave as if any class had never been learned.

    Made by ``apply_weight_filtering``. Calls without ``forget`` are the base model, bit for bit.

    Attributes:
        base: The model that was given.
        alphas: All alphas, ``(num_classes, total_units)``, the targets side by side; see ``alpha``.
        num_classes: Number of rows.
        class_names: Names of the rows, or ``None``.
        granularity: ``"out"`` or ``"element"``.
        targets: What is filtered.
        sparse: Whether label gradients touch only the rows of the batch (for many classes).
        hard: Whether gates are rounded to exactly 0 or 1, with straight-through gradients.
    """

    def __init__(
        self,
        base: nn.Module,
        targets: Sequence[Target],
        findings: Sequence[Finding],
        num_classes: int,
        init: float,
        class_names: Sequence[str] | None,
        granularity: str,
    ):
        super().__init__()
        self.base = base
        self.targets = tuple(targets)
        self.num_classes = num_classes
        self.class_names = None if class_names is None else tuple(class_names)
        self.granularity = granularity
        self.sparse = False
        self.hard = False
        first = parameter_of(base, self.targets[0])
        self.alphas = nn.Parameter(
            torch.full(
                (num_classes, sum(t.units for t in self.targets)),
                float(init),
                device=first.device,
                dtype=torch.promote_types(first.dtype, torch.float32),
            )
        )
        self._findings = tuple(findings)
        self._pinned: frozenset[int] = frozenset()
        self._pinned_at: int | None = None  # version of the alphas at which that was looked at
        self._shares: bool | None = None  # not known yet
        self._probed: dict[tuple[int, ...], tuple[Finding, ...]] = {}
        self._blocks = Blocks()
        self._compiled: Compiled | None = None

    # ---- forward ------------------------------------------------------------------------------

    def forward(self, x: Tensor, forget: Forget = None) -> Any:
        """The base model's output, with each sample forgetting what ``forget`` says.

        Args:
            x: A batch of images.
            forget: ``None`` (the base model), one class (index or name) or a Python set of classes
                for the whole batch, int64 labels ``(batch,)`` with -1 for "nothing", or a bool
                matrix ``(batch, num_classes)`` with a set per sample.

        Example:
            >>> import wfilter
            >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
            >>> x = torch.ones(2, 4)
            >>> torch.equal(wf(x), wf.base(x)), wf(x, forget=torch.tensor([2, -1])).shape
            (True, torch.Size([2, 3]))
        """
        if _gates.traced(x):
            return self._forward(x, self._per_sample(x, forget))
        if not is_marked(self.base):
            raise RuntimeError("the filters of this model were removed. Apply them again.")
        if self.base.training:
            raise RuntimeError(
                "the base model was put in training mode, where BatchNorm mixes samples and drifts."
                " Call wf.base.eval(); wf.train() leaves it in eval mode."
            )
        opened = self._blocks.opened
        try:
            return self._checked(x, forget, self._blocks.own())
        finally:  # whatever came of it, the weights were not what they seemed
            if self._blocks.opened != opened:
                refuse_mixed_threads()

    def _checked(self, x: Tensor, forget: Forget, scope: Scope | None) -> Any:
        """The part outside the compiled graph: refusals, blocks and probes, then the forward."""
        compiled = self._compiled
        if forget is None and scope is None:
            return self.base(x) if compiled is None else compiled.plain(x)
        self._refuse_recomputation()
        if forget is None:
            if compiled is None:
                return self.base(x)  # parametrized by the scope
            row = None if scope is None else scope.row
            nothing = torch.zeros(self.num_classes, dtype=torch.bool)
            forget = (nothing if row is None else row).expand(len(x), -1)
        with nullcontext() if scope is None else scope.suspended():
            self._check_values(forget)
            per_sample = self._per_sample(x, forget)
            assert per_sample is not None
            if not len(x):
                return self.base(x)
            if self._needs_probe(x):
                self.probe(x)
            if compiled is not None:
                return compiled.gated(x, self._mixed_gates(per_sample))
            return self._forward(x, self._one_row(forget) or per_sample)

    def _forward(self, x: Tensor, forget: Tensor | _Row | None) -> Any:
        """Gates, then the path that fits."""
        if forget is None:
            return self.base(x)
        if isinstance(forget, _Row):
            return self._run(x, _gates.set_gates(self.alphas, forget.chosen, hard=self.hard))
        return self._gated(x, self._mixed_gates(forget))

    def _gated(self, x: Tensor, gates: Tensor) -> Any:
        """The forward of a mixed batch; ``compile`` compiles this, so labels and sets share it."""
        if all(finding.path == "fused" for finding in self._findings_for(x)):
            return self._run(x, gates)
        return vmap(self._one_sample, randomness="different")(x, gates)

    def _plain(self, x: Tensor) -> Any:
        return self.base(x)

    def _mixed_gates(self, forget: Tensor) -> Tensor:
        if forget.dtype == torch.bool:
            return _gates.set_gates(self.alphas, forget, hard=self.hard)
        return _gates.label_gates(self.alphas, forget, hard=self.hard, sparse=self.sparse)

    def replicated(self, x: Tensor, forget: Tensor) -> Any:
        """Several forgets per sample: ``forget`` has ``replicas * batch`` rows, grouped by sample.

        The replicas of a sample share everything before the first gate that is not pinned open,
        where the model allows it; the result is that of ``wf(x.repeat_interleave(replicas, 0),
        forget)``.
        """
        replicas = len(forget) // len(x)
        _gates.check_per_sample(forget, len(x) * replicas, self.num_classes)
        if self._needs_probe(x):
            self.probe(x)
        fused = all(finding.path == "fused" for finding in self._findings_for(x))
        if self._pinned and replicas > 1 and fused and self._blocks.scope is None:
            self._check_pinned()
            if self._shares is None:
                self._shares = self._can_share(x, replicas)
            if self._shares:
                return self._run(x, self._mixed_gates(forget), replicas)
        return self(x.repeat_interleave(replicas, 0), forget)

    @torch.no_grad()
    def _can_share(self, x: Tensor, replicas: int) -> bool:
        """Whether replicas can be one up to the first gate, tried with gates at random.

        Not so where a shortcut leads around that gate, or the model reads its batch size before it.
        """
        generator = torch.Generator().manual_seed(0)
        shape = (replicas * len(x), self.alphas.shape[1])
        gates = torch.rand(shape, generator=generator).to(self.alphas)
        try:
            shared = self._run(x, gates, replicas)
        except RuntimeError:
            return False
        alone = self._run(x.repeat_interleave(replicas, 0), gates)
        if not isinstance(shared, Tensor) or shared.shape != alone.shape:
            return False
        return torch.allclose(shared, alone, 0.02, 1e-4)

    def pin_open(self, names: Iterable[str]) -> None:
        """In place: fix targets with every gate at exactly 1, so that a forward skips them."""
        chosen = set(names)
        unknown = chosen - {target.name for target in self.targets}
        if unknown:
            raise ValueError(f"{sorted(unknown)[0]} is not a target. See wf.plan.")
        with torch.no_grad():
            for name in chosen:
                self.alpha[name].fill_(_gates.HARD)
        self._shares = None
        self._pinned = frozenset(i for i, t in enumerate(self.targets) if t.name in chosen)
        self._pinned_at = None

    def _one_sample(self, x: Tensor, gates: Tensor) -> Any:
        output = self._run(x.unsqueeze(0), gates)
        return tree_map(lambda t: t.squeeze(0), output)

    def _run(self, x: Tensor, gates: Tensor, replicas: int = 1) -> Any:
        """The base model, gated at outputs where a rule covers the target, at weights elsewhere.

        ``gates`` is ``(total_units,)``, one row for all of ``x``, or ``(batch, total_units)``.
        """
        findings = self._findings_for(x)
        weights = {}
        if any(finding.by == "weight" for finding in findings):
            by_target = ByTarget(self.targets, gates)
            for index, (target, finding) in enumerate(zip(self.targets, findings)):
                if finding.by == "weight" and index not in self._pinned:
                    weight = parameter_of(self.base, target)
                    gate = target.spread(by_target[target.name]).to(weight.dtype)
                    weights[id(weight)] = index, weight * gate
        sites = make_sites(self.base, self.targets, findings, self._pinned)
        mode = GateMode(sites, gates, weights, replicas)
        with _one_graph(), mode:
            output = self.base(x)
        if not torch.compiler.is_dynamo_compiling() and mode.idle():
            raise RuntimeError(
                f"{self.targets[mode.idle()[0]].name} was not gated in this forward, though the "
                "probe saw it used. If a part of the model was compiled or replaced after "
                "apply_weight_filtering, undo that; to compile, call wf.compile()."
            )
        return output

    def _findings_for(self, x: Tensor) -> tuple[Finding, ...]:
        return self._probed.get(tuple(x.shape[1:]), self._findings)

    def _needs_probe(self, x: Tensor) -> bool:
        return tuple(x.shape[1:]) not in self._probed

    def probe(self, x: Tensor) -> Plan:
        """Look again at how the model treats inputs of this shape; done by itself when needed.

        Call it before ``torch.compile(wf)`` meets an image size for the first time.
        """
        findings, _, _ = probe(self.base, self.targets, x)
        for target, finding in zip(self.targets, findings):
            if finding.by == "unused":
                raise RuntimeError(
                    f"{target.name} is filtered but not used for inputs of shape "
                    f"{tuple(x.shape[1:])}: its gates would do nothing. Exclude it."
                )
        self._probed[tuple(x.shape[1:])] = findings
        self._findings = findings
        return self.plan

    # ---- what to forget -----------------------------------------------------------------------

    def _one_row(self, forget: Forget) -> _Row | None:
        chosen = _gates.one_set(forget, self.num_classes, self.class_names, self.alphas.device)
        return None if chosen is None else _Row(chosen)

    def _per_sample(self, x: Tensor, forget: Forget) -> Tensor | None:
        """Labels or sets on the right device; one class or set is repeated for the batch."""
        if forget is None:
            return None
        batch, device = x.shape[0], self.alphas.device
        if isinstance(forget, int) and not isinstance(forget, bool):
            row = _gates.class_index(forget, self.num_classes, self.class_names)
            return torch.full((batch,), row, device=device)
        chosen = _gates.one_set(forget, self.num_classes, self.class_names, device)
        if chosen is not None:
            return chosen.expand(batch, -1)
        assert isinstance(forget, Tensor)
        _gates.check_per_sample(forget, batch, self.num_classes)
        return forget.to(device, non_blocking=True)

    def _check_pinned(self) -> None:
        """Refuse pinned alphas that are no longer open; waits for a device only after a change."""
        version = None if self.alphas.is_inference() else self.alphas._version
        if not self._pinned or (version is not None and version == self._pinned_at):
            return
        names = [self.targets[index].name for index in sorted(self._pinned)]
        is_open = torch.stack([(self.alpha[name] == _gates.HARD).all() for name in names]).tolist()
        if not all(is_open):
            raise RuntimeError(
                f"{names[is_open.index(False)]} is pinned open, but its alphas were changed and "
                "would be ignored. Call wf.pin_open([]) to let all gates act again."
            )
        self._pinned_at = version

    def _check_values(self, forget: Forget) -> None:
        self._check_pinned()
        if not _gates.readable(self.alphas):
            return  # looking at values would wait for the device
        labels = forget if isinstance(forget, Tensor) and forget.dtype == torch.int64 else None
        if labels is not None and labels.numel() and _gates.readable(labels):
            rows = self.alphas[labels.clamp(0, self.num_classes - 1).flatten()]
        else:
            rows = self.alphas
        if not bool(torch.isfinite(rows.detach().sum())):
            self._refuse_bad_alphas()

    def _refuse_bad_alphas(self) -> None:
        bad = [name for name, alpha in self.alpha.items() if not alpha.isfinite().all()]
        if bad:
            raise ValueError(
                f"the alphas of {bad[0]} contain NaN or infinity ({len(bad)} targets). Load the "
                f"last good checkpoint; for a gate at exactly 0 or 1 use -/+{_gates.HARD:.0f}."
            )

    @contextmanager
    def forgetting(self, forget: Forget) -> Iterator[FilteredModel]:
        """Inside, every forward forgets this class or set, also calls of ``wf.base`` itself.

        (After ``wf.compile()`` only calls of ``wf``: there the base model stays as it is.)

        The gated weights are computed once, so a forward costs what the base model costs. Blocks
        nest, the innermost holds; an explicit ``forget=`` argument wins. A block belongs to the
        thread that opened it: other threads must pass ``forget=``, and are refused meanwhile.

        Example:
            >>> import wfilter
            >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
            >>> x = torch.ones(2, 4)
            >>> with wf.forgetting(2):
            ...     inside = wf(x)
            >>> torch.allclose(inside, wf(x, forget=2))
            True
        """
        row = None if forget is None else self._whole_row(forget, "forgetting")
        self._check_values(None)
        with self._blocks.entered(row, self._filtered_base()):
            yield self

    def _filtered_base(self) -> AbstractContextManager[list[WeightFilter]]:
        """Parametrize the base model for a block; a compiled forward passes the row along instead.

        Parametrizing changes the classes of modules, which would compile anew at every block.
        """
        if self._compiled is not None:
            return nullcontext([])
        return parametrized(self.base, self.targets, self.alphas, self._gate_now)

    def _gate_now(self, name: str) -> Tensor:
        """The gates of one target in the innermost block."""
        scope = self._blocks.scope
        row = None if scope is None else scope.row
        if row is None:  # a forward of another thread, while a block opens or closes
            refuse_mixed_threads()
        return _gates.set_gates(self.alpha[name], row, hard=self.hard)

    def _whole_row(self, forget: Forget, where: str) -> Tensor:
        row = _gates.one_set(forget, self.num_classes, self.class_names, self.alphas.device)
        if row is None:
            raise TypeError(
                f"{where} takes one class or one set of classes for all samples. Pass labels per "
                "sample to the call: wf(x, forget=labels)."
            )
        return row

    def refuse_other_classes(self, data: object) -> None:
        """Stop where data names its classes otherwise: a label would reach another class's row.

        Names are looked for in ``data.class_names`` and ``data.dataset.class_names``.
        """
        inner = getattr(data, "dataset", None)
        names = getattr(data, "class_names", None) or getattr(inner, "class_names", None)
        if names is None or self.class_names is None or tuple(names) == self.class_names:
            return
        pairs = zip_longest(self.class_names, names)
        row, (ours, theirs) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
        raise ValueError(
            f"class {row} is {ours!r} for these filters, but {theirs!r} in the data.\n"
            "Give the data the order of wf.class_names."
        )

    def refuse_inside_forgetting(self, what: str) -> None:
        """Stop where the base model must not be parametrized."""
        if self._blocks.scope is not None:
            raise RuntimeError(f"{what} inside a forgetting block. Leave the block first.")

    def _refuse_recomputation(self) -> None:
        """Gradient checkpointing runs layers again in the backward pass, without the gates."""
        if not torch.is_grad_enabled() or not self.alphas.requires_grad:
            return
        for name, module in self.base.named_modules():
            if getattr(module, "grad_checkpointing", False) is True:
                raise RuntimeError(
                    f"gradient checkpointing is on in {name or type(module).__name__}: its "
                    "recomputation would run without gates, and alphas would get wrong gradients. "
                    "Call model.set_grad_checkpointing(False), or use torch.no_grad()."
                )

    # ---- reading ------------------------------------------------------------------------------

    @property
    def alpha(self) -> Mapping[str, Tensor]:
        """Parameter name -> alphas ``(num_classes, units)``; views, so writing to one sets it."""
        return ByTarget(self.targets, self.alphas)

    def gates(self, forget: Forget) -> Mapping[str, Tensor]:
        """Parameter name -> gates: ``(units,)`` for one class or set, ``(batch, units)`` else."""
        chosen = None
        if forget is not None:
            chosen = _gates.one_set(forget, self.num_classes, self.class_names, self.alphas.device)
        if chosen is not None:
            return ByTarget(self.targets, _gates.set_gates(self.alphas, chosen, hard=self.hard))
        if not isinstance(forget, Tensor):
            return ByTarget(self.targets, torch.ones_like(self.alphas[0]))
        _gates.check_per_sample(forget, len(forget), self.num_classes)
        return ByTarget(self.targets, self._mixed_gates(forget.to(self.alphas.device)))

    @property
    def plan(self) -> Plan:
        """One row per target: name, shape, units, path (fused or exact) and why."""
        return make_plan(self.targets, self._findings)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The alphas, for your own optimiser and loop."""
        return [self.alphas]

    def verify(self, x: Tensor, forget: Forget) -> dict[str, float]:
        """Largest difference between the fast path and the one-sample-at-a-time oracle, per path.

        ``"fused"`` or ``"exact"``, whichever these filters take for a mixed batch.
        """
        from wfilter.core.oracle import one_at_a_time

        self.refuse_inside_forgetting("verify")
        with torch.no_grad():
            labels = self._per_sample(x, forget)
            if labels is None:
                raise TypeError("verify compares filtered forwards. Pass what to forget.")
            fast = self(x, forget=labels)
            slow = one_at_a_time(self, x, labels)
        fused = all(finding.path == "fused" for finding in self._findings_for(x))
        pairs = zip(tree_leaves(fast), tree_leaves(slow))
        return {"fused" if fused else "exact": max(float((a - b).abs().max()) for a, b in pairs)}

    # ---- results ------------------------------------------------------------------------------

    def bake(
        self,
        forget: Forget,
        *,
        snap: float = 0.0,
        prune: bool = False,
        example_input: Tensor | None = None,
    ) -> nn.Module:
        """A plain copy of the base model with the gates of one class or set folded in.

        Same class and ``state_dict`` keys as the base model, independent of it, no wfilter needed.

        Args:
            forget: One class or set.
            snap: Gates below ``snap`` become exactly 0, those above ``1 - snap`` exactly 1; see
                ``snap_effect`` for what that changes.
            prune: Also take out what closed gates silenced; ``wfilter.prune`` tells what that was.
            example_input: Images the model takes, for pruning, where their size is not guessed.

        Example:
            >>> import wfilter
            >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
            >>> type(wf.bake(forget=2)).__name__
            'Linear'
        """
        self.refuse_inside_forgetting("bake")
        self._refuse_bad_alphas()
        row = self._whole_row(forget, "bake")
        with torch.no_grad():
            gates = _snapped(_gates.set_gates(self.alphas, row, hard=self.hard), snap)
        baked = bake(self.base, self.targets, ByTarget(self.targets, gates))
        return prune_model(baked, example_input).model if prune else baked

    @torch.no_grad()
    def snap_effect(self, x: Tensor, forget: Forget, snap: float) -> SnapEffect:
        """What ``bake(forget, snap=snap)`` would change, measured on ``x``."""
        before, after = self.bake(forget).eval()(x), self.bake(forget, snap=snap).eval()(x)
        row = self._whole_row(forget, "snap_effect")
        gates = _gates.set_gates(self.alphas, row, hard=self.hard)
        closed, opened = int((gates < snap).sum()), int((gates > 1 - snap).sum())
        return SnapEffect(
            closed,
            opened,
            gates.numel() - closed - opened,
            float((before - after).abs().max()),
            float((before.argmax(-1) != after.argmax(-1)).float().mean()),
        )

    def save(self, path: str | Path, *, report: Report | None = None) -> Path:
        """Write the alphas (not the base model) to a safetensors file; see ``wfilter.load``.

        A path without suffix becomes a folder with a model card, which shows the ``report``.
        """
        from wfilter.files.checkpoint import save

        return save(self, path, report)

    def compile(self, *args: Any, **kwargs: Any) -> FilteredModel:  # type: ignore[override]
        """In place: run forwards through ``torch.compile``; arguments are passed on to it.

        One graph serves all labels and sets, another calls that forget nothing. torch makes a
        graph for the first batch size, one for all others and one for single images; with
        ``dynamic=True`` the first two are one. Checks of the labels stay outside the graph, and so
        does ``forgetting``, which then costs a mixed batch. Without a C++ compiler, which torch
        needs on a CPU, it warns and stays eager.
        """
        self.refuse_inside_forgetting("compile")
        inductor = kwargs.get("backend", "inductor") == "inductor"
        if inductor and self.alphas.device.type == "cpu" and not has_compiler():
            warnings.warn(
                "torch.compile needs a C++ compiler on a CPU and finds none: forwards stay eager. "
                "Install g++ or clang++, or set CXX.",
                stacklevel=2,
            )
            return self
        gated = torch.compile(self._gated, *args, **kwargs)
        self._compiled = Compiled(gated, torch.compile(self._plain, *args, **kwargs))
        return self

    # ---- state --------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> FilteredModel:
        """The base model stays in eval mode: its BatchNorm statistics must not drift."""
        super().train(mode)
        if is_marked(self.base):
            self.base.eval()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> FilteredModel:
        """In place: of the alphas alone; the base model stays frozen."""
        self.alphas.requires_grad_(requires_grad)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Base model and alphas; for the alphas alone see ``save``."""
        self.refuse_inside_forgetting("state_dict")
        return super().state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        self.refuse_inside_forgetting("copying or pickling")
        state: dict[str, Any] = {**self.__dict__, "_compiled": None}
        return state

    def extra_repr(self) -> str:
        """Shown above the base model when printed."""
        fused = sum(f.path == "fused" for f in self._findings)
        return (
            f"num_classes={self.num_classes}, granularity={self.granularity!r}, "
            f"{len(self.targets)} targets ({fused} fused), {self.alphas.shape[1]} units"
        )


@dataclass(frozen=True)
class _Row:
    """One set of classes for the whole batch: bool ``(num_classes,)``."""

    chosen: Tensor


def has_compiler() -> bool:
    """Whether ``torch.compile`` can build CPU code: inductor needs a C++ compiler there."""
    return any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))


def _one_graph() -> AbstractContextManager[None]:
    """Inside, a graph break of a compiled forward is an error: gates do not survive it."""
    if torch.compiler.is_dynamo_compiling():
        return torch._dynamo.error_on_graph_break(True)
    return nullcontext()


def _snapped(gates: Tensor, snap: float) -> Tensor:
    if not 0 <= snap <= 0.5:
        raise ValueError(f"snap={snap} is outside 0..0.5.")
    gates = torch.where(gates < snap, 0.0, gates)
    return torch.where(gates > 1 - snap, 1.0, gates) if snap else gates
