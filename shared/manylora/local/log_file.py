"""The log of a child process, which has it open itself. Owns how large it grows: beyond that its content goes to the
file beside it, `.1`, in the place of what was there.

The child appends, so it writes on at the beginning of the emptied file. What it writes in the moment between is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 16 << 20
_TAIL_BYTES = 1 << 16


class LogFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._start_bytes = 0  # of the last start's lines

    @property
    def older(self) -> Path:
        return self.path.with_name(self.path.name + ".1")

    def begin(self) -> BinaryIO:
        """For a new start's lines."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        log = self.path.open("ab")
        self._start_bytes = log.tell()
        return log

    def bound(self) -> None:
        """Of much more than MAX_BYTES the last ones are kept."""
        if not self.path.exists() or self.path.stat().st_size <= MAX_BYTES:
            return
        with self.path.open("r+b") as log:
            log.seek(max(0, log.seek(0, 2) - MAX_BYTES))
            self.older.write_bytes(log.read())
            log.truncate(0)
        self._start_bytes = 0

    def tail(self, lines: int) -> str:
        """Of the last start."""
        with self.path.open("rb") as log:
            log.seek(max(self._start_bytes, log.seek(0, 2) - _TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
