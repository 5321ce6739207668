"""Reading the usage ledger: GetUsage, and so GET /v1/usage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from manylora.v1 import usage_pb2
from manylora_shared.errors import InvalidRequest, Unready
from manylora_shared.ledger.prices import PRICED, PriceList
from manylora_shared.ledger.row import COLUMNS, UsageRow
from manylora_shared.ledger.usage import GROUPS, Query, Sum, groups_of

from manylora_router.ledger.rows import UsageLedger
from manylora_router.links.entrance import KnownCall
from manylora_router.links.loop_turns import PoolTurns

MAX_ROWS = 1_000
MAX_READS = 2  # at a time: a month's sums hold a thread, and threads are shared with all else that blocks
_FLOATS = {"kv_byte_seconds", "adapter_byte_seconds", "prefill_flops", "decode_flops"}
_WORDS = {"day": "day", "month": "month"}  # GROUPS has the time that they are of


class UsageDesk:
    """ledger: None: this router keeps none."""

    def __init__(self, ledger: UsageLedger | None) -> None:
        self._ledger = ledger
        self._turns = PoolTurns(MAX_READS)

    @property
    def has_prices(self) -> bool:
        return self._ledger is not None and bool(self._ledger.prices.versions)

    @property
    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {"GetUsage": self.get_usage}

    async def get_usage(self, request: usage_pb2.GetUsageRequest, call: KnownCall) -> usage_pb2.GetUsageResponse:
        tenant = call.principal.require_tenant(request.tenant_id)
        by = groups_of(request.by)
        if request.limit > MAX_ROWS:
            raise InvalidRequest.of("limit", f"must be at most {MAX_ROWS}")
        if self._ledger is None:
            raise Unready("this cluster keeps no usage ledger (--ledger)")
        if request.unit_prices:
            return _unit_prices(self._ledger.prices, request)
        query = Query(tenant, request.since_unix_s, request.until_unix_s or None)
        currency = self._ledger.prices.currency
        async with self._turns.hold((call.principal.tenant_id or "", None), 1, 1):
            if by or request.total:
                sums = await self._ledger.sums(query, by)
                return usage_pb2.GetUsageResponse(rows=[_of_sum(each) for each in sums], currency=currency)
            page = await self._ledger.page(query, request.after, request.limit or MAX_ROWS)
        return usage_pb2.GetUsageResponse(rows=[_of_row(row) for row in page.rows], after=page.after, currency=currency)


def _unit_prices(prices: PriceList, request: usage_pb2.GetUsageRequest) -> usage_pb2.GetUsageResponse:
    found = prices.between(request.since_unix_s, request.until_unix_s or None)
    told = [
        usage_pb2.UnitPrices(
            day=each.day, from_unix_s=each.from_unix_s, **{name: getattr(each, name) for name in PRICED}
        )
        for each in found
    ]
    return usage_pb2.GetUsageResponse(currency=prices.currency, price_list=prices.name, unit_prices=told)


def _of_row(row: UsageRow) -> usage_pb2.UsageRow:
    values = dict(zip(COLUMNS, row.values(), strict=True))
    return usage_pb2.UsageRow(requests=1, **values | {"degraded": int(row.degraded)})


def _of_sum(each: Sum) -> usage_pb2.UsageRow:
    words: Mapping[str, Any] = {_WORDS.get(name) or GROUPS[name]: value for name, value in each.group.items()}
    totals: Mapping[str, Any] = {n: float(v) if n in _FLOATS else v for n, v in each.totals.items()}
    return usage_pb2.UsageRow(**words, **totals)
