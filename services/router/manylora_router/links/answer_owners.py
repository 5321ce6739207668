"""Which router has an idempotency key: a record in the store a key.

    none --claim--> claimed --its work begins--> begun --its answer is forgotten--> none
                                                   begun --its router hands over--> left --claim--> claimed

A record outlives its router, by LEASE_S at most. Another router takes over what one that is gone had claimed, and does
not do again what that had begun: it may be charged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, Delete, LeaseExpired, Put, Store, StoreUnavailable
from manylora_shared.coordination.records import AnswerRecord, RouterRecord
from manylora_shared.errors import AnsweredElsewhere, AnswerLost, ServiceUnavailable
from manylora_shared.transport.places import Places

_LOG = logging.getLogger(__name__)
_TRIES = 4
_TIMEOUT_S = 2.0
LEASE_S = 900
LASTS_S = LEASE_S * 2 // 3  # for so long a record stands at least, after its router's end
ASKING = 128  # calls whose claims are under way: each claim asks the store twice
_ASKING_KEPT = 32
_PARTS_AT_ONCE = 4  # of one call that claim: the others wait for their turn

T = TypeVar("T")


@dataclass(frozen=True)
class Owner:
    """Another router, as it has registered itself."""

    record: RouterRecord

    @property
    def told(self) -> AnsweredElsewhere:
        who = self.record.router_id
        return AnsweredElsewhere(f"idempotency-key: router {who} has it, and is not reached now", retry_after_s=1.0)


class Claim(NamedTuple):
    revision: int  # of the record, which is this router's
    charged_tokens: int  # of the answer, with its prompt, by routers that were stopped


class _Parts:  # of one call, whose claims are under way
    def __init__(self) -> None:
        self.count = 0
        self.turns = asyncio.Semaphore(_PARTS_AT_ONCE)


class AnswerOwners:
    def __init__(self, store: Store, router_id: str, started_unix_s: float) -> None:
        self._store = store
        self._router_id = router_id
        self._started_unix_s = started_unix_s
        self._asking = Places(ASKING, kept=_ASKING_KEPT, few=8)
        self._parts: dict[tuple[str, str], _Parts] = {}  # by tenant and call
        self._lease_id = 0
        self._granting = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None

    async def claim(
        self, tenant: str, digest: str, request_id: str, *, takes_over: bool = False, call: str = ""
    ) -> Owner | Claim:
        """The other router that has the key; or this one has it then.

        takes_over: whoever has it, and however far that is: the caller has a part of the answer.
        call: that this is a part of.

        Raises AnswerLost; ServiceUnavailable; or Overloaded where the tenant asks too often at once.
        """

        async def found() -> Owner | Claim:
            for _ in range(_TRIES):
                if (owner := await self._try(tenant, digest, request_id, takes_over)) is not None:
                    return owner
            raise StoreUnavailable("too many want it")

        async with self._turn(tenant, call or digest):
            return await self._in_time(found)

    async def request_of(self, tenant: str, digest: str) -> str:
        """The id of the request that another router has under the key; empty: there is none. Raises as `claim`."""

        async def found() -> str:
            kv = await self._store.get(keys.answer(tenant, digest))
            known = AnswerRecord.stored(kv) if kv is not None else None
            return known.request_id if known is not None and await self._living(known) is not None else ""

        with self._asking.held(_account_of(tenant)):
            return await self._in_time(found)

    @asynccontextmanager
    async def _turn(self, tenant: str, call: str) -> AsyncIterator[None]:
        """Raises Overloaded."""
        # All parts of a call have one place, or none of them: a part that is refused would be the end of the others.
        parts = self._parts.get((tenant, call))
        if parts is None:
            self._asking.enter(_account_of(tenant))
            parts = self._parts[tenant, call] = _Parts()
        parts.count += 1
        try:
            async with parts.turns:
                yield
        finally:
            parts.count -= 1
            if not parts.count:
                del self._parts[tenant, call]
                self._asking.leave(_account_of(tenant))

    async def begin(self, tenant: str, digest: str, request_id: str, claim: Claim) -> int:
        """The record says that the work has begun. Returns its revision. Raises AnsweredElsewhere: another router took
        it meanwhile; or ServiceUnavailable."""
        record = self._record(tenant, digest, request_id, has_begun=True, charged_tokens=claim.charged_tokens)
        return await self._in_time(lambda: self._put(record, claim.revision))

    async def leave(
        self, tenant: str, digest: str, request_id: str, revision: int, charged_tokens: int, *, is_whole: bool
    ) -> None:
        """To the next router that is asked, as this one is stopped. is_whole: who has no part of the answer is told
        that it is lost. Raises as `begin`.
        """
        record = self._record(tenant, digest, request_id, has_begun=is_whole, charged_tokens=charged_tokens)
        if not is_whole:
            record = replace(record, router_id="")
        await self._in_time(lambda: self._put(record, revision))

    async def release(self, tenant: str, digest: str, revision: int) -> None:
        """Only what is of `revision`. Where the store is away it stands until its lease ends."""
        key = keys.answer(tenant, digest)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._store.txn([Compare(key, revision)], [Delete(key)])
        except (StoreUnavailable, TimeoutError) as e:
            _LOG.info("an idempotency key's record stays for now: %s", e)

    async def close(self) -> None:
        """Its records stay."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])

    def _record(
        self, tenant: str, digest: str, request_id: str, *, has_begun: bool, charged_tokens: int
    ) -> AnswerRecord:
        own = (self._router_id, self._started_unix_s)
        return AnswerRecord(tenant, digest, *own, request_id, has_begun, charged_tokens)

    async def _put(self, record: AnswerRecord, revision: int) -> int:
        """In place of that revision. Returns its own. Raises AnsweredElsewhere."""
        operation = Put(record.key, record.to_json(), lease_id=await self._lease())
        result = await self._store.txn([Compare(record.key, revision)], [operation])
        if not result.succeeded:
            raise AnsweredElsewhere("idempotency-key: another router took it meanwhile", retry_after_s=1.0)
        return result.revision

    async def _try(self, tenant: str, digest: str, request_id: str, takes_over: bool) -> Owner | Claim | None:
        """None: somebody was faster."""
        key = keys.answer(tenant, digest)
        kv = await self._store.get(key)
        known = AnswerRecord.stored(kv) if kv is not None else None
        if known is not None and not takes_over and not self._is_own(known):
            if (router := await self._living(known)) is not None:
                return Owner(router)
            if known.has_begun:
                gone = f"idempotency-key: router {known.router_id}, which had begun its work, is gone with the answer"
                raise AnswerLost(f"{gone}; another key does the work again")
        # One of this router's own that it does not know is about to be released.
        has_begun = takes_over and known is not None and known.has_begun
        charged = known.charged_tokens if known is not None and not self._is_own(known) else 0
        record = self._record(tenant, digest, request_id, has_begun=has_begun, charged_tokens=charged)
        put = Put(key, record.to_json(), lease_id=await self._lease())
        result = await self._store.txn([Compare(key, kv.mod_revision if kv is not None else 0)], [put])
        return Claim(result.revision, charged) if result.succeeded else None

    def _is_own(self, record: AnswerRecord) -> bool:
        own = (self._router_id, self._started_unix_s)
        return (record.router_id, record.router_started_unix_s) == own

    async def _living(self, record: AnswerRecord) -> RouterRecord | None:
        """The record's router, unless it is gone or began anew."""
        if record.router_id in ("", self._router_id):
            return None
        kv = await self._store.get(keys.router(record.router_id))
        router = RouterRecord.stored(kv) if kv is not None else None
        return router if router is not None and router.started_unix_s == record.router_started_unix_s else None

    async def _lease(self) -> int:
        async with self._granting:
            if not self._lease_id:
                self._lease_id = await self._store.grant(LEASE_S)
                if self._keeping is not None:
                    self._keeping.cancel()
                self._keeping = asyncio.create_task(self._keep(self._lease_id), name="lease of idempotency keys")
            return self._lease_id

    async def _keep(self, lease_id: int) -> None:
        while True:
            await asyncio.sleep(LEASE_S - LASTS_S)
            try:
                await self._store.keep_alive(lease_id)
            except LeaseExpired:
                _LOG.warning("the lease of idempotency keys is lost: what had them is done again")
                self._lease_id = 0 if self._lease_id == lease_id else self._lease_id
                return
            except StoreUnavailable as e:
                _LOG.warning("the lease of idempotency keys is not renewed this time: %s", e)

    async def _in_time(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Raises ServiceUnavailable where the store does not answer."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await ask()
        except (StoreUnavailable, LeaseExpired, TimeoutError) as e:
            if isinstance(e, LeaseExpired):
                self._lease_id = 0
            _LOG.warning("who has an idempotency key is not known: %s", e)
        raise ServiceUnavailable("idempotency-key: who has it cannot be found out now", retry_after_s=1.0)


def _account_of(tenant: str) -> str:
    return f"tenant {tenant} for its idempotency keys"
