"""``FilteredModel``: the base model and its filters as one module.

The way of ``wf(x, forget=...)``: ``forward`` reads what is to be forgotten, ``_forget`` turns it
into gates, and ``paths.run_path`` runs the base model under these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wfilter.core import gates as _gates
from wfilter.core.bake import SnapEffect, bake, measure_snap, snapped
from wfilter.core.compiling import Compiled, compile_forwards
from wfilter.core.feature_rows import FeatureRows, fold_head
from wfilter.core.filters import is_marked
from wfilter.core.forget import (
    Forget,
    Rows,
    as_sets,
    one_for_all,
    per_sample,
    read_forget,
    refuse_other_classes,
)
from wfilter.core.forgetting import (
    Forgetting,
    innermost,
    is_any_open,
    refuse_inside,
    running,
    strip_methods,
)
from wfilter.core.gates import ByTarget
from wfilter.core.head import Head, find_head
from wfilter.core.inspection import Inspection, Plan, make_plan, parameter_of
from wfilter.core.oracle import compare
from wfilter.core.outputs import Inputs, read_inputs
from wfilter.core.paths import KeptSites, gate_mode, head_mode, plain_features, run_path
from wfilter.core.proof import inspect_again
from wfilter.core.prune import prune as prune_model
from wfilter.core.refusals import (
    check_base,
    check_values,
    refuse_bad_alphas,
    refuse_recomputation,
    refuse_training,
)
from wfilter.core.sharing import Pins, run_replicated
from wfilter.core.targets import Target


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
        left_out: What "auto" would have filtered, had a forward of the inspection used it.
        sparse: Whether label gradients touch only the rows of the batch (for many classes).
        hard: Whether gates are rounded to exactly 0 or 1, with straight-through gradients.
        feature_rows: ``None``, or rows that move features of forgotten classes onto others, see
            ``FeatureRows``; assign ``None`` to take them off.
    """

    def __init__(
        self,
        base: nn.Module,
        targets: Sequence[Target],
        inspection: Inspection,
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
        self.feature_rows: FeatureRows | None = None
        first = parameter_of(base, self.targets[0])
        self.alphas = nn.Parameter(
            torch.full(
                (num_classes, sum(t.units for t in self.targets)),
                float(init),
                device=first.device,
                dtype=torch.promote_types(first.dtype, torch.float32),
            )
        )
        self.left_out: tuple[str, ...] = ()
        self.pins = Pins()
        self.open_blocks = 0  # in all contexts; see forgetting.py
        self._inspected: dict[object, Inspection] = {}
        self.remember(inspection)
        self._heads: dict[object, Head] = {}
        self._parts = tuple(base.modules())
        self._compiled: Compiled | None = None
        self.kept_sites: KeptSites | None = None

    # ---- forward ------------------------------------------------------------------------------

    def forward(self, x: Tensor | None = None, forget: Forget = None, **others: Any) -> Any:
        """The base model's output, with each sample forgetting what ``forget`` says.

        Args:
            x: A batch of images; may also be given under the base model's own keyword.
            forget: ``None`` (the base model), one class (index or name) or a Python set of classes
                for the whole batch, int64 labels ``(batch,)`` with -1 for "nothing", or a bool
                matrix ``(batch, num_classes)`` with a set per sample.
            others: Further inputs of the base model. A tensor as long as the batch belongs to its
                images, entry by entry; anything else to all of them.

        Example:
            >>> import wfilter
            >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
            >>> x = torch.ones(2, 4)
            >>> torch.equal(wf(x), wf.base(x)), wf(x, forget=torch.tensor([2, -1])).shape
            (True, torch.Size([2, 3]))
        """
        inputs = read_inputs(x, others)
        if _gates.traced(inputs.images):
            return self._traced(inputs, forget)
        wanted = self._wanted(inputs, forget)
        if wanted is None or not len(inputs.images):
            return self._plain(inputs)
        check_values(self, wanted)
        return self._forget(inputs, wanted)

    def features(self, x: Tensor | None = None, forget: Forget = None, **others: Any) -> Tensor:
        """What the head sees, ``(batch, width)``, with the same meaning of ``forget``.

        The head is the linear map that makes the logits; positions are averaged where it runs on
        several, and the inputs of several heads (distilled DeiT) lie side by side.

        Example:
            >>> import wfilter
            >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> wf = wfilter.apply_weight_filtering(net, targets="0.*")
            >>> wf.features(torch.ones(2, 4), forget=torch.tensor([2, -1])).shape
            torch.Size([2, 8])
        """
        inputs = read_inputs(x, others)
        wanted = self._wanted(inputs, forget)
        if wanted is None:
            return plain_features(self, inputs)
        check_values(self, wanted)
        features: Tensor = self._forget(inputs, wanted, features=True)
        return features

    def run_gated(
        self,
        x: Tensor | None,
        gates: Tensor,
        *,
        sets: Tensor | None = None,
        replicas: int = 1,
        **others: Any,
    ) -> Any:
        """The base model under the gates given, for all targets in the order of ``wf.targets``.

        Args:
            x: A batch of images.
            gates: ``(total_units,)``, one row for all samples, or ``(batch, total_units)``.
            sets: What each sample forgets, bool ``(batch, num_classes)``, for the feature rows;
                without it, or without them, features stay as they are.
            replicas: How many rows of ``gates`` each sample has, grouped by sample; more than one
                needs filters that can share (see ``replicated``).
            others: Further inputs of the base model.

        Example:
            >>> import wfilter
            >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
            >>> x = torch.ones(2, 4)
            >>> torch.allclose(wf.run_gated(x, torch.ones(2, 6)), wf(x))
            True
        """
        inputs = read_inputs(x, others)
        sets = None if self.feature_rows is None else sets
        return run_path(self, inputs, gates, sets, replicas=replicas)

    def _traced(self, inputs: Inputs, forget: Forget) -> Any:
        """The part of ``forward`` that a graph holds: no checks of values, no inspection."""
        refuse_training(self._parts)
        if self.open_blocks:
            return self._outside_graph(inputs, forget)
        if forget is None:
            return inputs.run(self.base)
        batch = inputs.images.shape[0]
        wanted = read_forget(forget, batch, self.num_classes, self.class_names)
        return self._forget(inputs, self._per_sample(wanted, batch))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _outside_graph(self, inputs: Inputs, forget: Forget) -> Any:
        """Which block a call is in depends on its context, which no graph can hold."""
        return self(inputs.images, forget, **inputs.others)

    def _wanted(self, inputs: Inputs, forget: Forget) -> Rows | Tensor | None:
        """What this call forgets, by its argument or by its block."""
        check_base(self.base, self._parts)
        if forget is not None:
            batch = inputs.images.shape[0]
            return read_forget(forget, batch, self.num_classes, self.class_names)
        block = innermost(self) if is_any_open() else None
        return None if block is None else block.rows

    def _plain(self, inputs: Inputs) -> Any:
        base = self.base if self._compiled is None else self._compiled.plain
        if not is_any_open():
            return inputs.run(base)
        with running():
            return inputs.run(base)

    def _forget(self, inputs: Inputs, wanted: Rows | Tensor, *, features: bool = False) -> Any:
        """Gates for what is wanted, then the path that fits."""
        refuse_recomputation(self, inputs.images)
        compiled = None if features else self._compiled
        batch = inputs.images.shape[0]
        sets = None
        if self.feature_rows is not None:
            sets = as_sets(self._per_sample(wanted, batch), self.num_classes)
        if isinstance(wanted, tuple) and compiled is None:
            gates = self.row_gates(wanted)
        else:
            make = self.mixed_gates if compiled is None else compiled.gates
            gates = make(self._per_sample(wanted, batch))
        if compiled is not None:
            return compiled.gated(inputs, gates, sets)
        return run_path(self, inputs, gates, sets, features=features)

    def run_part(
        self, method: Callable[..., Any], rows: Rows, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """A method of the base model or of one of its modules, called inside a block."""
        whole = module is self.base and method is type(module).forward
        if whole and len(args) < 2:
            return self(*args, **kwargs)
        check_values(self, rows)
        with ExitStack() as stack:
            stack.enter_context(running())
            stack.enter_context(gate_mode(self, self._latest, self.row_gates(rows)))
            if self.feature_rows is not None:
                chosen = as_sets(self._per_sample(rows, 1), self.num_classes)
                head = self.feature_rows.head_of(self.base)
                stack.enter_context(head_mode(self, head, chosen))
            return method(module, *args, **kwargs)

    def row_gates(self, rows: Rows) -> Tensor:
        """``(total_units,)`` for one class or set, without a look at the other rows."""
        return _gates.row_gates(self.alphas, rows, hard=self.hard)

    def mixed_gates(self, forget: Tensor) -> Tensor:
        """Gates ``(batch, total_units)`` for labels ``(batch,)`` or sets, checked before."""
        if forget.dtype == torch.bool:
            return _gates.set_gates(self.alphas, forget, hard=self.hard)
        return _gates.label_gates(self.alphas, forget, hard=self.hard, sparse=self.sparse)

    def _per_sample(self, wanted: Rows | Tensor, batch: int) -> Tensor:
        return per_sample(wanted, batch, self.num_classes, self.alphas.device)

    def replicated(self, x: Tensor, forget: Tensor) -> Any:
        """Several forgets per sample: ``forget`` has ``replicas * batch`` rows, grouped by sample.

        The replicas of a sample share everything before the first gate that is not pinned open,
        where the model allows it; the result is that of ``wf(x.repeat_interleave(replicas, 0),
        forget)``.
        """
        return run_replicated(self, x, forget)

    def pin_open(self, names: Iterable[str]) -> None:
        """In place: fix targets with every gate at exactly 1, so that a forward skips them."""
        self.pins.pin_open(self, names)

    # ---- inspection ---------------------------------------------------------------------------

    def inspect(self, x: Tensor | None = None, **others: Any) -> Plan:
        """Look again at how the model treats inputs of this shape; done by itself when needed.

        Call it before ``torch.compile(wf)`` meets an image size for the first time.
        """
        inputs = read_inputs(x, others)
        self.remember(inspect_again(self, inputs))
        return self.plan

    def remember(self, inspection: Inspection) -> None:
        """In place: use this inspection for inputs of its shape."""
        self._inspected[inspection.key] = self._latest = inspection

    def probe(self, x: Tensor) -> Plan:
        """The old name of ``inspect``."""
        warnings.warn("wf.probe is now wf.inspect.", DeprecationWarning, stacklevel=2)
        return self.inspect(x)

    def inspection_of(self, inputs: Inputs) -> Inspection:
        """What is known about inputs of this shape, looked at now if they are the first."""
        key = inputs.key
        if key in self._inspected or _gates.traced(inputs.images):
            return self._inspected.get(key, self._latest)
        self.inspect(**{inputs.keyword or "x": inputs.images, **inputs.others})
        return self._inspected[key]

    def is_fused(self, inputs: Inputs) -> bool:
        """Whether a mixed batch of these inputs runs as one forward of the base model."""
        return self.inspection_of(inputs).is_fused

    def head(self, inputs: Inputs) -> Head:
        """Where the logits are made; see ``head.py``."""
        if self.feature_rows is not None:
            return self.feature_rows.head_of(self.base)
        if inputs.key not in self._heads:
            some = inputs.of_samples(torch.arange(min(2, len(inputs.images))))
            with running():
                self._heads[inputs.key] = find_head(self.base, some)
        return self._heads[inputs.key]

    # ---- refusals -----------------------------------------------------------------------------

    def refuse_other_classes(self, data: object) -> None:
        """Stop where data names its classes otherwise: a label would reach another class's row.

        Names are looked for in ``data.class_names`` and ``data.dataset.class_names``.
        """
        refuse_other_classes(self.class_names, data)

    def refuse_inside_forgetting(self, what: str) -> None:
        """Stop where a block of this context would be ignored."""
        refuse_inside(self.base, what)

    # ---- blocks -------------------------------------------------------------------------------

    def forgetting(self, forget: Forget) -> Forgetting:
        """Inside, every forward forgets this class or set, also calls of ``wf.base`` itself.

        (After ``wf.compile()`` only calls of ``wf``: there the base model stays as it is.)

        Blocks nest, the innermost holds; an explicit ``forget=`` argument wins. A block belongs to
        the context that opened it: other threads and asyncio tasks never see it, tasks started
        inside inherit it, and one opened in a generator holds while that generator runs.
        Parameters and ``state_dict`` of the base model stay as they are.

        Example:
            >>> import wfilter
            >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
            >>> x = torch.ones(2, 4)
            >>> with wf.forgetting(2):
            ...     inside = wf(x)
            >>> torch.allclose(inside, wf(x, forget=2))
            True
        """
        rows = None if forget is None else self._one_for_all(forget, "forgetting")
        check_values(self, rows or ())
        return Forgetting(self, rows)

    def _one_for_all(self, forget: Forget, where: str) -> Rows:
        return one_for_all(forget, self.num_classes, self.class_names, where)

    # ---- reading ------------------------------------------------------------------------------

    @property
    def alpha(self) -> Mapping[str, Tensor]:
        """Parameter name -> alphas ``(num_classes, units)``; views, so writing to one sets it."""
        return ByTarget(self.targets, self.alphas)

    def gates(self, forget: Forget) -> Mapping[str, Tensor]:
        """Parameter name -> gates: ``(units,)`` for one class or set, ``(batch, units)`` else."""
        if forget is None:
            return ByTarget(self.targets, torch.ones_like(self.alphas[0]))
        wanted = read_forget(forget, None, self.num_classes, self.class_names)
        if isinstance(wanted, tuple):
            return ByTarget(self.targets, self.row_gates(wanted))
        return ByTarget(self.targets, self.mixed_gates(wanted.to(self.alphas.device)))

    @property
    def plan(self) -> Plan:
        """One row per target: name, shape, units, path (fused or exact) and why."""
        plan, notes = make_plan(self.targets, self._latest.findings), []
        if self.left_out:
            names = ", ".join(self.left_out)
            notes.append(f"left out by 'auto', since no forward of the inspection used it: {names}")
        if self.feature_rows is not None:
            notes.append(f"feature rows before the head: {self.feature_rows.extra_repr()}")
        plan.note = "\n".join(notes)
        return plan

    @property
    def pinned(self) -> tuple[str, ...]:
        """Names of the targets that are pinned open."""
        return tuple(self.targets[index].name for index in sorted(self.pins.indices))

    @property
    def is_compiled(self) -> bool:
        """Whether forwards run through ``torch.compile``."""
        return self._compiled is not None

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The alphas, for your own optimiser and loop."""
        return [self.alphas]

    def verify(self, x: Tensor | None, forget: Forget, **others: Any) -> dict[str, float]:
        """Largest difference between the fast path and the one-sample-at-a-time oracle, per path.

        ``"fused"`` or ``"exact"``, whichever these filters take for a mixed batch.
        """
        self.refuse_inside_forgetting("verify")
        return compare(self, read_inputs(x, others), forget)

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
        Feature rows become a linear layer in front of the head, which no longer has the weights of
        the class; that layer moves the class to one place, where the rows choose by the image, so
        a probe finds more of it (see ``FeatureRows.folded``).

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
        refuse_bad_alphas(self)
        rows = self._one_for_all(forget, "bake")
        with torch.no_grad():
            gates = snapped(self.row_gates(rows), snap)
        baked = bake(self.base, self.targets, ByTarget(self.targets, gates))
        if self.feature_rows is not None:
            chosen = as_sets(self._per_sample(rows, 1), self.num_classes)[0]
            baked = fold_head(baked, self.feature_rows, chosen)
        return prune_model(baked, example_input).model if prune else baked

    @torch.no_grad()
    def snap_effect(self, x: Tensor, forget: Forget, snap: float) -> SnapEffect:
        """What ``bake(forget, snap=snap)`` would change, measured on ``x``."""
        gates = self.row_gates(self._one_for_all(forget, "snap_effect"))
        return measure_snap(self.bake(forget), self.bake(forget, snap=snap), x, gates, snap)

    def save(self, path: str | Path, *, report: Any = None) -> Path:
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
        self._compiled = compile_forwards(self, run_path, *args, **kwargs)
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
        state: dict[str, Any] = {**self.__dict__, "_compiled": None, "open_blocks": 0}
        state["kept_sites"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        strip_methods(self.base)

    def extra_repr(self) -> str:
        """Shown above the base model when printed."""
        fused = sum(f.path == "fused" for f in self._latest.findings)
        return (
            f"num_classes={self.num_classes}, granularity={self.granularity!r}, "
            f"{len(self.targets)} targets ({fused} fused), {self.alphas.shape[1]} units"
        )
