"""Brings rows from logs to the sink: those of this router as they are written, and those of routers that are gone.

A record is sent when it is on the disk for good, or after a loss of power the same request could have another row.
One thread. A log's segment goes when all of its rows are in the sink, so a row is sent once at least, and the sink
counts it once. While the sink is away the logs keep everything.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from manylora_shared.encryption.sealing import SealBroken, Sealed
from manylora_shared.ledger.frames import is_torn, records
from manylora_shared.ledger.records import Replay
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger_sinks.base import Sink, SinkDown
from manylora_shared.telemetry.logs import fields

from manylora_router.ledger.log import Lock, Log, is_log, remove_folder, segment_path, segments_of
from manylora_router.ledger.sealing import LogSeals

_LOG = logging.getLogger(__name__)
BATCH = 500
SHIP_S = 1.0
ADOPT_S = 10.0  # between two looks for logs of routers that are gone
_MAX_BACKOFF_S = 10.0
_READ_BYTES = 1 << 20
_SYNC_S = 2.0  # a disk that takes longer has its rows sent later


@dataclass
class ShippingCounts:
    """Written by the shipping thread alone."""

    shipped: int = 0
    lost: int = 0  # rows of requests whose router died
    torn: int = 0  # logs that ended in the midst of a record
    failures: int = 0  # of the sink
    is_down: bool = False


class Shipper:
    """`priced` gives a lost row its price."""

    def __init__(
        self, root: Path, log: Log, sink: Sink, seals: LogSeals, priced: Callable[[UsageRow], UsageRow], name: str
    ) -> None:
        self.counts = ShippingCounts()
        self._root = root
        self._log = log
        self._sink = sink
        self._seals = seals
        self._priced = priced
        self._number = (segments_of(log.folder) or [1])[0]
        self._at = 0
        self._replay = Replay()
        self._left_alone: set[str] = set()  # folders of which the log has told
        self._guard = threading.Condition()
        self._told = threading.Condition()  # that a turn of the thread is over
        self._is_closed = self._is_hurried = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        with self._guard:
            self._is_hurried = True
            self._guard.notify()

    def has_shipped(self, number: int, written: int) -> bool:
        """Of this router's log, up to a place."""
        return (self._number, self._at) >= (number, written)

    def wait_shipped(self, number: int, written: int, timeout_s: float) -> bool:
        """Until then, or until the sink does not take them, on a thread of the caller's."""
        with self._told:
            self._told.wait_for(lambda: self.has_shipped(number, written) or self.counts.is_down, timeout=timeout_s)
        return self.has_shipped(number, written)

    @property
    def backlog_bytes(self) -> int:
        number, written = self._log.place
        return (number - self._number) * self._log.segment_bytes + written - self._at

    def close(self, timeout_s: float) -> bool:
        """Ships what it can in that time. Whether the thread has ended."""
        with self._guard:
            self._is_closed = True
            self._guard.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the thread

    def _run(self) -> None:
        adopt_at, backoff_s = time.monotonic(), SHIP_S
        while True:
            is_last = self._is_closed
            try:
                self._log.wait_durable(_SYNC_S)
                self.ship()
                if time.monotonic() >= adopt_at and not is_last:
                    adopt_at = time.monotonic() + ADOPT_S
                    self.adopt()
            except Exception as e:
                self._failed(e)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            else:
                self.counts.is_down, backoff_s = False, SHIP_S
            with self._told:
                self._told.notify_all()
            if is_last:
                return
            with self._guard:
                self._guard.wait_for(lambda: self._is_closed or self._is_hurried, timeout=backoff_s)
                self._is_hurried = False

    def _failed(self, error: Exception) -> None:
        self.counts.failures += 1
        if not self.counts.is_down:
            _LOG.error("the ledger's rows stay in the log: %s", error, exc_info=not isinstance(error, SinkDown))
        self.counts.is_down = True

    def ship(self) -> None:
        """This router's, up to what outlasts a loss of power by now. Raises SinkDown, OSError, ValueError."""
        while True:
            is_over = self._log.synced > self._number  # before it is read: then nothing more comes
            has_more = self._ship_some()
            if has_more:
                continue
            if not is_over:
                return
            segment_path(self._log.folder, self._number).unlink(missing_ok=True)
            self._number, self._at = self._number + 1, 0

    def _ship_some(self) -> bool:
        current, written = self._log.durable
        num_bytes = min(_READ_BYTES, written - self._at) if current == self._number else _READ_BYTES
        if current < self._number:
            return False
        if num_bytes <= 0:
            return False
        fd = os.open(segment_path(self._log.folder, self._number), os.O_RDONLY)
        try:
            data = os.pread(fd, num_bytes, self._at)
        finally:
            os.close(fd)
        end = 0
        for read in records(data, self._seals.own, kinds="he"):  # what runs here is no business of the sink
            if read.record is not None:
                self._replay.take(read.record)
            end = read.end
            if len(self._replay.ended) >= BATCH:
                break
        self._put(self._replay.take_ended())
        self._at += end
        return end > 0

    def _put(self, rows: Sequence[UsageRow]) -> None:
        if rows:
            self._sink.put(rows)
            self.counts.shipped += len(rows)

    def adopt(self) -> None:
        """Logs of routers that are gone, and that this one may read. Raises SinkDown."""
        for folder in sorted(self._root.iterdir()):
            if folder == self._log.folder or not folder.is_dir():
                continue
            try:
                self._adopt_unheld(folder)
            except (OSError, ValueError, Sealed, SealBroken) as e:
                if folder.name not in self._left_alone:
                    _LOG.error("a ledger's log is left alone: %s", e, extra=fields(folder=folder.name))
                self._left_alone.add(folder.name)

    def _adopt_unheld(self, folder: Path) -> None:
        if not is_log(folder):
            return
        try:
            lock = Lock(folder)
        except BlockingIOError:
            return  # its router lives
        try:
            self._adopt(folder)
        finally:
            lock.release()

    def _adopt(self, folder: Path) -> None:
        replay, seal = Replay(), self._seals.of(folder)
        shipped, is_broken = 0, False
        for number in segments_of(folder):
            data, end = _read_for_good(segment_path(folder, number)), 0
            for read in records(data, seal):
                replay.take(read.record)
                end = read.end
            is_broken = is_broken or is_torn(data, end)
            rows = replay.take_ended()
            shipped += len(rows)
            for first in range(0, len(rows), BATCH):
                self._put(rows[first : first + BATCH])
        lost = [self._priced(row) for row in replay.lost()]
        for first in range(0, len(lost), BATCH):
            self._put(lost[first : first + BATCH])
        self.counts.lost += len(lost)
        self.counts.torn += is_broken
        remove_folder(folder)
        more = fields(folder=folder.name, rows=shipped, lost=len(lost), torn=is_broken)
        _LOG.info("the ledger's log of a router that is gone was sent", extra=more)


def _read_for_good(path: Path) -> bytes:
    """Of a router that is gone: what it had not synced is, when this returns."""
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        return file.read()
