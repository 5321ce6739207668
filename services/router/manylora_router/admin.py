"""AdminService: tenants, keys, adapters, status.

Owns the uploads that run now. Every change of the store is one transaction guarded by what was read before it, so that
routers do not overwrite one another. An adapter becomes known only when its files stand in the adapter store and are
validated; whatever fails before that leaves nothing behind. Each handler first asks whether the caller's key permits
the call, before it looks anything up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Sequence

from manylora.v1 import admin_pb2, scheduler_pb2, worker_pb2
from manylora_shared.adapter_files import AdapterFiles
from manylora_shared.adapter_shares import pins_problem
from manylora_shared.clock import WallClock
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, Delete, KeyValue, Put, Store
from manylora_shared.coordination.records import AdapterRecord, KeyRecord
from manylora_shared.errors import (
    AlreadyExists,
    Code,
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RpcError,
    ServiceUnavailable,
    VersionConflict,
)
from manylora_shared.identity import TENANT_SCOPES, Principal, Scope, authenticate, new_key, permission_denied
from manylora_shared.ids import NAME_PATTERN, AdapterUid, TenantId, is_valid_name
from manylora_shared.logs import fields
from manylora_shared.policy import TenantPolicy, line_of, parse_policy
from manylora_shared.transport.base import ServerCall, Service, Transport, methods_of

from manylora_router.channels import WorkerChannels
from manylora_router.directory import Directory
from manylora_router.levels import ServiceLevels
from manylora_router.scheduler_client import GET_STATUS

_LOG = logging.getLogger(__name__)
_VALIDATE_ADAPTER = methods_of(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])["ValidateAdapter"]

MAX_UPLOADS = 8
"""Adapters that one router takes in at a time."""
UPLOAD_IDLE_S = 60.0
"""An upload that sends nothing for so long is given up."""
_VALIDATE_TIMEOUT_S = 300.0
_STATUS_TIMEOUT_S = 2.0
_MAX_CONFLICTS = 8
"""Times that a change is tried again because somebody else changed the same key."""
_POLICIES_AT_ONCE = 32
"""Policies that are parsed before others have their turn on the event loop."""
_DELETE_BATCH = 100
"""Keys deleted in one transaction, well inside the store's bound."""


