"""The audit log, read out: the heads as etcd has them, and the files of this router and of the others.

Owns how many read it at a time. A head is read before the files, so that these go at least as far.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from manylora.v1 import admin_pb2
from manylora_shared.audit.files import Part, parts_of
from manylora_shared.audit.log import read_heads
from manylora_shared.audit.sealing import PLAIN, EntrySeal
from manylora_shared.coordination.base import Store
from manylora_shared.coordination.records import AuditHeadRecord
from manylora_shared.errors import RpcError
from manylora_shared.transport.base import methods_of
from manylora_shared.transport.places import Places

from manylora_router.links.entrance import KnownCall
from manylora_router.links.other_routers import OtherRouters

_READ = methods_of(admin_pb2.DESCRIPTOR.services_by_name["AdminService"])["ReadAudit"]
_PART_BYTES = 512 << 10
_BEGINS_S = 1.0  # a chain that is begun has a head after that
_MAX_READS = 4
_KEPT_READS = 1


class AuditReader:
    def __init__(self, folder: Path | None, store: Store, others: OtherRouters, seal: EntrySeal = PLAIN) -> None:
        """folder: None: this router keeps no log."""
        self._folder = folder
        self._seal = seal
        self._store = store
        self._others = others
        self._reads = Places(_MAX_READS, kept=_KEPT_READS, few=1)

    @property
    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {"ReadAudit": self.read}

    async def read(
        self, request: admin_pb2.ReadAuditRequest, call: KnownCall
    ) -> AsyncIterator[admin_pb2.ReadAuditResponse]:
        with self._reads.held("who reads the audit log"):
            chains = await self._chains()
            heads = await self._heads(chains)
            if not request.local_only:
                yield admin_pb2.ReadAuditResponse(heads=[_head(each) for _, each in sorted(heads.items())])
            parts = self._parts(chains | set(heads), request.last)
            while self._folder is not None and (part := await asyncio.to_thread(next, parts, None)) is not None:
                yield admin_pb2.ReadAuditResponse(part=part)
            if not request.local_only:
                async for answer in self._elsewhere(request, chains, call.metadata):
                    yield answer

    async def _elsewhere(
        self, request: admin_pb2.ReadAuditRequest, known: set[str], metadata: Mapping[str, str]
    ) -> AsyncIterator[admin_pb2.ReadAuditResponse]:
        """What routers with other folders have. Of one folder that several share the first tells."""
        asked = admin_pb2.ReadAuditRequest(last=request.last, local_only=True)
        seen: dict[str, str] = dict.fromkeys(known, "")
        async for router_id, answer in self._others.streams(_READ, asked, metadata):
            if isinstance(answer, RpcError):
                yield admin_pb2.ReadAuditResponse(silent_router_id=router_id)
            elif seen.setdefault(answer.part.chain, router_id) == router_id:
                yield answer

    async def _chains(self) -> set[str]:
        if self._folder is None:
            return set()
        return {part.chain for part in await asyncio.to_thread(parts_of, self._folder)}

    async def _heads(self, chains: set[str]) -> dict[str, AuditHeadRecord]:
        heads = await read_heads(self._store)
        if chains - set(heads):
            await asyncio.sleep(_BEGINS_S)
            heads = await read_heads(self._store)
        return heads

    def _parts(self, chains: set[str], last: int) -> Iterator[admin_pb2.AuditPart]:
        assert self._folder is not None
        found = [part for part in parts_of(self._folder) if part.chain in chains]
        for _, group in itertools.groupby(found, key=lambda part: part.chain):
            own = list(group)
            yield from self._tail(own[-2:], last) if last else _messages(own)

    def _tail(self, segments: list[Part], last: int) -> Iterator[admin_pb2.AuditPart]:
        """Of two segments: the last one may have only just begun."""
        lines = [(each, line) for each in segments for line in each.path.read_bytes().splitlines(keepends=True)]
        for segment, line in lines[-last:]:
            shown = self._seal.opened(line)
            told = admin_pb2.AuditPart(chain=segment.chain, number=segment.number, data=line)
            if shown != line:
                told.shown = shown
            yield told


def _messages(segments: list[Part]) -> Iterator[admin_pb2.AuditPart]:
    for segment in segments:
        data = segment.path.read_bytes()
        for first in range(0, max(1, len(data)), _PART_BYTES):
            yield admin_pb2.AuditPart(
                chain=segment.chain, number=segment.number, data=data[first : first + _PART_BYTES]
            )


def _head(record: AuditHeadRecord) -> admin_pb2.AuditHead:
    return admin_pb2.AuditHead(
        chain=record.chain,
        seq=record.seq,
        hash=record.hash,
        service=record.service,
        at_unix_s=record.at_unix_s,
        public_key=record.public_key,
        signature=record.signature,
    )
