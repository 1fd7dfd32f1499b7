"""``FilteredModel``: the base model and its filters as one module.

It holds what belongs together and hands the work on: a call to ``forward.py``, blocks to
``forgetting.py``, inspections to ``known.py``, copies without filters to ``bake.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wfilter.core import gates as _gates
from wfilter.core.bake import SnapEffect, bake_rows, measure_snap
from wfilter.core.compiling import Compiled, compile_forwards
from wfilter.core.feature_rows import FeatureRows
from wfilter.core.filters import is_marked
from wfilter.core.forget import Forget, Rows, one_for_all, per_sample, read_forget
from wfilter.core.forgetting import Forgetting, refuse_inside, strip_methods
from wfilter.core.forward import run_call, run_part
from wfilter.core.head import Head
from wfilter.core.inspection import Inspection, Plan, make_plan, parameter_of
from wfilter.core.known import Known
from wfilter.core.oracle import compare
from wfilter.core.outputs import Inputs, read_inputs
from wfilter.core.paths import run_path
from wfilter.core.proof import inspect_again
from wfilter.core.prune import prune as prune_model
from wfilter.core.refusals import check_values, refuse_bad_alphas
from wfilter.core.sharing import NO_REPLICAS, Pins, run_replicated
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
        feature_rows: ``None``, or rows that draw features of forgotten classes anew, see
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
        self.alphas = nn.Parameter(_gates.new_alphas(self.targets, num_classes, init, first))
        self.left_out: tuple[str, ...] = ()
        self.pins = Pins()
        self.open_blocks = 0  # in all contexts; see forgetting.py
        self.known = Known(inspection)
        self.parts = tuple(base.modules())
        self.compiled: Compiled | None = None

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
        return run_call(self, read_inputs(x, others), forget)

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
        features: Tensor = run_call(self, read_inputs(x, others), forget, features=True)
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

    def row_gates(self, rows: Rows, look: _gates.Look | None = None) -> Tensor:
        """``(total_units,)`` for one class or set, without a look at the other rows."""
        return _gates.row_gates(self.alphas, rows, hard=self.hard, look=look)

    def mixed_gates(self, forget: Tensor, look: _gates.Look | None = None) -> Tensor:
        """Gates ``(batch, total_units)`` for labels or sets; ``look`` gets the alphas they use."""
        alphas, hard = self.alphas, self.hard
        if forget.dtype == torch.bool:
            return _gates.set_gates(alphas, forget, hard=hard, look=look)
        return _gates.label_gates(alphas, forget, hard=hard, sparse=self.sparse, look=look)

    def per_sample(self, wanted: Rows | Tensor, batch: int) -> Tensor:
        """Labels or sets with an entry for each sample, where the alphas are."""
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

    def run_part(self, method: Callable[..., Any], rows: Rows, *args: Any, **kwargs: Any) -> Any:
        """A method of one of the base model's modules, called inside a block with these rows."""
        return run_part(self, method, rows, *args, **kwargs)

    # ---- inspection ---------------------------------------------------------------------------

    def inspect(self, x: Tensor | None = None, **others: Any) -> Plan:
        """Look again at how the model treats inputs of this shape; done by itself when needed.

        Call it before ``torch.compile(wf)`` meets an image size for the first time.
        """
        self.known.remember(inspect_again(self, read_inputs(x, others)))
        return self.plan

    def probe(self, x: Tensor) -> Plan:
        """The old name of ``inspect``."""
        warnings.warn("wf.probe is now wf.inspect.", DeprecationWarning, stacklevel=2)
        return self.inspect(x)

    def inspection_of(self, inputs: Inputs) -> Inspection:
        """What is known about inputs of this shape, looked at now if they are the first."""
        known = self.known.inspection(inputs)
        if known is None and not _gates.traced(inputs.images):
            known = inspect_again(self, inputs)
            self.known.remember(known)
        return known or self.known.latest

    def is_fused(self, inputs: Inputs) -> bool:
        """Whether a mixed batch of these inputs runs as one forward of the base model."""
        return self.inspection_of(inputs).is_fused

    def head(self, inputs: Inputs) -> Head:
        """Where the logits are made; see ``head.py``."""
        if self.feature_rows is not None:
            return self.feature_rows.head_of(self.base)
        return self.known.head(self.base, inputs)

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
        return _gates.ByTarget(self.targets, self.alphas)

    def gates(self, forget: Forget) -> Mapping[str, Tensor]:
        """Parameter name -> gates: ``(units,)`` for one class or set, ``(batch, units)`` else."""
        if forget is None:
            return _gates.ByTarget(self.targets, torch.ones_like(self.alphas[0]))
        wanted = read_forget(forget, None, self.num_classes, self.class_names)
        if isinstance(wanted, tuple):
            return _gates.ByTarget(self.targets, self.row_gates(wanted))
        return _gates.ByTarget(self.targets, self.mixed_gates(wanted.to(self.alphas.device)))

    @property
    def plan(self) -> Plan:
        """One row per target: name, shape, units, path (fused or exact) and why."""
        rows = None if self.feature_rows is None else self.feature_rows.extra_repr()
        return make_plan(self.targets, self.known.latest.findings, self.left_out, rows)

    @property
    def pinned(self) -> tuple[str, ...]:
        """Names of the targets that are pinned open."""
        return tuple(self.targets[index].name for index in sorted(self.pins.indices))

    @property
    def is_compiled(self) -> bool:
        """Whether forwards run through ``torch.compile``."""
        return self.compiled is not None

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The alphas, for your own optimiser and loop."""
        return [self.alphas]

    def verify(self, x: Tensor | None, forget: Forget, **others: Any) -> dict[str, float]:
        """Largest difference between the fast path and the one-sample-at-a-time oracle, per path.

        ``"fused"`` or ``"exact"``, whichever these filters take for a mixed batch.
        """
        refuse_inside(self.base, "verify")
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

        Same class and ``state_dict`` keys as the base model, independent of it, no wfilter needed,
        and always in eval mode. Feature rows become a linear layer in front of the head, which
        hides less than they do; see ``FeatureRows.folded``.

        Args:
            forget: One class or set.
            snap: Gates below ``snap`` become exactly 0, those above ``1 - snap`` exactly 1; see
                ``snap_effect`` for what that changes.
            prune: Also take out what closed gates silenced, see ``wfilter.prune``; it is safer.
            example_input: Images the model takes, for pruning, where their size is not guessed.

        Example:
            >>> import wfilter
            >>> wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*")
            >>> type(wf.bake(forget=2)).__name__
            'Linear'
        """
        refuse_inside(self.base, "bake")
        refuse_bad_alphas(self)
        rows = self._one_for_all(forget, "bake")
        baked = bake_rows(self, rows, snap)
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

    def push_to_hub(self, repo_id: str, *, report: Any = None, **options: Any) -> str:
        """Put the alphas and a model card in ``owner/name`` on the Hugging Face Hub.

        ``wfilter.load("hf://owner/name", model)`` reads them. The base model stays here, the card
        shows the ``report`` (an evaluation or an audit), and huggingface_hub finds the token. The
        options are ``private``, ``revision`` (a branch) and ``message``. Returns the commit's URL.
        """
        from wfilter.files.checkpoint import push_to_hub

        return push_to_hub(self, repo_id, report=report, **options)

    def compile(self, *args: Any, **kwargs: Any) -> FilteredModel:  # type: ignore[override]
        """In place: run forwards through ``torch.compile``; arguments are passed on to it.

        One graph serves all labels and sets, another calls that forget nothing. torch makes a
        graph for the first batch size, one for all others and one for single images; with
        ``dynamic=True`` the first two are one. Checks of the labels stay outside the graph, and so
        does ``forgetting``, which then costs a mixed batch. Without a C++ compiler, which torch
        needs on a CPU, it warns and stays eager.
        """
        refuse_inside(self.base, "compile")
        self.compiled = compile_forwards(self, run_path, *args, **kwargs)
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
        refuse_inside(self.base, "state_dict")
        return super().state_dict(*args, **kwargs)

    def _replicate_for_data_parallel(self) -> FilteredModel:
        raise RuntimeError(NO_REPLICAS)

    def __getstate__(self) -> dict[str, Any]:
        refuse_inside(self.base, "copying or pickling")
        fresh = {"compiled": None, "open_blocks": 0, "known": self.known.without_sites()}
        return {**self.__dict__, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        strip_methods(self.base)

    def extra_repr(self) -> str:
        """Shown above the base model when printed."""
        fused = sum(f.path == "fused" for f in self.known.latest.findings)
        counts = f"{len(self.targets)} targets ({fused} fused), {self.alphas.shape[1]} units"
        return f"num_classes={self.num_classes}, granularity={self.granularity!r}, {counts}"
