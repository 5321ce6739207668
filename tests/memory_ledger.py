"""The usage ledger of all routers of a simulation, in memory: a row is there as soon as a router writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from manylora_router.metrics import RouterMetrics
from manylora_shared.ledger.compute import Served
from manylora_shared.ledger.prices import NO_PRICES, PriceList
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger.usage import Query, Sum, summed
from manylora_shared.ledger_sinks.base import Page


class MemoryLedger:
    def __init__(self, now_unix_s: Callable[[], float]) -> None:
        self.rows: dict[str, UsageRow] = {}
        self.opened_rows: dict[str, tuple[UsageRow, Callable[[], tuple[int, ...]]]] = {}
        """Those of routers that are gone stay."""
        self.has_room = True
        self.prices = NO_PRICES
        self.now_unix_s = now_unix_s

    def opened(self, router_id: str, served: Callable[[str], Served]) -> RouterLedger:
        return RouterLedger(self, router_id, served)


class RouterLedger:
    def __init__(self, whole: MemoryLedger, router_id: str, served: Callable[[str], Served]) -> None:
        self.router_id = router_id
        self.served = served
        self.now_unix_s = whole.now_unix_s
        self._whole = whole

    @property
    def prices(self) -> PriceList:
        return self._whole.prices

    def check_room(self) -> None:
        return

    def open(self, row: UsageRow, amounts: Callable[[], tuple[int, ...]]) -> None:
        assert row.request_id not in self._whole.opened_rows, "a row was opened twice"
        assert row.request_id not in self._whole.rows, "a row was opened behind its end"
        self._whole.opened_rows[row.request_id] = row, amounts

    def close(self, row: UsageRow) -> None:
        assert row.request_id not in self._whole.rows, "a row was closed twice"
        self._whole.opened_rows.pop(row.request_id, None)
        self._whole.rows[row.request_id] = row

    async def start(self) -> None:
        return

    async def keep_notes(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def page(self, query: Query, after: str, limit: int) -> Page:
        rows = sorted(
            filter(query.takes, self._whole.rows.values()), key=lambda row: (row.ended_unix_s, row.request_id)
        )
        first = int(after or 0)
        return Page(rows[first : first + limit], str(first + limit) if first + limit < len(rows) else "")

    async def sums(self, query: Query, by: Sequence[str]) -> list[Sum]:
        return summed(filter(query.takes, self._whole.rows.values()), by)

    def tell(self, metrics: RouterMetrics) -> None:
        return

    async def stop(self) -> None:
        return
