"""A router's write-ahead log of its ledger: segments of a fixed size in a folder of its own.

The event loop writes, into blocks that the disk has given already, so it waits for no disk; a thread makes the next
segment and syncs. Owns the folder, by a lock that ends with the process: who gets the lock of another's folder knows
that nobody writes it any more.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora_shared.ledger.frames import Seal, frame
from manylora_shared.ledger.records import header

from manylora_router.ledger.sealing import remove_key

_LOG = logging.getLogger(__name__)
SEGMENT_BYTES = 8 << 20
SYNC_S = 0.1  # records that came together are synced together
_RETRY_S = 1.0  # after the disk refused a segment
_LOCK = "lock"
_SUFFIX = ".wal"
_LEAST_SEGMENTS = 2


class Lock:
    """Of a log's folder. Raises OSError, and BlockingIOError where another process has it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def release(self) -> None:
        os.close(self._fd)


def is_log(folder: Path) -> bool:
    """Else it is somebody else's, such as a volume's lost+found. Raises OSError."""
    return any(path.name == _LOCK for path in folder.iterdir())


def segments_of(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdigit())


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:012d}{_SUFFIX}"


def remove_folder(folder: Path) -> None:
    """Of a log that is empty or was read to its end; its lock is held."""
    for number in segments_of(folder):
        segment_path(folder, number).unlink(missing_ok=True)
    remove_key(folder)
    (folder / _LOCK).unlink(missing_ok=True)
    folder.rmdir()


@dataclass
class _Segment:
    number: int
    fd: int
    written: int = 0


class Log:
    """`standing` gives the records with which a new segment begins: of all that runs. `max_bytes`: of all segments."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        seal: Seal,
        standing: Callable[[], Iterable[Sequence[Any]]],
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Raises OSError."""
        self.folder = folder
        self._lock = Lock(folder)
        self._seal = seal
        self._standing = standing
        self.segment_bytes = segment_bytes
        self._most_segments = max(_LEAST_SEGMENTS, max_bytes // segment_bytes)
        self._number = max(segments_of(folder), default=0)
        self._spare: _Segment | None = None
        self._guard = threading.Condition()
        self._is_dirty = self._is_closed = False
        self._synced = 0  # all segments before this one are on the disk whole, and so is the beginning of this one
        self._durable = 0, 0  # what lies before this place outlasts a loss of power
        self.num_dropped = 0  # records that the disk had no room for
        self.num_written = 0
        try:
            self._spare = self._made()
        except BaseException:
            self._lock.release()
            raise
        self._begun = 0  # bytes with which the current segment began
        self._current = self._begin_next()
        self._synced_fd = -1
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._keep, name="ledger-sync", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """There is no room behind the current segment: the cap or the disk has ended."""
        return self._spare is None and self._current.written > self.segment_bytes // 2

    @property
    def current(self) -> int:
        return self._current.number

    @property
    def place(self) -> tuple[int, int]:
        """The segment, and where its next record goes."""
        return self._current.number, self._current.written

    @property
    def synced(self) -> int:
        """Segments before this one are not written any more, and those behind need nothing of them."""
        return self._synced

    @property
    def durable(self) -> tuple[int, int]:
        """A place as `place`: what lies before it outlasts a loss of power."""
        return self._durable

    def wait_durable(self, timeout_s: float) -> None:
        """On another thread: until what is written by now is."""
        place = self.place
        with self._guard:
            self._guard.wait_for(lambda: self._durable >= place or self._is_closed, timeout=timeout_s)

    def append(self, record: Sequence[Any]) -> bool:
        """On the event loop. False: there was no room."""
        data = frame(record, self._seal)
        segment = self._current
        if segment.written + len(data) > self.segment_bytes:
            if self._spare is None:
                self.num_dropped += 1
                return False
            segment = self._begin_next()
        if not self._write(segment, data):
            self.num_dropped += 1
            return False
        self.num_written += 1
        if not self._is_dirty:
            self._wake()
        return True

    def turn(self) -> None:
        """On the event loop. What comes goes into the next segment, so that what is in this one can go."""
        if self._spare is not None and self._current.written > self._begun:
            self._begin_next()

    def close(self) -> None:
        """Synced. The folder stays, with what is in it."""
        with self._guard:
            self._is_closed = True
            self._guard.notify_all()
        if self._thread is not None:
            self._thread.join()
        try:
            self.sync()
            if self._spare is not None:
                segment_path(self.folder, self._spare.number).unlink(missing_ok=True)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """As where the process dies: what is written stays, and the lock goes."""
        for fd in {self._synced_fd, self._current.fd, self._spare.fd if self._spare is not None else -1} - {-1}:
            os.close(fd)
        self._lock.release()

    def _write(self, segment: _Segment, data: bytes) -> bool:
        try:
            written = os.pwrite(segment.fd, data, segment.written)
        except OSError as e:
            _LOG.error("the ledger's log cannot be written: %s", e)
            return False
        if written < len(data):  # its blocks are there, so the disk is at fault
            _LOG.error("the ledger's log took %d of %d bytes", written, len(data))
            return False
        segment.written += written
        return True

    def _begin_next(self) -> _Segment:
        segment, self._spare = self._spare, None
        assert segment is not None
        for record in (header(), *self._standing()):
            data = frame(record, self._seal)
            if segment.written + len(data) > self.segment_bytes or not self._write(segment, data):
                self.num_dropped += 1
        self._current, self._begun = segment, segment.written
        self._wake()
        return segment

    def _wake(self) -> None:
        self._is_dirty = True
        with self._guard:
            self._guard.notify_all()

    # ---- the thread

    def _keep(self) -> None:
        is_refused = False
        while True:
            with self._guard:
                timeout_s = _RETRY_S if is_refused else None
                self._guard.wait_for(lambda: self._is_closed or self._is_dirty, timeout=timeout_s)
                if self._is_closed:
                    return
                self._guard.wait_for(lambda: self._is_closed, timeout=SYNC_S)  # for more to come together
            try:
                is_refused = not self.sync()
            except OSError as e:
                is_refused = True
                _LOG.error("the ledger's log: %s", e)

    def sync(self) -> bool:
        """All that was written when it was called outlasts a loss of power. Whether there is room behind the current
        segment. Raises OSError."""
        segment, self._is_dirty = self._current, False
        written = segment.written
        if self._synced_fd not in (-1, segment.fd):
            os.fdatasync(self._synced_fd)
            os.close(self._synced_fd)
            self._synced_fd = -1
        os.fdatasync(segment.fd)
        self._synced_fd, self._synced = segment.fd, segment.number
        with self._guard:
            self._durable = segment.number, written
            self._guard.notify_all()
        if self._spare is None:
            self._spare = self._made()
        return self._spare is not None

    def _made(self) -> _Segment | None:
        """None: the cap has ended. Raises OSError."""
        if len(segments_of(self.folder)) >= self._most_segments:
            return None
        self._number += 1
        path = segment_path(self.folder, self._number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self.segment_bytes)
            os.fsync(fd)
            folder_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder_fd)
            finally:
                os.close(folder_fd)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return _Segment(self._number, fd)
