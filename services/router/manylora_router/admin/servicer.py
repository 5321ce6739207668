"""AdminService: tenants, keys, adapters, status.

Every change of the store is one transaction guarded by what was read before it. Each handler first asks whether the
caller's key permits the call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from manylora.v1 import admin_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, Delete, KeyValue, Put, Store
from manylora_shared.coordination.records import AdapterRecord, KeyRecord
from manylora_shared.errors import (
    AdapterRejected,
    GateInconclusive,
    InternalError,
    InvalidRequest,
    ManyloraError,
    NotFound,
    ServiceUnavailable,
    Unready,
    VersionConflict,
)
from manylora_shared.ids import TenantId, is_valid_name, name_problem
from manylora_shared.process.clock import WallClock
from manylora_shared.stores.documents import Documents
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.adapter_gate import Verdict
from manylora_shared.tenancy.adapter_shares import pins_problem
from manylora_shared.tenancy.identity import (
    AUTHORIZATION_KEY,
    TENANT_SCOPES,
    Principal,
    Scope,
    has_expired,
    lifetime_problems,
    new_key,
)
from manylora_shared.tenancy.policy import TenantPolicy, line_of, parse_policy
from manylora_shared.transport.base import Gate, ServerCall, Service

from manylora_router.admin.adapter_documents import AdapterDocuments
from manylora_router.admin.adapters import AdapterIntake
from manylora_router.admin.draining import Draining
from manylora_router.admin.service_levels import ServiceLevels
from manylora_router.admin.status import ClusterStatus
from manylora_router.admin.validation import AdapterValidation
from manylora_router.admin.verification import Verification
from manylora_router.admin.versions import AdapterVersions
from manylora_router.links.callers import Callers
from manylora_router.links.directory import Directory
from manylora_router.links.wire import adapter_info, key_info, tenant_info
from manylora_router.quality.report import Report

_LOG = logging.getLogger(__name__)
_MAX_CONFLICTS = 8  # times that a change is tried again because somebody else changed the same key
_POLICIES_AT_ONCE = 32  # policies that are parsed before others have their turn on the event loop
_DELETE_BATCH = 100  # keys deleted in one transaction, well inside the store's bound


class AdminServicer:
    def __init__(
        self,
        *,
        directory: Directory,
        callers: Callers,
        store: Store,
        intake: AdapterIntake,
        validation: AdapterValidation,
        documents: Documents,
        verification: Verification,
        status: ClusterStatus,
        levels: ServiceLevels,
        draining: Draining,
        clock: WallClock,
        rng: random.Random,
    ) -> None:
        self._directory = directory
        self._callers = callers
        self._store = store
        self._intake = intake
        self._validation = validation
        self._documents = documents
        self._verification = verification
        self._adapter_documents = AdapterDocuments(callers, store, documents, validation)
        self._versions = AdapterVersions(callers, directory, store, clock, rng)
        self._status = status
        self._levels = levels
        self._draining = draining
        self._clock = clock
        self._rng = rng

    @property
    def handlers(self) -> dict[str, Callable[..., Any]]:
        own: dict[str, Callable[..., Any]] = {
            "ApplyTenant": self.apply_tenant,
            "GetTenant": self.get_tenant,
            "ListTenants": self.list_tenants,
            "DeleteTenant": self.delete_tenant,
            "AddAdapter": self.add_adapter,
            "CheckAdapter": self.check_adapter,
            "ListAdapters": self.list_adapters,
            "RemoveAdapter": self.remove_adapter,
            "VerifyAdapters": self.verify_adapters,
            "CreateKey": self.create_key,
            "ListKeys": self.list_keys,
            "RevokeKey": self.revoke_key,
            "RotateKey": self.rotate_key,
            "LiftQuarantine": self.lift_quarantine,
            "Drain": self.drain,
            "GetStatus": self.get_status,
        }
        return own | self._versions.handlers | self._adapter_documents.handlers

    def service(self, gate: Gate) -> Service:
        return Service(admin_pb2.DESCRIPTOR.services_by_name["AdminService"], self.handlers, gate=gate)

    def _caller(self, call: ServerCall) -> Principal:
        """Raises Unauthenticated."""
        return self._callers.known(call.metadata.get(AUTHORIZATION_KEY, ""), call.peer)

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
                previous_policy_yaml=stored.value.decode(errors="replace") if stored is not None else "",
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
        sizes: dict[TenantId, dict[str, int]] = {}  # by name, and for versions that are not in force by name@version
        for entry in directory.adapters.values():
            of_tenant, name = sizes.setdefault(TenantId(entry.record.tenant_id), {}), entry.record.name
            for each in entry.record.line.served:
                of_tenant[name if each.number == entry.record.number else f"{name}@{each.number}"] = each.size_bytes
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
            tenant=tenant_info(tenant_id, stored.value.decode(errors="replace"), stored.version, len(adapters.kvs))
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
                tenant_info(tenant_id, entry.policy_yaml, entry.version, counts.get(tenant_id, 0))
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
                await self._delete_documents(tenant_id)
                await self._directory.tenant_seen(tenant_id, result.revision, deleted=True)
                return admin_pb2.DeleteTenantResponse(removed_adapters=removed)
        raise _conflict()

    async def _delete_adapters(self, tenant_id: str) -> int:
        listing = await self._store.list(keys.adapters_of(tenant_id))
        await self._delete([kv.key for kv in listing.kvs])
        return len(listing.kvs)

    async def _delete_keys(self, tenant_id: str) -> None:
        listing = await self._store.list(keys.API_KEYS)
        # a record that cannot be read is nobody's key
        found = [(kv.key, _key_record(kv)) for kv in listing.kvs]
        await self._delete([key for key, record in found if record is not None and record.tenant_id == tenant_id])

    async def _delete_documents(self, tenant_id: str) -> None:
        """What the store does not let go now goes with the next collection."""
        try:
            for document in await self._documents.held(tenant_id):
                await self._documents.delete(document.path)
        except (ServiceUnavailable, OSError) as e:
            _LOG.warning("documents of a tenant that is gone stay for now: %s", e, extra=fields(tenant=tenant_id))

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
            lifetime_s=request.lifetime_s,
            networks=request.networks,
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
                return admin_pb2.CreateKeyResponse(key=made.key, info=key_info(record))
        raise _conflict()

    async def list_keys(self, request: admin_pb2.ListKeysRequest, call: ServerCall) -> admin_pb2.ListKeysResponse:
        self._caller(call).require(Scope.OPERATOR)
        found = [r for r in self._directory.api_keys.values() if request.tenant_id in ("", r.tenant_id)]
        found.sort(key=lambda record: (record.created_unix_s, record.key_id))
        return admin_pb2.ListKeysResponse(keys=[key_info(record) for record in found])

    async def revoke_key(self, request: admin_pb2.RevokeKeyRequest, call: ServerCall) -> admin_pb2.RevokeKeyResponse:
        """Revoking a key again changes nothing. A caller may revoke the key that it calls with."""
        self._caller(call).require(Scope.OPERATOR)
        key = keys.api_key(request.key_id)
        for _ in range(_MAX_CONFLICTS):
            stored, record = await self._stored_key(request.key_id)
            if not record.revoked_unix_s:
                record = dataclasses.replace(record, revoked_unix_s=self._clock.now_unix_s())
                result = await self._store.txn([Compare(key, stored.mod_revision)], [Put(key, record.to_json())])
                if not result.succeeded:
                    continue
                _LOG.info("key revoked", extra=fields(key_id=record.key_id, tenant=record.tenant_id))
            await self._directory.key_seen(record)
            return admin_pb2.RevokeKeyResponse(info=key_info(record))
        raise _conflict()

    async def rotate_key(self, request: admin_pb2.RotateKeyRequest, call: ServerCall) -> admin_pb2.RotateKeyResponse:
        """The old key's end comes no later than it was to come."""
        self._caller(call).require(Scope.OPERATOR)
        if violations := lifetime_problems("overlap_s", request.overlap_s):
            raise InvalidRequest.of_all(violations)
        for _ in range(_MAX_CONFLICTS):
            stored, old = await self._stored_key(request.key_id)
            now = self._clock.now_unix_s()
            if old.revoked_unix_s or has_expired(old, now):
                raise Unready(f"key_id: key {old.key_id} is not in force any more; make a new one")
            made = new_key(
                self._rng.getrandbits,
                tenant_id=old.tenant_id,
                scopes=old.scopes,
                name=old.name,
                now_unix_s=now,
                lifetime_s=request.lifetime_s or max(0.0, old.expires_unix_s - old.created_unix_s),
                networks=old.networks,
            )
            ends = min(now + request.overlap_s, old.expires_unix_s or math.inf)
            replaced = dataclasses.replace(old, expires_unix_s=ends)
            new = keys.api_key(made.record.key_id)
            result = await self._store.txn(
                [Compare(stored.key, stored.mod_revision), Compare(new, 0)],
                [Put(stored.key, replaced.to_json()), Put(new, made.record.to_json())],
            )
            if result.succeeded:
                await self._directory.key_seen(made.record)
                _LOG.info("key rotated", extra=fields(key_id=made.record.key_id, replaced=old.key_id))
                return admin_pb2.RotateKeyResponse(
                    key=made.key, info=key_info(made.record), replaced=key_info(replaced)
                )
        raise _conflict()

    async def _stored_key(self, key_id: str) -> tuple[KeyValue, KeyRecord]:
        """Raises NotFound."""
        stored = await self._store.get(keys.api_key(key_id)) if is_valid_name(key_id) else None
        record = _key_record(stored) if stored is not None else None
        if stored is None or record is None:
            known = "is not known" if stored is None else "is not in force: its record cannot be read"
            raise NotFound(f"key_id: key {key_id[:80]!r} {known}")
        return stored, record

    # Adapters

    async def add_adapter(
        self, requests: AsyncIterator[admin_pb2.AddAdapterRequest], call: ServerCall
    ) -> admin_pb2.AddAdapterResponse:
        caller = self._caller(call)
        header = await self._intake.read_header(requests, caller)
        with self._intake.place(header.tenant_id):  # first: what is refused costs etcd nothing
            policy = await self._policy_of(header.tenant_id)
            if header.only_new:
                await self._versions.refuse_known(header.tenant_id, header.name)
            record, report = await self._validation.take_in(
                header, requests, policy, is_operator=caller.may(Scope.OPERATOR)
            )
            added = await self._versions.register(record, only_new=header.only_new)
        if added.state:
            raise refused_by_gate(added, report)
        return admin_pb2.AddAdapterResponse(adapter=adapter_info(added))

    async def check_adapter(
        self, requests: AsyncIterator[admin_pb2.CheckAdapterRequest], call: ServerCall
    ) -> admin_pb2.CheckAdapterResponse:
        caller = self._caller(call)
        header = await self._intake.read_header(requests, caller, needs_name=False)
        with self._intake.place(header.tenant_id):
            policy = await self._policy_of(header.tenant_id)
            report = await self._validation.check(header, requests, policy, is_operator=caller.may(Scope.OPERATOR))
        return admin_pb2.CheckAdapterResponse(report=report.to_json(), passed=report.verdict is Verdict.PASSED)

    async def _policy_of(self, tenant_id: str) -> TenantPolicy:
        """As it stands in the store. Raises NotFound, Unready."""
        stored = await self._stored_tenant(tenant_id)
        try:
            return parse_policy(stored.value.decode())
        except (InvalidRequest, UnicodeDecodeError) as e:
            raise Unready(f"tenant_id: the stored policy of tenant {tenant_id} cannot be read; apply it again") from e

    async def list_adapters(
        self, request: admin_pb2.ListAdaptersRequest, call: ServerCall
    ) -> admin_pb2.ListAdaptersResponse:
        tenant_id = self._caller(call).require_tenant(request.tenant_id, TENANT_SCOPES)
        records = await self._adapters_of(tenant_id)
        return admin_pb2.ListAdaptersResponse(adapters=[adapter_info(record) for record in records])

    async def _adapters_of(self, tenant_id: str) -> list[AdapterRecord]:
        """Empty: of all tenants."""
        if not tenant_id:
            return [entry.record for _, entry in sorted(self._directory.adapters.items())]
        await self._stored_tenant(tenant_id)
        return self._directory.adapters_of(tenant_id)

    async def verify_adapters(
        self, request: admin_pb2.VerifyAdaptersRequest, call: ServerCall
    ) -> AsyncIterator[admin_pb2.VerifyAdaptersResponse]:
        tenant_id = self._caller(call).require_tenant(request.tenant_id, [Scope.ADMIN])
        if request.name and not tenant_id:
            raise InvalidRequest.of("tenant_id", "is missing, and adapters of a name may be several tenants'")
        found = [record for record in await self._adapters_of(tenant_id) if request.name in ("", record.name)]
        if request.name and not found:
            raise _unknown_adapter(request.name)
        versions = [record.at(version) for record in found for version in record.line.served]
        async for answer in self._verification.answers(versions, tenant_id):
            yield answer

    async def remove_adapter(
        self, request: admin_pb2.RemoveAdapterRequest, call: ServerCall
    ) -> admin_pb2.RemoveAdapterResponse:
        """The files stay for a while, for requests that were queued before; RouterApp collects them."""
        tenant_id = self._caller(call).require_tenant(request.tenant_id, [Scope.ADMIN])
        await self._stored_tenant(tenant_id)
        key = keys.adapter(tenant_id, request.name)
        if not is_valid_name(request.name) or not await self._store.delete(key):
            raise _unknown_adapter(request.name)
        await self._directory.adapter_seen(tenant_id, request.name, 0, deleted=True)
        return admin_pb2.RemoveAdapterResponse()

    # Status

    async def lift_quarantine(
        self, request: admin_pb2.LiftQuarantineRequest, call: ServerCall
    ) -> admin_pb2.LiftQuarantineResponse:
        """Also of a tenant that is gone: it may come back while its prompts are remembered."""
        self._caller(call).require(Scope.OPERATOR)
        if problem := name_problem(request.tenant_id):
            raise InvalidRequest.of("tenant_id", problem)
        answer = await self._levels.lift_quarantine(
            TenantId(request.tenant_id), call.metadata, local_only=request.local_only
        )
        _LOG.info("quarantine lifted", extra=fields(tenant=request.tenant_id, prompts=answer.prompts))
        return answer

    async def drain(self, request: admin_pb2.DrainRequest, call: ServerCall) -> admin_pb2.DrainResponse:
        self._caller(call).require(Scope.OPERATOR)
        return admin_pb2.DrainResponse(kind=await self._draining.drain(request.id, call.metadata))

    async def get_status(self, request: admin_pb2.GetStatusRequest, call: ServerCall) -> admin_pb2.GetStatusResponse:
        caller = self._caller(call)
        tenant_id = "" if caller.may(Scope.OPERATOR) else caller.require_tenant("", TENANT_SCOPES)
        return await self._status.told(tenant_id, call.metadata, local_only=request.local_only)


def _key_record(kv: KeyValue) -> KeyRecord | None:
    try:
        return KeyRecord.stored(kv)
    except ValueError:  # logged by the mirror
        return None


def refused_by_gate(added: AdapterRecord, report: Report) -> ManyloraError:
    told = f"version {added.number} of {added.name} is {added.state} and not served: {'; '.join(report.reasons)}"
    if added.state == Verdict.INCONCLUSIVE:
        return GateInconclusive(told)
    return AdapterRejected(told)


def _unknown_adapter(name: str) -> NotFound:
    return NotFound(f"name: adapter {name[:80]!r} is not known to this tenant")


def _changed_meanwhile(tenant_id: str, version: int, expected: int) -> VersionConflict:
    stands = f"is at version {version}" if version else "does not exist"
    return VersionConflict(f"expected_version: tenant {tenant_id} {stands}, not at {expected}; nothing was changed")


def _conflict() -> ServiceUnavailable:
    return ServiceUnavailable("the tenant was changed by somebody else at the same time; try again", retry_after_s=0.1)
