"""What requests have used, from the cluster's usage ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from manylora_shared.ledger.prices import PRICED, PriceList, Prices
from manylora_shared.ledger.usage import told_of
from manylora_shared.transport.base import methods_of

from manylora.client.caller import DEFAULT_TIMEOUT_S, Caller
from manylora.v1 import admin_pb2, usage_pb2

_GET = methods_of(admin_pb2.DESCRIPTOR.services_by_name["AdminService"])["GetUsage"]


class UsageLedger:
    """For operators' keys, and those of a tenant's admins. Times are of the requests' ends."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def rows(
        self,
        *,
        tenant: str = "",
        since_unix_s: float = 0.0,
        until_unix_s: float = 0.0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> AsyncIterator[dict[str, Any]]:
        """One a request, oldest first. `until_unix_s`: 0: no end; `timeout_s`: of each page."""
        request = usage_pb2.GetUsageRequest(tenant_id=tenant, since_unix_s=since_unix_s, until_unix_s=until_unix_s)
        while True:
            page = await self._caller.call(_GET, request, timeout_s=timeout_s)
            for row in page.rows:
                yield told_of(row, None)
            if not page.after:
                return
            request.after = page.after

    async def unit_prices(
        self, *, since_unix_s: float = 0.0, until_unix_s: float = 0.0, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> PriceList:
        """The versions of the price list in force that are of that time; none: there is no list."""
        request = usage_pb2.GetUsageRequest(unit_prices=True, since_unix_s=since_unix_s, until_unix_s=until_unix_s)
        told = await self._caller.call(_GET, request, timeout_s=timeout_s)
        versions = [
            Prices(each.from_unix_s, each.day, **{name: getattr(each, name) for name in PRICED})
            for each in told.unit_prices
        ]
        return PriceList(told.price_list, told.currency, tuple(versions))

    async def sums(
        self,
        by: Sequence[str],
        *,
        tenant: str = "",
        since_unix_s: float = 0.0,
        until_unix_s: float = 0.0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> tuple[list[dict[str, Any]], str]:
        """One for each value of what is summed by (GetUsageRequest.by; none: one sum of all), and the currency."""
        request = usage_pb2.GetUsageRequest(
            tenant_id=tenant, by=by, total=not by, since_unix_s=since_unix_s, until_unix_s=until_unix_s
        )
        answer = await self._caller.call(_GET, request, timeout_s=timeout_s)
        return [told_of(row, by) for row in answer.rows], answer.currency
