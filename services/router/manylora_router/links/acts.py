"""What the router tells the audit log: acts before they take effect and how they ended, and calls that were refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol

from manylora_shared.audit.entries import COUNTED, Entry, digest
from manylora_shared.errors import Overloaded
from manylora_shared.process.clock import WallClock
from manylora_shared.tenancy.identity import Principal, host_of
from manylora_shared.tenancy.quota import TokenBucket, to_ns

from manylora_router.guard.denials import COUNT_S, Denials

ACTS_PER_S = 2  # of a tenant
ACTS_BURST = 120
_MAX_TENANTS = 4_096


class Log(Protocol):
    """Of manylora_shared.audit.log.AuditLog."""

    async def write(self, entry: Entry) -> None: ...

    def note(self, entry: Entry) -> None: ...


class Acts:
    """log: None: nothing is kept."""

    def __init__(self, log: Log | None, clock: WallClock) -> None:
        self._log = log
        self._clock = clock
        self._denials = Denials()
        self._rates: dict[str, TokenBucket] = {}

    def of_call(self, action: str, principal: Principal, peer: str, request_id: str) -> Entry:
        """What all entries of a call have alike."""
        return Entry(
            at_unix_s=0.0,
            action=action,
            outcome="",
            who=principal.key_id or f"token:{principal.subject}",
            may=principal.role or ",".join(principal.scopes),
            tenant=principal.tenant_id or "",
            peer=host_of(peer),
            request=request_id,
        )

    async def intend(self, act: Entry, target: str, before: bytes | None, after: bytes | None) -> None:
        """Returns when it is in the log. Raises NotAudited, or Overloaded where a tenant's acts are too many."""
        if self._log is not None:
            self._check_rate(act.tenant)
            told = replace(act, target=target, before=digest(before), after=digest(after))
            await self._log.write(self._now(told, "intent"))

    async def own(self, action: str, target: str, after: bytes) -> None:
        """What the router does by itself. Returns when it is in the log; raises NotAudited."""
        if self._log is not None:
            told = Entry(at_unix_s=0.0, action=action, outcome="", who="router", target=target, after=digest(after))
            await self._log.write(self._now(told, "told"))

    def ended(self, act: Entry, target: str, failure: str = "") -> None:
        if self._log is not None:
            told = replace(act, target=target, detail=failure)
            self._log.note(self._now(told, "failed" if failure else "done"))

    def denied(self, act: Entry, target: str = "") -> None:
        now = asyncio.get_running_loop().time()
        account = f"tenant {act.tenant}" if act.tenant else f"key {act.who}"
        if self._log is not None and self._denials.is_told(account, act.peer, now):
            self._log.note(self._now(replace(act, target=target), "denied"))

    def stranger(self, host: str) -> None:
        """Came without a valid key."""
        if self._log is not None:
            self._denials.count(host, asyncio.get_running_loop().time())

    async def keep_counting(self) -> None:
        """Ends by cancellation."""
        while True:
            await asyncio.sleep(COUNT_S / 4)
            self.tell_counts()

    def tell_counts(self, *, is_last: bool = False) -> None:
        counted = self._denials.counted(asyncio.get_running_loop().time(), is_last=is_last)
        if counted and self._log is not None:
            self._log.note(self._now(Entry(at_unix_s=0.0, action=COUNTED, outcome="", detail=counted), "denied"))

    def _now(self, entry: Entry, outcome: str) -> Entry:
        return replace(entry, at_unix_s=round(self._clock.now_unix_s(), 3), outcome=outcome)

    def _check_rate(self, tenant: str) -> None:
        if not tenant:
            return
        now_ns = to_ns(asyncio.get_running_loop().time())
        bucket = self._rates.pop(tenant, None)
        if bucket is None:
            bucket = TokenBucket(ACTS_PER_S, ACTS_BURST, now_ns, level=ACTS_BURST)
            if len(self._rates) >= _MAX_TENANTS:
                del self._rates[next(iter(self._rates))]  # who acted last the longest ago
        self._rates[tenant] = bucket
        if wait_ns := bucket.wait_ns(1, now_ns):
            told = f"no more than {ACTS_PER_S} acts a second of a tenant go into the audit log, {ACTS_BURST} at once"
            raise Overloaded(told, retry_after_s=wait_ns / 1e9)
        bucket.take(1, now_ns)