class AdminServicer:
    def __init__(
        self,
        *,
        directory: Directory,
        store: Store,
        files: AdapterFiles,
        channels: WorkerChannels,
        transport: Transport,
        levels: ServiceLevels,
        clock: WallClock,
        rng: random.Random,
    ) -> None:
        self._directory = directory
        self._store = store
        self._files = files
        self._channels = channels
        self._transport = transport
        self._levels = levels
        self._clock = clock
        self._rng = rng
        self._num_uploads = 0

    def service(self) -> Service:
        return Service(
            admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
            {
                "ApplyTenant": self.apply_tenant,
                "GetTenant": self.get_tenant,
                "ListTenants": self.list_tenants,
                "DeleteTenant": self.delete_tenant,
                "AddAdapter": self.add_adapter,
                "ListAdapters": self.list_adapters,
                "RemoveAdapter": self.remove_adapter,
                "CreateKey": self.create_key,
                "ListKeys": self.list_keys,
                "RevokeKey": self.revoke_key,
                "GetStatus": self.get_status,
            },
        )

    @property
    def num_uploads(self) -> int:
        return self._num_uploads

    def _caller(self, call: ServerCall) -> Principal:
        """Raises Unauthenticated."""
        return authenticate(call.metadata, self._directory.key_of)

    # Tenants

    async def apply_tenant(
        self, request: admin_pb2.ApplyTenantRequest, call: ServerCall
    ) -> admin_pb2.ApplyTenantResponse:
        self._caller(call).require(Scope.OPERATOR)
        policy = parse_policy(request.policy_yaml)
        if (problem := await self._pins_problem(policy)) is not None:
            line = line_of(request.policy_yaml, "adapters.pin")
            raise InvalidRequest.of("adapters.pin", f"line {line}: {problem}")
        key, value = keys.tenant(policy.tenant_id), policy.to_yaml().encode()
        for _ in range(_MAX_CONFLICTS):
            stored = await self._store.get(key)
            version = stored.version if stored is not None else 0
            if request.HasField("expected_version") and request.expected_version != version:
                raise _changed_meanwhile(policy.tenant_id, version, request.expected_version)
            answer = admin_pb2.ApplyTenantResponse(
                tenant_id=policy.tenant_id,
                version=version,
                policy_yaml=value.decode(),
                previous_policy_yaml=stored.value.decode() if stored is not None else "",
            )
            if request.validate_only or (stored is not None and stored.value == value):
                return answer
            before = stored.mod_revision if stored is not None else 0
            result = await self._store.txn([Compare(key, before)], [Put(key, value)])
            if result.succeeded:
                await self._directory.tenant_seen(policy.tenant_id, result.revision)
                answer.version = version + 1
                return answer
        raise _conflict()

    async def _pins_problem(self, policy: TenantPolicy) -> str | None:
        """Why the policy's pins cannot be kept, as far as is known here; None: nothing speaks against them."""
        directory = self._directory
        capacities = [w.device_adapter_bytes for w in directory.workers.values() if w.device_adapter_bytes]
        if not policy.pinned_adapters or not capacities:
            return None
        sizes: dict[TenantId, dict[str, int]] = {}
        for entry in directory.adapters.values():
            sizes.setdefault(TenantId(entry.record.tenant_id), {})[entry.record.name] = entry.record.size_bytes
        policies = {policy.tenant_id: policy}
        for count, tenant_id in enumerate(t for t in sizes if t != policy.tenant_id):
            if count % _POLICIES_AT_ONCE == _POLICIES_AT_ONCE - 1:
                await asyncio.sleep(0)
            try:
                known = directory.policy_of(tenant_id)
            except InternalError:  # logged where it was read
                known = None
            policies[tenant_id] = known or TenantPolicy(tenant_id)
        own = sizes.get(policy.tenant_id, {})
        return pins_problem(
            policy.tenant_id,
            pins={
                tenant_id: [sizes[tenant_id][name] for name in each.pinned_adapters if name in sizes[tenant_id]]
                for tenant_id, each in policies.items()
                if tenant_id in sizes
            },
            registered={tenant_id: sum(each.values()) for tenant_id, each in sizes.items()},
            weights={tenant_id: each.tenant_weight for tenant_id, each in policies.items()},
            capacity=min(capacities),
            own_other=max((size for name, size in own.items() if name not in policy.pinned_adapters), default=0),
            largest=max((max(each.values()) for each in sizes.values()), default=0),
        )

    async def get_tenant(self, request: admin_pb2.GetTenantRequest, call: ServerCall) -> admin_pb2.GetTenantResponse:
        tenant_id = self._caller(call).require_tenant(request.tenant_id, [Scope.ADMIN])
        stored = await self._stored_tenant(tenant_id)
        adapters = await self._store.list(keys.adapters_of(tenant_id))
        return admin_pb2.GetTenantResponse(
            tenant=_tenant_info(tenant_id, stored.value.decode(), stored.version, len(adapters.kvs))
        )

    async def list_tenants(
        self, request: admin_pb2.ListTenantsRequest, call: ServerCall
    ) -> admin_pb2.ListTenantsResponse:
        self._caller(call).require(Scope.OPERATOR)
        counts: dict[str, int] = {}
        for entry in self._directory.adapters.values():
            counts[entry.record.tenant_id] = counts.get(entry.record.tenant_id, 0) + 1
        return admin_pb2.ListTenantsResponse(
            tenants=[
                _tenant_info(tenant_id, entry.policy_yaml, entry.version, counts.get(tenant_id, 0))
                for tenant_id, entry in sorted(self._directory.tenants.items())
            ]
        )

    async def delete_tenant(
        self, request: admin_pb2.DeleteTenantRequest, call: ServerCall
    ) -> admin_pb2.DeleteTenantResponse:
        self._caller(call).require(Scope.OPERATOR)
        tenant_id = request.tenant_id
        removed = 0
        for _ in range(_MAX_CONFLICTS):
            stored = await self._stored_tenant(tenant_id)
            removed += await self._delete_adapters(tenant_id)
            result = await self._store.txn(
                [Compare(keys.tenant(tenant_id), stored.mod_revision)], [Delete(keys.tenant(tenant_id))]
            )
            if result.succeeded:
                # Registering an adapter or an API key needs the tenant's record: none comes after this. Some may have
                # come before it.
                removed += await self._delete_adapters(tenant_id)
                await self._delete_keys(tenant_id)
                await self._directory.tenant_seen(tenant_id, result.revision, deleted=True)
                return admin_pb2.DeleteTenantResponse(removed_adapters=removed)
        raise _conflict()

    async def _delete_adapters(self, tenant_id: str) -> int:
        listing = await self._store.list(keys.adapters_of(tenant_id))
        await self._delete([kv.key for kv in listing.kvs])
        return len(listing.kvs)

    async def _delete_keys(self, tenant_id: str) -> None:
        listing = await self._store.list(keys.API_KEYS)
        await self._delete([kv.key for kv in listing.kvs if KeyRecord.from_json(kv.value).tenant_id == tenant_id])

    async def _delete(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), _DELETE_BATCH):
            await self._store.txn([], [Delete(key) for key in names[start : start + _DELETE_BATCH]])

    async def _stored_tenant(self, tenant_id: str) -> KeyValue:
        if not tenant_id:
            raise InvalidRequest.of("tenant_id", "is missing")
        stored = await self._store.get(keys.tenant(tenant_id)) if is_valid_name(tenant_id) else None
        if stored is None:
            raise NotFound(f"tenant_id: tenant {tenant_id[:80]!r} is not known")
        return stored

    # Keys

    async def create_key(self, request: admin_pb2.CreateKeyRequest, call: ServerCall) -> admin_pb2.CreateKeyResponse:
        self._caller(call).require(Scope.OPERATOR)
        made = new_key(
            self._rng.getrandbits,
            tenant_id=request.tenant_id,
            scopes=request.scopes,
            name=request.name,
            now_unix_s=self._clock.now_unix_s(),
        )
        record = made.record
        key = keys.api_key(record.key_id)
        for _ in range(_MAX_CONFLICTS):
            compares = [Compare(key, 0)]
            if record.tenant_id:
                tenant = await self._stored_tenant(record.tenant_id)
                compares.append(Compare(keys.tenant(record.tenant_id), tenant.mod_revision))
            if (await self._store.txn(compares, [Put(key, record.to_json())])).succeeded:
                await self._directory.key_seen(record)
                _LOG.info("key made", extra=fields(key_id=record.key_id, tenant=record.tenant_id))
                return admin_pb2.CreateKeyResponse(key=made.key, info=_key_info(record))
        raise _conflict()

    async def list_keys(self, request: admin_pb2.ListKeysRequest, call: ServerCall) -> admin_pb2.ListKeysResponse:
        self._caller(call).require(Scope.OPERATOR)
        found = [r for r in self._directory.api_keys.values() if request.tenant_id in ("", r.tenant_id)]
        found.sort(key=lambda record: (record.created_unix_s, record.key_id))
        return admin_pb2.ListKeysResponse(keys=[_key_info(record) for record in found])

    async def revoke_key(self, request: admin_pb2.RevokeKeyRequest, call: ServerCall) -> admin_pb2.RevokeKeyResponse:
        """Revoking a key again changes nothing. A caller may revoke the key that it calls with."""
        self._caller(call).require(Scope.OPERATOR)
        key = keys.api_key(request.key_id)
        for _ in range(_MAX_CONFLICTS):
            stored = await self._store.get(key) if is_valid_name(request.key_id) else None
            if stored is None:
                raise NotFound(f"key_id: key {request.key_id[:80]!r} is not known")
            record = KeyRecord.from_json(stored.value)
            if not record.revoked_unix_s:
                record = dataclasses.replace(record, revoked_unix_s=self._clock.now_unix_s())
                result = await self._store.txn([Compare(key, stored.mod_revision)], [Put(key, record.to_json())])
                if not result.succeeded:
                    continue
                _LOG.info("key revoked", extra=fields(key_id=record.key_id, tenant=record.tenant_id))
            await self._directory.key_seen(record)
            return admin_pb2.RevokeKeyResponse(info=_key_info(record))
        raise _conflict()

    # Adapters

    async def add_adapter(
        self, requests: AsyncIterator[admin_pb2.AddAdapterRequest], call: ServerCall
    ) -> admin_pb2.AddAdapterResponse:
        header = await self._read_header(requests, self._caller(call))
        await self._stored_tenant(header.tenant_id)
        key = keys.adapter(header.tenant_id, header.name)
        if await self._store.get(key) is not None:
            raise _exists(header.name)
        if self._num_uploads >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS} adapters are being added at this router already", retry_after_s=1.0)
        self._num_uploads += 1
        try:
            record = await self._take_in(header, requests)
        finally:
            self._num_uploads -= 1
        revision = await self._register(record)
        await self._directory.adapter_seen(record.tenant_id, record.name, revision)
        return admin_pb2.AddAdapterResponse(adapter=_adapter_info(record))

    async def _take_in(
        self, header: admin_pb2.AddAdapterHeader, requests: AsyncIterator[admin_pb2.AddAdapterRequest]
    ) -> AdapterRecord:
        """Brings the files into the adapter store, if a worker finds them good."""
        incoming = await self._files.begin()
        try:
            if header.store_path:
                await self._no_chunks(requests)
                await self._files.import_from(incoming, header.store_path)
            else:
                await self._receive(requests, incoming)
            uid = await self._files.finish(incoming)
            record = await self._validate(header, incoming, uid)
            await self._files.commit(incoming, uid)
            return record
        finally:
            # Shielded: a caller that goes away must not leave its files behind.
            await asyncio.shield(self._files.discard(incoming))

    async def _register(self, record: AdapterRecord) -> int:
        """Returns the store's revision. Raises AlreadyExists, or NotFound where the tenant is gone."""
        key = keys.adapter(record.tenant_id, record.name)
        for _ in range(_MAX_CONFLICTS):
            tenant = await self._stored_tenant(record.tenant_id)
            result = await self._store.txn(
                [Compare(key, 0), Compare(keys.tenant(record.tenant_id), tenant.mod_revision)],
                [Put(key, record.to_json())],
            )
            if result.succeeded:
                return result.revision
            if await self._store.get(key) is not None:
                raise _exists(record.name)
        raise _conflict()

    async def list_adapters(
        self, request: admin_pb2.ListAdaptersRequest, call: ServerCall
    ) -> admin_pb2.ListAdaptersResponse:
        tenant_id = self._caller(call).require_tenant(request.tenant_id, TENANT_SCOPES)
        if tenant_id:
            await self._stored_tenant(tenant_id)
            records = self._directory.adapters_of(tenant_id)
        else:
            records = [entry.record for _, entry in sorted(self._directory.adapters.items())]
        return admin_pb2.ListAdaptersResponse(adapters=[_adapter_info(record) for record in records])

    async def remove_adapter(
        self, request: admin_pb2.RemoveAdapterRequest, call: ServerCall
    ) -> admin_pb2.RemoveAdapterResponse:
        """The files stay for a while, for requests that were queued before; RouterApp collects them."""
        tenant_id = self._caller(call).require_tenant(request.tenant_id, [Scope.ADMIN])
        await self._stored_tenant(tenant_id)
        key = keys.adapter(tenant_id, request.name)
        if not is_valid_name(request.name) or not await self._store.delete(key):
            raise NotFound(f"name: adapter {request.name[:80]!r} is not known to this tenant")
        await self._directory.adapter_seen(tenant_id, request.name, 0, deleted=True)
        return admin_pb2.RemoveAdapterResponse()

    async def _read_header(
        self, requests: AsyncIterator[admin_pb2.AddAdapterRequest], caller: Principal
    ) -> admin_pb2.AddAdapterHeader:
        """The header, its tenant filled in. Raises PermissionDenied and InvalidRequest."""
        if not (caller.may(Scope.OPERATOR) or caller.may(Scope.ADMIN)):
            raise permission_denied()
        first = await self._next(requests)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidRequest.of("header", "must be the first message")
        header = first.header
        header.tenant_id = caller.require_tenant(header.tenant_id, [Scope.ADMIN])
        wrong = [
            FieldViolation(f"header.{name}", f"must match {NAME_PATTERN}" if value else "is missing")
            for name, value in (("tenant_id", header.tenant_id), ("name", header.name))
            if not is_valid_name(value)
        ]
        if wrong:
            raise InvalidRequest.of_all(wrong)
        return header

    async def _receive(self, requests: AsyncIterator[admin_pb2.AddAdapterRequest], incoming: str) -> None:
        while (message := await self._next(requests)) is not None:
            if message.WhichOneof("part") != "chunk":
                raise InvalidRequest.of("chunk", "must be every message after the first")
            await self._files.append(incoming, message.chunk.file_name, message.chunk.data)

    async def _no_chunks(self, requests: AsyncIterator[admin_pb2.AddAdapterRequest]) -> None:
        if await self._next(requests) is not None:
            raise InvalidRequest.of("chunk", "must not be sent with header.store_path")

    async def _next(self, requests: AsyncIterator[admin_pb2.AddAdapterRequest]) -> admin_pb2.AddAdapterRequest | None:
        try:
            async with asyncio.timeout(UPLOAD_IDLE_S):
                return await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded(f"the upload sent nothing for {UPLOAD_IDLE_S:g} seconds") from None

    async def _validate(self, header: admin_pb2.AddAdapterHeader, incoming: str, uid: AdapterUid) -> AdapterRecord:
        """Asks a worker. Raises InvalidRequest with all that is wrong, ServiceUnavailable where no worker answers."""
        answer = await self._ask_worker(worker_pb2.ValidateAdapterRequest(path=incoming))
        if answer.problems:
            raise InvalidRequest.of_all([FieldViolation(p.field, p.description) for p in answer.problems])
        return AdapterRecord(
            tenant_id=header.tenant_id,
            name=header.name,
            uid=uid,
            max_lora_rank=answer.max_lora_rank,
            size_bytes=answer.size_bytes,
            target_modules=tuple(answer.target_modules),
            created_unix_s=self._clock.now_unix_s(),
        )

    async def _ask_worker(self, request: worker_pb2.ValidateAdapterRequest) -> worker_pb2.ValidateAdapterResponse:
        workers = [record for _, record in sorted(self._directory.workers.items())]
        self._rng.shuffle(workers)
        for worker in workers:
            channel = self._channels.acquire(worker.address)
            try:
                answer: worker_pb2.ValidateAdapterResponse = await channel.call(
                    _VALIDATE_ADAPTER, request, timeout=_VALIDATE_TIMEOUT_S
                )
                return answer
            except RpcError as e:
                if e.code is Code.INVALID_ARGUMENT:
                    raise InvalidRequest(e.message, violations=e.violations) from e
                _LOG.warning("a worker could not validate", extra=fields(worker=worker.worker_id, error=str(e)))
            finally:
                self._channels.release(worker.address)
        raise ServiceUnavailable("no worker could validate the adapter", retry_after_s=1.0)

    # Status

    async def get_status(self, request: admin_pb2.GetStatusRequest, call: ServerCall) -> admin_pb2.GetStatusResponse:
        caller = self._caller(call)
        directory = self._directory
        tenant_id = "" if caller.may(Scope.OPERATOR) else caller.require_tenant("", TENANT_SCOPES)
        if request.local_only:
            return self._levels.local(tenant_id)
        answer, (levels, routers) = await asyncio.gather(
            self._scheduler_status(), self._levels.of_cluster(tenant_id, call.metadata)
        )
        if tenant_id:
            return self._status_of_tenant(tenant_id, answer, levels)
        reported = {status.worker_id: status for status in answer.workers}
        workers: list[admin_pb2.WorkerStatus] = []
        for worker_id, record in sorted(directory.workers.items()):
            status = admin_pb2.WorkerStatus(sequence_slots=record.sequence_slots)
            if worker_id in reported:
                status = reported[worker_id]
            status.worker_id, status.address, status.device = worker_id, record.address, record.device
            workers.append(status)
        model = directory.model
        return admin_pb2.GetStatusResponse(
            base_model=model.name if model is not None else "",
            scheduler=answer.scheduler,
            workers=workers,
            routers=[
                admin_pb2.RouterStatus(router_id=router_id, address=record.address, answered=router_id in routers)
                for router_id, record in sorted(directory.routers.items())
            ],
            tenants=len(directory.tenants),
            adapters=len(directory.adapters),
            slos=levels.slos,
            circuits=levels.circuits,
            quarantined_prompts=levels.quarantined_prompts,
        )

    def _status_of_tenant(
        self,
        tenant_id: str,
        answer: scheduler_pb2.GetSchedulerStatusResponse,
        levels: admin_pb2.GetStatusResponse,
    ) -> admin_pb2.GetStatusResponse:
        """What a tenant may know: the model, its own flows and counts. Nothing of other tenants or of the machines."""
        for circuit in levels.circuits:
            circuit.router_id = ""
        model = self._directory.model
        return admin_pb2.GetStatusResponse(
            base_model=model.name if model is not None else "",
            scheduler=admin_pb2.SchedulerStatus(
                reachable=answer.scheduler.reachable,
                flows=[flow for flow in answer.scheduler.flows if flow.tenant_id == tenant_id],
                quotas=[quota for quota in answer.scheduler.quotas if quota.tenant_id == tenant_id],
                overload=admin_pb2.OverloadStatus(
                    level=answer.scheduler.overload.level,
                    rung=answer.scheduler.overload.rung,
                    tenants=[each for each in answer.scheduler.overload.tenants if each.tenant_id == tenant_id],
                ),
                adapters=[_without_machines(a) for a in answer.scheduler.adapters if a.tenant_id == tenant_id],
            ),
            tenants=1 if tenant_id in self._directory.tenants else 0,
            adapters=len(self._directory.adapters_of(tenant_id)),
            slos=[slo for slo in levels.slos if slo.tenant_id == tenant_id],
            circuits=[circuit for circuit in levels.circuits if circuit.tenant_id == tenant_id],
            quarantined_prompts=levels.quarantined_prompts,
        )

    async def _scheduler_status(self) -> scheduler_pb2.GetSchedulerStatusResponse:
        """The leader's answer; `reachable` is false where there is none."""
        address = self._directory.leader_address()
        if address is None:
            return scheduler_pb2.GetSchedulerStatusResponse()
        channel = self._transport.connect(address)
        try:
            answer: scheduler_pb2.GetSchedulerStatusResponse = await channel.call(
                GET_STATUS, scheduler_pb2.GetSchedulerStatusRequest(), timeout=_STATUS_TIMEOUT_S
            )
        except RpcError as e:
            _LOG.warning("the scheduler gave no status", extra=fields(address=address, error=str(e)))
            answer = scheduler_pb2.GetSchedulerStatusResponse()
            answer.scheduler.address = address
            return answer
        finally:
            await channel.close()
        answer.scheduler.reachable = True
        answer.scheduler.address = address
        return answer


