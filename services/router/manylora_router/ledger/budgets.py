"""What tenants may spend in a month (`quotas.monthly_spend`), and what the ledger says that they have spent.

Owns the sums of the running month. What ended of late is read again every LOOK_S, and what runs goes on to its end:
a tenant may spend more than its cap by what it used since the last look and by what it has running then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from manylora_shared.errors import QuotaBreach, QuotaExceeded, ServiceUnavailable
from manylora_shared.ids import TenantId
from manylora_shared.ledger.row import NANOS
from manylora_shared.ledger.usage import Query, month_of
from manylora_shared.tenancy.policy import TenantPolicy

from manylora_router.ledger.rows import UsageLedger

_LOG = logging.getLogger(__name__)
LOOK_S = 10.0
_WHOLE_S = 600.0  # between two readings of the whole month: rows of routers that come back late are found then
_WARN_S = 600.0
_LATE_S = 30.0  # other routers' rows are in the ledger by then


class Budgets:
    """ledger: None: this router keeps none. capped: the tenants whose policies have a cap."""

    def __init__(self, ledger: UsageLedger | None, capped: Callable[[], Iterable[TenantId]]) -> None:
        self._ledger = ledger
        self._capped = capped
        self._begin = 0.0  # of the month that `_spent` is of
        self._spent: Counter[str] = Counter()  # by tenant, in billionths of the currency
        self._settled: Counter[str] = Counter()  # of that, what ended before `_until`
        self._until = 0.0
        self._warned_at = -_WARN_S

    @property
    def without_effect(self) -> int:
        """How many caps this router cannot hold, for it counts nothing or knows no price."""
        if self._ledger is not None and self._ledger.prices.versions:
            return 0
        return sum(1 for _ in self._capped())

    async def run(self) -> None:
        """For ever."""
        while True:
            self._warn(asyncio.get_running_loop().time())
            await self.look()
            await asyncio.sleep(LOOK_S)

    def _warn(self, now: float) -> None:
        count = self.without_effect
        if count and now - self._warned_at >= _WARN_S:
            lacks = "usage ledger (--ledger)" if self._ledger is None else "price list (--prices)"
            _LOG.warning("quotas.monthly_spend of %d tenants has no effect: this router has no %s", count, lacks)
            self._warned_at = now

    async def look(self) -> None:
        """While the ledger cannot be read, the sums of before hold."""
        if self._ledger is None or not any(self._capped()):
            return
        now = self._ledger.now_unix_s()
        begin, end = month_of(now)
        settled, until = self._settled, self._until
        try:
            if begin != self._begin or now - until >= _WHOLE_S:
                until = max(begin, now - _LATE_S)
                settled = await self._sums(self._ledger, begin, until)
            spent = settled + await self._sums(self._ledger, until, end)
        except ServiceUnavailable as e:
            _LOG.warning("what tenants spend cannot be read: %s", e.message)
            return
        self._begin, self._until, self._settled, self._spent = begin, until, settled, spent

    async def _sums(self, ledger: UsageLedger, since: float, until: float) -> Counter[str]:
        sums = await ledger.sums(Query("", since, until), ("tenant",))
        return Counter({each.group["tenant"]: each.totals["price_nanos"] for each in sums})

    def check(self, policy: TenantPolicy) -> None:
        """Raises QuotaExceeded where the month's cap is spent."""
        cap = policy.quotas.monthly_spend
        spent = self._spent[policy.tenant_id]
        if cap is None or self._ledger is None or spent < cap * NANOS:
            return
        now = self._ledger.now_unix_s()
        begin, end = month_of(now)
        if begin == self._begin:
            told = f"{spent / NANOS:.2f} of {cap} {self._ledger.prices.currency} are spent until the month (UTC) ends"
            breach = QuotaBreach("quotas.monthly_spend", policy.tenant_id, cap, told)
            raise QuotaExceeded(f"quotas.monthly_spend: {told}", retry_after_s=end - now, breaches=[breach])
