"""A policy file that may be replaced at any moment: each request sees one whole policy."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from wfilter.serve.policy import Policy, PolicyError, parse_policy

SETTLED = 0.5  # seconds without a write, after which a file written in place counts as whole
MOST_BYTES = 2**24
_log = logging.getLogger("wfilter.serve")

Stamp = tuple[int, int, int]


class PolicyFile:
    r"""The policy in a file, read again whenever the file has changed.

    A file that was renamed into place is used at once. A file written in place may be half there,
    and is used when it has not changed for half a second. A new policy with a mistake is not used:
    the last good one stays in force, and ``problem`` and the log say why.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "policy.toml")
        ...     _ = path.write_text("[tenants.a]\nforget = [0]\ntokens = []")
        ...     list(PolicyFile(path, ["cat", "dog"]).current().tenants)
        ['a']
    """

    def __init__(self, path: str | Path, class_names: Sequence[str]):
        self._held: BinaryIO | None = None
        self.path, self.class_names = Path(path), tuple(class_names)
        self._pending: tuple[Stamp, float] | None = None
        self._missing: str | None = None
        self._refused: str | None = None
        if not self.path.is_file():
            raise FileNotFoundError(f"{path} is not a file. Give the path of a policy in TOML.")
        self._policy, self._seen = self._read()
        for path in (self.path, self.path.parent):
            if _anybody_may_change(path):
                _log.warning("every user of this machine may write %s. Run chmod o-w.", path)

    @property
    def problem(self) -> str | None:
        """Why the file as it is now is not in force, or nothing."""
        return self._missing or self._refused

    def current(self) -> Policy:
        """The policy in force now; costs one look at the file's date unless it changed."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            self._missing = self._say(self._missing, f"{self.path}: {error.strerror}")
            return self._policy
        if not stat.S_ISREG(status.st_mode):  # to read a pipe would wait for ever
            self._missing = self._say(self._missing, f"{self.path} is not a file.")
            return self._policy
        self._missing, stamp = None, _stamp(status)
        if stamp != self._seen and self._whole(stamp):
            self._reload(stamp)
        return self._policy

    def _reload(self, stamp: Stamp) -> None:
        try:
            self._policy, self._seen = self._read()
        except _Changing:
            return  # the next request looks again
        except Exception as error:  # whatever is wrong, the last good policy must stay
            words = str(error) or type(error).__name__
            self._seen, self._refused = stamp, self._say(self._refused, words)
        else:
            self._refused = None
            _log.warning("policy version %s is in force", self._policy.version)

    def _whole(self, stamp: Stamp) -> bool:
        now, replaced = time.monotonic(), stamp[0] != self._seen[0]
        if self._pending is None or self._pending[0] != stamp:
            self._pending = stamp, now
        # By our own clock, too: a date in the future must not keep a policy out of force.
        still = max(time.time() - stamp[1] / 1e9, now - self._pending[1])
        return replaced or still > SETTLED

    def _read(self) -> tuple[Policy, Stamp]:
        file = open(self.path, "rb", opener=_without_waiting)  # noqa: SIM115 - see _hold
        try:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # put there since `current` looked
                raise PolicyError(f"{self.path} is not a file.")
            before = _stamp(status)
            content = file.read(MOST_BYTES + 1)
            after = _stamp(os.fstat(file.fileno()))
        except BaseException:
            file.close()
            raise
        if before != after:
            file.close()
            raise _Changing(f"{self.path} changes while it is read. Try again.")
        self._hold(file)
        if len(content) > MOST_BYTES:
            raise PolicyError(f"{self.path} has more than {MOST_BYTES} bytes: it is no policy.")
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise PolicyError(f"{self.path} is not UTF-8 ({error.reason}). Save it anew.") from None
        return parse_policy(text, self.class_names, str(self.path)), after

    def _hold(self, file: BinaryIO) -> None:
        """Keep the file last read open, so that no later file can get its inode number.

        Else a file that was replaced twice between two looks may seem to be the same one, written
        in place, and a new policy would wait for half a second.
        """
        if self._held is not None:
            self._held.close()
        self._held = file

    def __del__(self) -> None:
        if self._held is not None:
            self._held.close()

    def _say(self, before: str | None, problem: str) -> str:
        if problem != before:
            _log.error("policy version %s stays in force: %s", self._policy.version, problem)
        return problem


class _Changing(PolicyError):
    """The file was written to while it was read."""


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # to open a pipe would wait


def _anybody_may_change(path: Path) -> bool:
    mode = path.stat().st_mode  # in a sticky folder, as /tmp is, only owners replace their files
    return bool(mode & stat.S_IWOTH) and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX)


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_mtime_ns, status.st_size