def _tenant_info(tenant_id: str, policy_yaml: str, version: int, adapters: int) -> admin_pb2.TenantInfo:
    return admin_pb2.TenantInfo(tenant_id=tenant_id, policy_yaml=policy_yaml, version=version, adapters=adapters)


def _without_machines(adapters: admin_pb2.TenantAdapters) -> admin_pb2.TenantAdapters:
    """As a tenant may see it: neither how many workers there are, nor that others were in its adapters' way."""
    adapters.displaced = 0
    for pin in adapters.pins:
        pin.on_device, pin.workers = int(pin.on_device == pin.workers), 1
    return adapters


def _adapter_info(record: AdapterRecord) -> admin_pb2.AdapterInfo:
    return admin_pb2.AdapterInfo(
        tenant_id=record.tenant_id,
        name=record.name,
        version=record.uid,
        max_lora_rank=record.max_lora_rank,
        size_bytes=record.size_bytes,
        target_modules=record.target_modules,
        created_unix_s=record.created_unix_s,
    )


def _key_info(record: KeyRecord) -> admin_pb2.KeyInfo:
    return admin_pb2.KeyInfo(
        key_id=record.key_id,
        tenant_id=record.tenant_id,
        scopes=record.scopes,
        name=record.name,
        created_unix_s=record.created_unix_s,
        revoked_unix_s=record.revoked_unix_s,
    )


def _exists(name: str) -> AlreadyExists:
    return AlreadyExists(f"header.name: the tenant has an adapter {name!r} already")


def _changed_meanwhile(tenant_id: str, version: int, expected: int) -> VersionConflict:
    stands = f"is at version {version}" if version else "does not exist"
    return VersionConflict(f"expected_version: tenant {tenant_id} {stands}, not at {expected}; nothing was changed")


def _conflict() -> ServiceUnavailable:
    return ServiceUnavailable("the tenant was changed by somebody else at the same time; try again", retry_after_s=0.1)
