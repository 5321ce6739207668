"""What operators see and change of the sealing of stores. Owns nothing: keys are the keyring's, files the store's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from manylora.v1 import data_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.encryption.keyring import Keyring
from manylora_shared.errors import ManyloraError, Unready
from manylora_shared.ids import AdapterDigest, TenantId, adapter_uid
from manylora_shared.stores.adapter_files import AdapterFiles
from manylora_shared.stores.documents import Documents
from manylora_shared.telemetry.logs import fields
from manylora_shared.transport.base import Gate, Service

from manylora_router.links.entrance import Entrance, KnownCall

_LOG = logging.getLogger(__name__)
_SERVICE = data_pb2.DESCRIPTOR.services_by_name["DataService"]


class EncryptionDesk:
    def __init__(
        self, entrance: Entrance, store: Store, keyring: Keyring | None, files: AdapterFiles, documents: Documents
    ) -> None:
        self._entrance = entrance
        self._store = store
        self._keyring = keyring
        self._files = files
        self._documents = documents

    def service(self, gate: Gate, more: Mapping[str, Callable[..., Any]]) -> Service:
        """more: the other handlers of DataService."""
        handlers: dict[str, Callable[..., Any]] = {
            "GetEncryption": self.get,
            "RotateEncryption": self.rotate,
            "SealStores": self.seal,
            **more,
        }
        return Service(_SERVICE, self._entrance.guarded(_SERVICE, handlers), gate=gate)

    def _keys(self) -> Keyring:
        """Raises Unready."""
        if self._keyring is None:
            raise Unready("this router has no --encryption, so nothing is sealed")
        return self._keyring

    async def get(self, request: data_pb2.GetEncryptionRequest, call: KnownCall) -> data_pb2.GetEncryptionResponse:
        if self._keyring is None:
            return data_pb2.GetEncryptionResponse()
        found = await asyncio.to_thread(self._keyring.wrapped_by)
        current = await asyncio.to_thread(self._keyring.current)
        return data_pb2.GetEncryptionResponse(on=True, wrapped_by=current, data_keys=found)

    async def rotate(
        self, request: data_pb2.RotateEncryptionRequest, call: KnownCall
    ) -> data_pb2.RotateEncryptionResponse:
        keyring = self._keys()
        await call.will("encryption of all stores")
        # Shielded: one that is begun is ended, whoever asked for it.
        told = await asyncio.shield(asyncio.to_thread(keyring.rotate))
        return data_pb2.RotateEncryptionResponse(wrapped_by=told.by, rewrapped=told.rewrapped, forgotten=told.forgotten)

    async def seal(
        self, request: data_pb2.SealStoresRequest, call: KnownCall
    ) -> AsyncIterator[data_pb2.SealStoresResponse]:
        self._keys()
        await call.will(f"stores of tenant {request.tenant_id}" if request.tenant_id else "stores of all tenants")
        prefix = keys.adapters_of(request.tenant_id) if request.tenant_id else keys.ADAPTERS
        for kv in (await self._store.list(prefix)).kvs:
            try:
                record = AdapterRecord.stored(kv)
            except ValueError:
                continue  # nobody is served it
            for version in record.line.served:
                what, digest = f"adapter {record.name}@{version.number}", AdapterDigest(version.uid)
                problem = await self._seal_adapter(TenantId(record.tenant_id), digest)
                if problem is not None:
                    yield data_pb2.SealStoresResponse(tenant_id=record.tenant_id, what=what, problem=problem)
        for document in await self._documents.held(request.tenant_id):
            try:
                if not await self._documents.seal(document.path):
                    continue
                problem = ""
            except (ManyloraError, OSError) as error:
                problem = str(error)
            what = f"{document.kind}/{document.name}"
            yield data_pb2.SealStoresResponse(tenant_id=document.tenant_id, what=what, problem=problem)

    async def _seal_adapter(self, owner: TenantId, digest: AdapterDigest) -> str | None:
        """What went wrong; None: it was sealed already."""
        incoming = ""
        try:
            if await self._files.is_sealed(adapter_uid(digest, owner)):
                return None
            incoming = await self._files.begin(owner)
            await self._files.copy_plain(incoming, digest)
            if await self._files.finish(incoming) != digest:
                return "its files are not what was registered"
            await self._files.commit(incoming, digest)
            _LOG.info("an adapter is sealed", extra=fields(tenant=owner, adapter=digest))
            return ""
        except (ManyloraError, OSError) as error:
            return str(error)
        finally:
            if incoming:
                await asyncio.shield(self._files.discard(incoming))
