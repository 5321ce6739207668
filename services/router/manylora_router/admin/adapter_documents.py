"""What AdminService tells and keeps of adapters beside their registrations: samples, reports, and versions' files.

Owns how many files are read out, and how many sets of samples are taken in, at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from weakref import WeakValueDictionary

from manylora.v1 import admin_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.errors import InvalidRequest, NotFound, Overloaded
from manylora_shared.ids import AdapterDigest, TenantId, adapter_uid, is_valid_name, name_problem
from manylora_shared.stores.documents import SAMPLES, Document, Documents, path_of
from manylora_shared.tenancy.adapter_line import AdapterVersion
from manylora_shared.transport.places import Places

from manylora_router.admin.validation import AdapterValidation
from manylora_router.links.entrance import KnownCall
from manylora_router.links.wire import adapter_info

MAX_SAMPLE_SETS = 32  # of a tenant
_MAX_READS = 8  # of one router, at a time
_KEPT_READS = 2
_MAX_PUTS = 16
_KEPT_PUTS = 8


class AdapterDocuments:
    def __init__(self, store: Store, documents: Documents, validation: AdapterValidation) -> None:
        self._store = store
        self._documents = documents
        self._validation = validation
        self._reads = Places(_MAX_READS, kept=_KEPT_READS, few=1)
        self._putting = Places(_MAX_PUTS, kept=_KEPT_PUTS, few=1)
        self._puts: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # a tenant's, one by one

    @property
    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {
            "PutSamples": self.put_samples,
            "ListSamples": self.list_samples,
            "RemoveSamples": self.remove_samples,
            "GetAdapterReport": self.report,
            "ReadAdapter": self.read,
        }

    async def put_samples(self, request: admin_pb2.PutSamplesRequest, call: KnownCall) -> admin_pb2.PutSamplesResponse:
        tenant_id = await self._tenant(request.tenant_id, call)
        if problem := name_problem(request.name):
            raise InvalidRequest.of("name", problem)
        with self._putting.held(f"tenant {tenant_id} that put samples"):
            count = len(await self._validation.parsed(tenant_id, request.samples))
            async with self._puts.setdefault(tenant_id, asyncio.Lock()):
                found = await self._put(tenant_id, request.name, request.samples, call)
        told = _info(found) if found is not None else admin_pb2.SamplesInfo(name=request.name)
        told.count = count
        return admin_pb2.PutSamplesResponse(samples=told)

    async def _put(self, tenant_id: str, name: str, samples: bytes, call: KnownCall) -> Document | None:
        """None: it has been removed since. Raises Overloaded."""
        full = Overloaded(f"name: the tenant has {MAX_SAMPLE_SETS} sets of samples, as many as it may have")
        held = {each.name for each in await self._documents.held(tenant_id, SAMPLES)}
        if name not in held and len(held) >= MAX_SAMPLE_SETS:
            raise full
        path = path_of(tenant_id, SAMPLES, name)
        before = await self._documents.get(path) if name in held else None
        await call.will(f"samples {tenant_id}/{name}", before, samples)
        await self._documents.put(path, samples)
        after = {each.name: each for each in await self._documents.held(tenant_id, SAMPLES)}
        if name not in held and len(after) > MAX_SAMPLE_SETS:
            await self._documents.delete(path)  # another router took the last place at the same time
            raise full
        return after.get(name)

    async def list_samples(
        self, request: admin_pb2.ListSamplesRequest, call: KnownCall
    ) -> admin_pb2.ListSamplesResponse:
        tenant_id = await self._tenant(request.tenant_id, call)
        found = await self._documents.held(tenant_id, SAMPLES)
        return admin_pb2.ListSamplesResponse(samples=[_info(each) for each in found])

    async def remove_samples(
        self, request: admin_pb2.RemoveSamplesRequest, call: KnownCall
    ) -> admin_pb2.RemoveSamplesResponse:
        tenant_id = await self._tenant(request.tenant_id, call)
        if request.name not in {each.name for each in await self._documents.held(tenant_id, SAMPLES)}:
            raise NotFound(f"name: the tenant has no samples {request.name[:80]!r}")
        path = path_of(tenant_id, SAMPLES, request.name)
        await call.will(f"samples {tenant_id}/{request.name}", await self._documents.get(path))
        await self._documents.delete(path)
        return admin_pb2.RemoveSamplesResponse()

    async def report(
        self, request: admin_pb2.GetAdapterReportRequest, call: KnownCall
    ) -> admin_pb2.GetAdapterReportResponse:
        tenant_id = await self._tenant(request.tenant_id, call)
        record = await self._record(tenant_id, request.name)
        wanted = request.number or record.line.versions[-1].number
        version = _only([each for each in record.line.versions if each.number == wanted], request.number)
        data = await self._validation.report(tenant_id, version)
        return admin_pb2.GetAdapterReportResponse(adapter=adapter_info(record.at(version)), report=data)

    async def read(
        self, request: admin_pb2.ReadAdapterRequest, call: KnownCall
    ) -> AsyncIterator[admin_pb2.ReadAdapterResponse]:
        tenant_id = await self._tenant(request.tenant_id, call)
        record = await self._record(tenant_id, request.name)
        wanted = request.number or record.number
        version = _only([each for each in record.line.served if each.number == wanted], request.number)
        with self._reads.held(f"tenant {tenant_id} that read adapters"):
            await call.will(f"weights of adapter {tenant_id}/{request.name}@{version.number}")
            yield admin_pb2.ReadAdapterResponse(adapter=adapter_info(record.at(version)))
            uid = adapter_uid(AdapterDigest(version.uid), TenantId(tenant_id))
            async for name, data in self._documents.adapter(uid):
                yield admin_pb2.ReadAdapterResponse(chunk=admin_pb2.FileChunk(file_name=name, data=data))

    async def _tenant(self, named: str, call: KnownCall) -> str:
        """That there is. Raises PermissionDenied, NotFound."""
        tenant_id = call.principal.require_tenant(named)
        if not tenant_id:
            raise InvalidRequest.of("tenant_id", "is missing")
        if not is_valid_name(tenant_id) or await self._store.get(keys.tenant(tenant_id)) is None:
            raise NotFound(f"tenant_id: tenant {tenant_id[:80]!r} is not known")
        return tenant_id

    async def _record(self, tenant_id: str, name: str) -> AdapterRecord:
        stored = await self._store.get(keys.adapter(tenant_id, name)) if is_valid_name(name) else None
        if stored is None:
            raise NotFound(f"name: adapter {name[:80]!r} is not known to this tenant")
        try:
            return AdapterRecord.stored(stored)
        except ValueError as e:
            raise InvalidRequest.of("name", "its record cannot be read; remove the adapter and add it again") from e


def _only(found: list[AdapterVersion], number: int) -> AdapterVersion:
    if not found:
        raise NotFound(f"number: version {number} is none of this adapter, or is retired or rejected")
    return found[0]


def _info(document: Document) -> admin_pb2.SamplesInfo:
    return admin_pb2.SamplesInfo(
        name=document.name, size_bytes=document.size_bytes, changed_unix_s=document.changed_unix_s
    )
