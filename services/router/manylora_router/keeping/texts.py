"""Prompts and answers that tenants' policies keep: scrubbed, sealed with the tenant's key, and gone in time.

Owns what this router has not written yet, bounded by tenant. What is written stands in the adapter store, in segments
of JSON lines; a segment's name begins with the second of its first line.
"""

#     documents/<tenant>/texts/<unix s>-<random>      of one router, WRITE_S at most
#     documents/<tenant>/erasures/<random>            whose texts are to go, and up to when; for ERASURE_S

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from manylora_shared.errors import InternalError, ManyloraError, NotFound
from manylora_shared.ids import TenantId
from manylora_shared.stores.documents import ERASURES, TEXTS, Document, Documents, path_of
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.policy import TenantPolicy

from manylora_router.keeping.scrubbing import scrubbed
from manylora_router.request.tapes import KeptText

_LOG = logging.getLogger(__name__)

WRITE_S = 30.0
LOOK_S = 300.0  # between two looks for what is to go: it goes so late, and WRITE_S, at most
ERASURE_S = 3600.0
MAX_PENDING_CHARS = 4 << 20  # of a tenant
MAX_ALL_PENDING_CHARS = 64 << 20
DAY_S = 86400.0
_LINE_CHARS = 512  # of one, beside its texts


@dataclass
class _Pending:
    texts: list[KeptText] = field(default_factory=list)
    chars: int = 0
    dropped: int = 0  # since it was told last


