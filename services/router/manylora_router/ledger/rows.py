"""The seam between requests and the usage ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from manylora_shared.ledger.compute import Served
from manylora_shared.ledger.prices import PriceList
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger.usage import Query, Sum
from manylora_shared.ledger_sinks.base import Page

from manylora_router.metrics import RouterMetrics


class Rows(Protocol):
    """Calls neither wait nor fail."""

    router_id: str

    def served(self, pool: str) -> Served: ...

    def now_unix_s(self) -> float: ...

    def check_room(self) -> None:
        """Raises ServiceUnavailable where no further request is to begin."""
        ...

    def open(self, row: UsageRow, amounts: Callable[[], tuple[int, ...]]) -> None:
        """amounts: what the request has used by now, in the order of records.NOTED."""
        ...

    def close(self, row: UsageRow) -> None:
        """Of a request that was opened, or never got a worker. Once."""
        ...


class UsageLedger(Rows, Protocol):
    """`start` it before the first row, `stop` it behind the last."""

    @property
    def prices(self) -> PriceList: ...

    async def start(self) -> None: ...

    async def keep_notes(self) -> None:
        """For ever."""
        ...

    async def page(self, query: Query, after: str, limit: int) -> Page:
        """Raises ServiceUnavailable, InvalidRequest."""
        ...

    async def sums(self, query: Query, by: Sequence[str]) -> list[Sum]:
        """Raises ServiceUnavailable."""
        ...

    def tell(self, metrics: RouterMetrics) -> None:
        """What stands."""
        ...

    async def stop(self) -> None: ...


class NoRows:
    """There is no ledger."""

    router_id = ""

    def served(self, pool: str) -> Served:
        return Served()

    def now_unix_s(self) -> float:
        return 0.0

    def check_room(self) -> None:
        return

    def open(self, row: UsageRow, amounts: Callable[[], tuple[int, ...]]) -> None:
        return

    def close(self, row: UsageRow) -> None:
        return
