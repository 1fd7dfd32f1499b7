"""``with wf.forgetting(...)``: which row is in force, for each thread and task.

A block is an entry in a context variable, so threads and asyncio tasks have their own, and nothing
on the model says which row is in force. (Tasks started inside a block inherit it.) Python gives
generators no context of their own: a block opened by one holds only while that generator runs.

Calls of ``wf.base`` and of its modules find the block through an *entry* that stands in for their
``forward`` while any block is open. Parameters, classes and ``state_dict`` are never touched.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from contextvars import ContextVar
from functools import wraps
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from wfilter.core.forget import Rows

if TYPE_CHECKING:
    from wfilter.core.model import FilteredModel

# These run a generator as the two halves of a ``with`` statement: a block opened in such a
# generator holds in the body of that statement.
_DRIVERS = ("contextlib", "_pytest.fixtures")
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR

_LOCK = threading.Lock()  # for putting entries on modules and taking them off


class Block:
    """One open block: whose rows they are, and where it holds."""

    def __init__(self, owner: FilteredModel, rows: Rows | None):
        self.owner, self.rows = owner, rows
        self.generator = _generator(sys._getframe(2))
        self.home = _home()
        self.is_open = True

    def holds(self) -> bool:
        """Whether code that runs now is inside; stops where that cannot be known."""
        if self.home == _home():
            return self.is_open and (self.generator is None or _on_stack(self.generator))
        if self.is_open and self.generator is None:
            return True  # inherited by a task or thread that was started inside
        raise RuntimeError(
            "this task or thread was started while a wf.forgetting(...) block was open that "
            + ("belongs to a generator" if self.is_open else "has ended since")
            + ": whether it is to forget is not clear. Pass forget= to the call, or open a block "
            "of its own (wf.forgetting(None) forgets nothing)."
        )


_BLOCKS: ContextVar[tuple[Block, ...]] = ContextVar("wfilter_blocks", default=())
# Set while a forward of a filtered model runs: entries on its modules then do nothing.
_RUNNING: ContextVar[bool] = ContextVar("wfilter_running", default=False)


class Forgetting(ContextDecorator):
    """What ``wf.forgetting`` returns, to be used in a ``with`` statement."""

    _entered = True  # objects that a compiler makes without __init__ have nothing to warn of

    def __init__(self, owner: FilteredModel, rows: Rows | None):
        self._owner, self._rows = owner, rows
        self._entered = False

    def __call__(self, function: Callable[..., Any]) -> Any:
        """As a decorator: the block is open while the function runs, coroutines included."""
        self._entered = True  # by each call of the function
        if inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__name__} is an asynchronous generator, which a block cannot decorate. "
                "Write 'with wf.forgetting(...):' inside it."
            )
        if inspect.iscoroutinefunction(function):
            return self._around_coroutine(function)
        if inspect.isgeneratorfunction(function):
            return self._around_generator(function)
        return super().__call__(function)

    def _around_coroutine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        async def inner(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await function(*args, **kwargs)

        return inner

    def _around_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            with self:
                return (yield from function(*args, **kwargs))

        return inner

    def __enter__(self) -> FilteredModel:
        block = Block(self._owner, self._rows)
        self._entered = True
        _open(block)
        return self._owner

    def __exit__(self, *exc: object) -> None:
        """Close the innermost block that this object opened in this context."""
        mine = [b for b in _BLOCKS.get() if b.owner is self._owner and b.is_open]
        if mine:
            _close(mine[-1])

    def __del__(self) -> None:
        if not self._entered:
            warnings.warn(
                "wf.forgetting(...) was not entered and did nothing. Write "
                "'with wf.forgetting(3): ...'.",
                RuntimeWarning,
                stacklevel=2,
            )


def innermost(owner: FilteredModel) -> Block | None:
    """The block of ``owner`` that code running now is in, if any."""
    for block in reversed(_BLOCKS.get()):
        if block.owner is owner and block.holds():
            return block
    return None


class Running(AbstractContextManager[None]):
    """Inside, entries are passed through: the forward that runs has its own gates or none."""

    def __enter__(self) -> None:
        self._token = _RUNNING.set(True)

    def __exit__(self, *exc: object) -> None:
        _RUNNING.reset(self._token)


def is_any_open() -> bool:
    """Whether this context has a block at all; most forwards need to know no more."""
    return bool(_BLOCKS.get())


def refuse_inside(base: nn.Module, what: str) -> None:
    """Stop where this context is in a block of a model around ``base``."""
    for block in _BLOCKS.get():
        if block.owner.base is base and block.holds():
            raise RuntimeError(f"{what} inside a forgetting block. Leave the block first.")


def _open(block: Block) -> None:
    _BLOCKS.set((*_BLOCKS.get(), block))
    with _LOCK:
        block.owner.open_blocks += 1
        if block.owner.open_blocks == 1 and not block.owner.is_compiled:
            _put_entries(block.owner)


def _close(block: Block) -> None:
    block.is_open = False
    block.generator = None
    _BLOCKS.set(tuple(other for other in _BLOCKS.get() if other is not block))
    with _LOCK:
        block.owner.open_blocks -= 1
        if block.owner.open_blocks == 0:
            _take_entries(block.owner)


class Entry:
    """Stands in for a module's method and runs it with the gates of the block it is called in."""

    def __init__(self, module: nn.Module, name: str):
        self.module, self.name = module, name
        self.owners: list[FilteredModel] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method's result, under the gates of the block that the call is in, if any."""
        module = self.module
        method = getattr(type(module), self.name)
        if not _RUNNING.get():
            for owner in list(self.owners):
                block = innermost(owner)
                if block is not None and block.rows is not None:
                    return owner.run_part(method, block.rows, module, *args, **kwargs)
        return method(module, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        """Copies and pickles made by another context meanwhile get the plain method."""
        return _method, (self.module, self.name)


def _method(module: nn.Module, name: str) -> MethodType:
    return MethodType(getattr(type(module), name), module)


def strip_methods(model: nn.Module) -> None:
    """In place: forget the plain methods that a copy made during a block got for its entries.

    Those are the class's own, so leaving them out changes nothing. A model may also keep another
    method of its own as ``forward``, as timm's FasterNet does; that one stays.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            own = isinstance(value, MethodType) and value.__self__ is module
            if own and value.__func__ is getattr(type(module), name, None):
                delattr(module, name)


def _put_entries(owner: FilteredModel) -> None:
    """In place: put entries on every ``forward``, ``forward_features`` and the like."""
    for module in owner.base.modules():
        names = ["forward"]
        if module is owner.base:
            names = [n for n in dir(type(module)) if _is_forward(module, n)]
        for name in names:
            entry = vars(module).get(name)
            if entry is not None and not isinstance(entry, Entry):
                continue  # the model's own replacement; what it calls has entries
            if entry is None:
                entry = Entry(module, name)
                object.__setattr__(module, name, entry)
            entry.owners.append(owner)


def _take_entries(owner: FilteredModel) -> None:
    for module in owner.base.modules():
        for name, entry in list(vars(module).items()):
            if isinstance(entry, Entry) and owner in entry.owners:
                entry.owners.remove(owner)
                if not entry.owners:
                    object.__delattr__(module, name)


def _is_forward(module: nn.Module, name: str) -> bool:
    """``forward`` itself, and what timm calls ``forward_features`` and the like."""
    method = inspect.getattr_static(type(module), name)
    return name.startswith("forward") and inspect.isfunction(method)


def _generator(frame: FrameType | None) -> FrameType | None:
    """The innermost generator on the stack that is not half of a with statement."""
    while frame is not None:
        if frame.f_code.co_flags & _GENERATOR and not _is_driven(frame.f_back):
            return frame
        frame = frame.f_back
    return None


def _is_driven(caller: FrameType | None) -> bool:
    return caller is not None and caller.f_globals.get("__name__") in _DRIVERS


def _on_stack(wanted: FrameType) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False


def _home() -> tuple[int, object]:
    """Which thread and asyncio task this is."""
    loop = asyncio._get_running_loop()
    return threading.get_ident(), None if loop is None else asyncio.current_task(loop)
