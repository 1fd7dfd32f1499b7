"""The audit log: one line of JSON for each request of a tenant, in files that are rotated.

It says who asked when, under which policy, a digest of the set that was forgotten, and the status
of the response. It never holds an image, a token or an answer.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

_log = logging.getLogger("wfilter.serve")


class AuditError(RuntimeError):
    """A record could not be written, and the server was told to refuse in that case."""


class AuditLog:
    r"""Appends records to ``FOLDER/NAME.jsonl``; each process has a file of its own.

    Args:
        folder: Where the files are; made if need be.
        name: Name of the process that writes.
        most_bytes: A file that would grow larger is put aside as ``NAME.1.jsonl``, that one as
            ``NAME.2.jsonl``, and so on.
        keep: How many files are put aside before the oldest is deleted.
        on_failure: ``"refuse"``: a request that cannot be logged is not answered. ``"serve"``: it
            is answered, counted in ``lost``, and the log of the server says so.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     AuditLog(folder, "a").write({"tenant": "museum"})
        ...     Path(folder, "a.jsonl").read_text()
        '{"tenant": "museum"}\n'
    """

    def __init__(
        self,
        folder: str | Path,
        name: str,
        *,
        most_bytes: int = 2**26,
        keep: int = 10,
        on_failure: str = "refuse",
    ):
        self.path = Path(folder) / f"{name}.jsonl"
        self.most_bytes, self.keep, self.on_failure = most_bytes, keep, on_failure
        self.lost = 0
        self.failing = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, or act as ``on_failure`` says.

        Raises:
            AuditError: The record is not in the file, and ``on_failure`` is ``"refuse"``.
        """
        line = (json.dumps(record) + "\n").encode()
        try:
            if os.fstat(self._file).st_nlink == 0:  # somebody deleted the file: begin another
                self._reopen()
            if self._size + len(line) > self.most_bytes:
                self._rotate()
            self._append(line)
        except OSError as error:
            self._failed(error)
        else:
            if self.failing:
                _log.warning("the audit log is written again; %d records were lost", self.lost)
            self.failing = False

    def _open(self) -> None:
        # Mode 0o640: other users may not read it; not even the names of tenants are public.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(self.path, flags, 0o640)
        self._size = os.fstat(self._file).st_size

    def _append(self, line: bytes) -> None:
        written = os.write(self._file, line)
        if written < len(line):  # the disk is full: half a line would spoil the next one
            os.ftruncate(self._file, self._size)
            raise OSError(28, "No space left on device", str(self.path))
        self._size += written

    def _rotate(self) -> None:
        if self._size == 0:
            return
        for number in range(self.keep, 0, -1):
            older = self._aside(number)
            newer = self._aside(number - 1) if number > 1 else self.path
            if newer.exists():
                os.replace(newer, older)
        if self.keep == 0:
            self.path.unlink(missing_ok=True)
        self._reopen()

    def _reopen(self) -> None:
        before = self._file
        self._open()  # first: if this fails, the old file is still open
        os.close(before)

    def _aside(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}.{number}.jsonl")

    def _failed(self, error: OSError) -> None:
        if not self.failing:
            then = "requests are refused" if self.on_failure == "refuse" else "requests go unlogged"
            _log.error("the audit log %s cannot be written (%s): %s", self.path, error, then)
        self.failing = True
        if self.on_failure == "refuse":
            raise AuditError("the audit log cannot be written.") from error
        self.lost += 1

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)