class TextKeeper:
    """max_bytes: of a tenant, in the store; what would go beyond is not kept, and told."""

    def __init__(
        self,
        documents: Documents,
        *,
        policy_of: Callable[[TenantId], TenantPolicy | None],
        now_unix_s: Callable[[], float],
        getrandbits: Callable[[int], int],
        max_bytes: int,
    ) -> None:
        self._documents = documents
        self._policy_of = policy_of
        self._now_unix_s = now_unix_s
        self._getrandbits = getrandbits
        self._max_bytes = max_bytes
        self._pending: dict[TenantId, _Pending] = {}
        self._chars = 0
        self._locks: WeakValueDictionary[TenantId, asyncio.Lock] = WeakValueDictionary()
        self.dropped = 0

    def take(self, text: KeptText) -> None:
        """Never waits: where there is no room, it is not kept."""
        chars = _LINE_CHARS + len(text.prompt) + sum(map(len, text.answers))
        pending = self._pending.setdefault(text.tenant, _Pending())
        if pending.chars + chars > MAX_PENDING_CHARS or self._chars + chars > MAX_ALL_PENDING_CHARS:
            self._drop(pending, 1)
            return
        pending.texts.append(text)
        pending.chars += chars
        self._chars += chars

    async def run(self) -> None:
        """Writes, and removes what is over, until it is cancelled."""
        loop = asyncio.get_running_loop()
        look_at = loop.time()
        while True:
            await asyncio.sleep(WRITE_S)
            await self.write_all()
            if loop.time() >= look_at:
                look_at = loop.time() + LOOK_S
                try:
                    await self.remove_old()
                except (ManyloraError, OSError) as error:
                    _LOG.warning("kept texts are not looked through this time", extra=fields(error=str(error)))

    async def write_all(self) -> None:
        for tenant in list(self._pending):
            await self._write(tenant)

    async def export(self, tenant: TenantId, user: str = "") -> AsyncIterator[KeptText]:
        """Of one end user; with an empty one of all. Oldest first."""
        await self._write(tenant)
        for segment in await self._segments(tenant):
            for text in await self._read(segment):
                if user in ("", text.user):
                    yield text

    async def erase(self, tenant: TenantId, user: str) -> int:
        """How many of the end user's texts went. What other routers have not written yet goes before they write it."""
        marker = {"user": user, "before_unix_s": self._now_unix_s()}
        name = f"{self._getrandbits(64):016x}"
        await self._documents.put(path_of(tenant, ERASURES, name), json.dumps(marker).encode())
        await self._write(tenant)
        return await self._erase_marked(tenant)

    async def remove_old(self) -> None:
        """What is kept longer than its tenant's policy says, and what was to be erased and another router wrote."""
        now = self._now_unix_s()
        held = [document for document in await self._documents.held() if document.kind in (TEXTS, ERASURES)]
        for tenant in {document.tenant_id for document in held if document.kind == ERASURES}:
            await self._erase_marked(TenantId(tenant))
        for document in held:
            if _began(document) + self._kept_s(document) <= now:
                await self._documents.delete(document.path)

    def _kept_s(self, document: Document) -> float:
        if document.kind == ERASURES:
            return ERASURE_S
        try:
            policy = self._policy_of(TenantId(document.tenant_id))
        except InternalError:  # logged where it was read
            return math.inf
        return policy.security.data_retention_days * DAY_S if policy is not None else 0.0

    # -- segments

    def _lock(self, tenant: TenantId) -> asyncio.Lock:
        return self._locks.setdefault(tenant, asyncio.Lock())

    async def _write(self, tenant: TenantId) -> None:
        async with self._lock(tenant):
            pending = self._pending.pop(tenant, None)
            if pending is None:
                return
            self._chars -= pending.chars
            try:
                policy = self._policy_of(tenant)
                if policy is None or not policy.security.data_retention_days:
                    return
                await self._put(tenant, pending, policy.security.scrub_names)
            except NotFound:
                pass  # the tenant is gone, and its key
            except (ManyloraError, OSError) as error:
                self._drop(pending, len(pending.texts))
                _LOG.warning("texts are not kept", extra=fields(tenant=tenant, error=str(error)))
            if pending.dropped:
                _LOG.warning("texts are not kept", extra=fields(tenant=tenant, dropped=pending.dropped))

    async def _put(self, tenant: TenantId, pending: _Pending, names: tuple[str, ...]) -> None:
        erased = await self._erasures(tenant)
        texts = [text for text in pending.texts if not _is_erased(text, erased)]
        if not texts:
            return
        data = await asyncio.to_thread(_lines, texts, names)
        held = sum(segment.size_bytes for segment in await self._segments(tenant))
        if held + len(data) > self._max_bytes:
            self._drop(pending, len(texts))
            return
        name = f"{int(texts[0].at_unix_s)}-{self._getrandbits(64):016x}"
        await self._documents.put(path_of(tenant, TEXTS, name), data)

    async def _erase_marked(self, tenant: TenantId) -> int:
        count = 0
        async with self._lock(tenant):
            erased = await self._erasures(tenant)
            for segment in await self._segments(tenant):
                texts = await self._read(segment)
                left = [text for text in texts if not _is_erased(text, erased)]
                count += len(texts) - len(left)
                if not left:
                    await self._documents.delete(segment.path)
                elif len(left) < len(texts):
                    await self._documents.put(segment.path, await asyncio.to_thread(_lines, left, None))
        return count

    async def _segments(self, tenant: TenantId) -> list[Document]:
        return sorted(await self._documents.held(tenant, TEXTS), key=lambda each: each.name)

    async def _read(self, segment: Document) -> list[KeptText]:
        try:
            data = await self._documents.get(segment.path)
        except NotFound:
            return []  # its time has come meanwhile
        return await asyncio.to_thread(_texts, TenantId(segment.tenant_id), data)

    async def _erasures(self, tenant: TenantId) -> dict[str, float]:
        """Until when, by end user."""
        found: dict[str, float] = {}
        for document in await self._documents.held(tenant, ERASURES):
            marker = json.loads(await self._documents.get(document.path))
            found[marker["user"]] = max(found.get(marker["user"], 0.0), marker["before_unix_s"])
        return found

    def _drop(self, pending: _Pending, count: int) -> None:
        pending.dropped += count
        self.dropped += count


def _is_erased(text: KeptText, erased: dict[str, float]) -> bool:
    return text.at_unix_s <= erased.get(text.user, 0.0)


def _began(document: Document) -> float:
    second = document.name.partition("-")[0]
    return float(second) if document.kind == TEXTS and second.isdecimal() else document.changed_unix_s


def _lines(texts: Sequence[KeptText], names: tuple[str, ...] | None) -> bytes:
    """names: None: they are scrubbed already."""
    lines = []
    for text in texts:
        values = dataclasses.asdict(text)
        del values["tenant"]
        if names is not None:
            values["prompt"] = scrubbed(text.prompt, names)
            values["answers"] = [scrubbed(answer, names) for answer in text.answers]
        lines.append(json.dumps(values))
    return "".join(f"{line}\n" for line in lines).encode()


def _texts(tenant: TenantId, data: bytes) -> list[KeptText]:
    found = [json.loads(line) for line in data.splitlines()]
    return [KeptText(tenant=tenant, **{**values, "answers": tuple(values["answers"])}) for values in found]
