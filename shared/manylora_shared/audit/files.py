"""A chain's files in the audit log's folder: found, mended, appended to and begun anew. Blocking; for one thread.

`<chain>-<number>.jsonl` are its segments; who writes a chain holds a lock on `<chain>.lock`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from manylora_shared.audit.verify import Segment, segment_name, segment_of

SEGMENT_BYTES = 16 << 20
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600


@dataclass(frozen=True)
class Part:
    """A segment as it lies there."""

    chain: str
    number: int
    path: Path

    def read(self) -> Segment:
        return Segment(self.chain, self.number, self.path.read_bytes())


def parts_of(folder: Path) -> list[Part]:
    """By chain and number. Raises OSError."""
    found = []
    for path in folder.iterdir():
        named = segment_of(path.name)
        if named is not None and path.is_file():
            found.append(Part(*named, path))
    return sorted(found, key=lambda part: (part.chain, part.number))


class ChainFile:
    """The last segment of a chain that this process alone writes."""

    def __init__(self, folder: Path, chain: str, lock: int, segment_bytes: int) -> None:
        self.chain = chain
        self.torn_bytes = 0
        self._folder = folder
        self._lock = lock
        self._segment_bytes = segment_bytes
        self._file = -1
        self._number = 0
        self._size = 0  # of what is whole

    @classmethod
    def take(cls, folder: Path, chain: str, segment_bytes: int = SEGMENT_BYTES) -> Self | None:
        """None: another process writes it. Raises OSError."""
        lock = os.open(folder / f"{chain}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return cls(folder, chain, lock, segment_bytes)

    def segments_back(self) -> Iterator[Segment]:
        """From the last one."""
        for part in reversed(self._parts()):
            yield part.read()

    def go_on(self) -> None:
        """With the last segment, without what a crash left of a line: `torn_bytes` of it. Raises OSError."""
        own = self._parts()
        if not own:
            self._begin(1)
            return
        self._number = own[-1].number
        self._file = os.open(own[-1].path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        data = own[-1].path.read_bytes()
        self._size = data.rfind(b"\n") + 1
        self.torn_bytes = len(data) - self._size
        self._cut()

    def append(self, lines: list[bytes]) -> None:
        """All of them, durable. Raises OSError: then none is, and what is there of them is cut before the next."""
        assert self._file >= 0, "go_on comes first"
        self._cut()
        if self._size >= self._segment_bytes:
            self._begin(self._number + 1)
        data = memoryview(b"".join(lines))
        written = 0
        while written < len(data):
            written += os.write(self._file, data[written:])
        os.fsync(self._file)
        self._size += len(data)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        os.close(self._lock)

    def _parts(self) -> list[Part]:
        return [part for part in parts_of(self._folder) if part.chain == self.chain]

    def _begin(self, number: int) -> None:
        path = self._folder / segment_name(self.chain, number)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
        _sync_folder(self._folder)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._number, self._size = file, number, 0

    def _cut(self) -> None:
        if os.fstat(self._file).st_size != self._size:
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)


def make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=_FOLDER_MODE)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
