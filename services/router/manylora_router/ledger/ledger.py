"""The router's side of the usage ledger: a row for each request that got a worker, or ended while it waited for one.

Owns the rows of what runs now. A row is opened before its worker has begun, noted as it goes on, and closed when its
use is settled; each of it is in the log, on this machine's disk, before the caller reads on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from manylora_shared.errors import ServiceUnavailable, Unready
from manylora_shared.ledger.compute import Served
from manylora_shared.ledger.prices import NO_PRICES, PriceList
from manylora_shared.ledger.records import end_record, note_record, open_record
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger.usage import Query, Sum
from manylora_shared.ledger_sinks.base import Page, Sink
from manylora_shared.process.clock import WallClock

from manylora_router.ledger.log import SEGMENT_BYTES, Log, remove_folder
from manylora_router.ledger.sealing import LogSeals
from manylora_router.ledger.shipping import Shipper, ShippingCounts
from manylora_router.metrics import RouterMetrics

_LOG = logging.getLogger(__name__)
NOTE_S = 1.0
TURN_S = 600.0  # rows that were sent go from the log's disk in about so long, and those of deleted tenants with them
_RETRY_S = 1.0
_NOTES = 256  # in a record, and in a turn of the event loop
_FLUSH_S = 1.0
_CLOSE_S = 5.0
WhenFull = Literal["refuse", "count"]


class Entry:
    """One request's row while it runs. `amounts` tells what it has used by now, in the order of NOTED."""

    __slots__ = ("amounts", "noted", "row")

    def __init__(self, row: UsageRow, amounts: Callable[[], tuple[int, ...]]) -> None:
        self.row = row
        self.amounts = amounts
        self.noted: tuple[int, ...] = ()


class Ledger:
    """`root`: the folder of the logs of all routers of this machine."""

    def __init__(
        self,
        root: Path,
        sink: Sink,
        *,
        router_id: str,
        instance: str,
        clock: WallClock,
        served: Callable[[str], Served],
        prices: PriceList = NO_PRICES,
        max_bytes: int,
        when_full: WhenFull = "refuse",
        seals: LogSeals | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """`instance` names this process among all that ever were. Raises OSError."""
        self.router_id = router_id
        self.served = served
        self.prices = prices
        self._clock = clock
        self._sink = sink
        self._when_full = when_full
        self._entries: dict[str, Entry] = {}
        self._seals = seals or LogSeals(None)
        root.mkdir(parents=True, exist_ok=True)
        self._log = Log(
            root / instance,
            max_bytes=max_bytes,
            seal=self._seals.own,
            standing=self._standing,
            segment_bytes=segment_bytes,
        )
        self._shipper = Shipper(root, self._log, sink, self._seals, prices.priced, "ledger-ship")

    async def start(self) -> None:
        """Waits for the key of its log as long as it takes. Raises OSError."""
        while True:
            try:
                await asyncio.to_thread(self._seals.keep, self._log.folder)
                break
            except (ServiceUnavailable, Unready) as e:
                _LOG.error("the ledger's log cannot be sealed yet: %s", e.message)
                await asyncio.sleep(_RETRY_S)
        self._log.start()
        self._shipper.start()

    @property
    def num_open(self) -> int:
        return len(self._entries)

    @property
    def num_dropped(self) -> int:
        return self._log.num_dropped

    @property
    def counts(self) -> ShippingCounts:
        return self._shipper.counts

    def tell(self, metrics: RouterMetrics) -> None:
        metrics.ledger(
            is_down=self.counts.is_down,
            is_full=self.is_full,
            backlog_bytes=self._shipper.backlog_bytes,
            lost=self.counts.lost,
            dropped=self.num_dropped,
        )

    @property
    def is_full(self) -> bool:
        return self._log.is_full

    def now_unix_s(self) -> float:
        return self._clock.now_unix_s()

    def check_room(self) -> None:
        """Raises ServiceUnavailable."""
        if self._when_full == "refuse" and self._log.is_full:
            raise ServiceUnavailable("the usage ledger has no room for another request's row", retry_after_s=1.0)

    def open(self, row: UsageRow, amounts: Callable[[], tuple[int, ...]]) -> None:
        self._entries[row.request_id] = Entry(row, amounts)
        self._log.append(open_record(row))

    def close(self, row: UsageRow) -> None:
        """Of a request that was opened, or never got a worker. Once."""
        self._entries.pop(row.request_id, None)
        self._log.append(end_record(self.prices.priced(row)))

    async def keep_notes(self) -> None:
        loop = asyncio.get_running_loop()
        turn_at = loop.time() + TURN_S
        while True:
            await asyncio.sleep(NOTE_S)
            if loop.time() >= turn_at:
                self._log.turn()
                turn_at = loop.time() + TURN_S
            entries = list(self._entries.values())
            for first in range(0, len(entries), _NOTES):
                self.note(entries[first : first + _NOTES])
                await asyncio.sleep(0)

    def note(self, entries: Iterable[Entry]) -> None:
        changed: dict[str, Sequence[int]] = {}
        for entry in entries:
            amounts = entry.amounts()
            if amounts != entry.noted and entry.row.request_id in self._entries:
                changed[entry.row.request_id] = entry.noted = amounts
        if changed:
            self._log.append(note_record(self.now_unix_s(), changed))

    def _standing(self) -> Iterable[Sequence[Any]]:
        entries = list(self._entries.values())
        for entry in entries:
            yield open_record(entry.row)
        for first in range(0, len(entries), _NOTES):
            amounts = {entry.row.request_id: entry.amounts() for entry in entries[first : first + _NOTES]}
            yield note_record(self.now_unix_s(), amounts)

    # ---- reading

    async def page(self, query: Query, after: str, limit: int) -> Page:
        await self.flush()
        return await asyncio.to_thread(self._sink.page, query, after, limit)

    async def sums(self, query: Query, by: Sequence[str]) -> list[Sum]:
        await self.flush()
        return await asyncio.to_thread(self._sink.sums, query, by)

    async def flush(self) -> None:
        """Waits a moment until what this router has written is in the sink."""
        number, written = self._log.place
        self._shipper.hurry()
        if not await asyncio.to_thread(self._shipper.wait_shipped, number, written, _FLUSH_S):
            _LOG.warning("the ledger's sink is behind what is read of it")

    async def stop(self) -> None:
        """What is not in the sink by then stays in the log, for the next router of this machine."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        has_ended = self._shipper.close(_CLOSE_S)
        number, written = self._log.place
        is_sent = self._shipper.has_shipped(number, written) and not self._entries
        folder = self._log.folder
        try:
            self._log.close()
            if is_sent:
                remove_folder(folder)
        except OSError as e:
            _LOG.error("the ledger's log: %s", e)
        if has_ended:
            self._sink.close()
