"""AdminService: tenants, keys, adapters, status.

Every change of the store is one transaction guarded by what was read before it. The entrance has asked whether the
caller's key permits the call; a handler asks of which tenant it may be.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from manylora.v1 import admin_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, Delete, KeyValue, Put, Store
from manylora_shared.coordination.records import AdapterRecord
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
from manylora_shared.tenancy.policy import MAX_DOCUMENT_BYTES, TenantPolicy, line_of, parse_policy
from manylora_shared.transport.base import Gate, Service

from manylora_router.admin.access.audit import AuditReader
from manylora_router.admin.access.keys import Keys, key_record
from manylora_router.admin.adapter_documents import AdapterDocuments
from manylora_router.admin.adapters import AdapterIntake
from manylora_router.admin.dedicated import dedicated_problem
from manylora_router.admin.draining import Draining
from manylora_router.admin.service_levels import ServiceLevels
from manylora_router.admin.status import ClusterStatus
from manylora_router.admin.usage import UsageDesk
from manylora_router.admin.validation import AdapterValidation
from manylora_router.admin.verification import Verification
from manylora_router.admin.versions import AdapterVersions
from manylora_router.ledger.rows import UsageLedger
from manylora_router.links.directory import Directory
from manylora_router.links.entrance import Entrance, KnownCall
from manylora_router.links.wire import adapter_info, tenant_info
from manylora_router.quality.report import Report

_LOG = logging.getLogger(__name__)
_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
_MAX_CONFLICTS = 8  # times that a change is tried again because somebody else changed the same key
_POLICIES_AT_ONCE = 32  # policies that are parsed before others have their turn on the event loop
_DELETE_BATCH = 100  # keys deleted in one transaction, well inside the store's bound


class AdminServicer:
    def __init__(
        self,
        *,
        directory: Directory,
        entrance: Entrance,
        store: Store,
        intake: AdapterIntake,
        validation: AdapterValidation,
        documents: Documents,
        verification: Verification,
        status: ClusterStatus,
        levels: ServiceLevels,
        draining: Draining,
        audit: AuditReader,
        keeps_texts: bool,
        ledger: UsageLedger | None,
        clock: WallClock,
        rng: random.Random,
    ) -> None:
        self._directory = directory
        self._entrance = entrance
        self._store = store
        self._intake = intake
        self._validation = validation
        self._documents = documents
        self._verification = verification
        self._adapter_documents = AdapterDocuments(store, documents, validation)
        self._keys = Keys(directory, store, clock, rng)
        self._versions = AdapterVersions(directory, store, clock, rng)
        self._status = status
        self._levels = levels
        self._draining = draining
        self._audit = audit
        self._keeps_texts = keeps_texts
        self._usage = UsageDesk(ledger)

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
            "LiftQuarantine": self.lift_quarantine,
            "Drain": self.drain,
            "DropWorkerCaches": self.drop_worker_caches,
            "GetStatus": self.get_status,
        }
        handlers = (
            own
            | self._audit.handlers
            | self._keys.handlers
            | self._usage.handlers
            | self._versions.handlers
            | self._adapter_documents.handlers
        )
        return self._entrance.guarded(_SERVICE, handlers)

    def service(self, gate: Gate) -> Service:
        return Service(_SERVICE, self.handlers, gate=gate)

    # Tenants

    async def apply_tenant(
        self, request: admin_pb2.ApplyTenantRequest, call: KnownCall
    ) -> admin_pb2.ApplyTenantResponse:
        policy = parse_policy(request.policy_yaml)
        if (problem := await self._pins_problem(policy)) is not None:
            line = line_of(request.policy_yaml, "adapters.pin")
            raise InvalidRequest.of("adapters.pin", f"line {line}: {problem}")
        if policy.dedicated and (problem := self._dedicated_problem(policy)) is not None:
            line = line_of(request.policy_yaml, "adapters.dedicated")
            raise InvalidRequest.of("adapters.dedicated", f"line {line}: {problem}")
        if policy.quotas.monthly_spend is not None and not self._usage.has_prices:
            line = line_of(request.policy_yaml, "quotas.monthly_spend")
            problem = "cannot act: this cluster's routers have no price list (--prices)"
            raise InvalidRequest.of("quotas.monthly_spend", f"line {line}: {problem}")
        key, value = keys.tenant(policy.tenant_id), _stored_form(policy)
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
            await call.will(f"tenant {policy.tenant_id}", stored.value if stored is not None else None, value)
            result = await self._store.txn(
                [Compare(key, before)], [Put(key, value), Put(keys.applied(policy.tenant_id), value)]
            )
            if result.succeeded:
                if policy.security.data_retention_days and not self._keeps_texts:
                    more = fields(tenant=policy.tenant_id)
                    _LOG.warning("a policy keeps texts, and without --encryption none are kept", extra=more)
                await self._directory.tenant_seen(policy.tenant_id, result.revision)
                answer.version = version + 1
                return answer
        raise _conflict()

    def _dedicated_problem(self, policy: TenantPolicy) -> str | None:
        directory = self._directory
        others = [each for each in directory.dedicating() if each.tenant_id != policy.tenant_id]
        pool_of = {
            (each.tenant_id, name): entry.record.pool
            for each in (policy, *others)
            for name in each.dedicated
            if (entry := directory.adapters.get(f"{each.tenant_id}/{name}")) is not None
        }
        pools = {*pool_of.values(), *(each.pools[0] for each in (policy, *others))}
        return dedicated_problem(policy, others, pool_of, {pool: directory.workers_of(pool) for pool in pools})

    async def _pins_problem(self, policy: TenantPolicy) -> str | None:
        """Why the policy's pins cannot be kept, as far as is known here; None: nothing speaks against them."""
        directory = self._directory
        if not policy.pinned_adapters:
            return None
        pools = [pool for pool in policy.pools if directory.workers_of(pool)]
        problems = [await self._pins_problem_of(policy, pool) for pool in pools]
        return next((problem for problem in problems if problem is not None), None)

    async def _pins_problem_of(self, policy: TenantPolicy, pool: str) -> str | None:
        directory = self._directory
        capacities = [w.device_adapter_bytes for w in directory.workers_of(pool) if w.device_adapter_bytes]
        if not capacities:
            return None
        sizes: dict[TenantId, dict[str, int]] = {}  # by name, and for versions that are not in force by name@version
        for entry in directory.adapters.values():
            if entry.record.pool != pool:
                continue
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

    async def get_tenant(self, request: admin_pb2.GetTenantRequest, call: KnownCall) -> admin_pb2.GetTenantResponse:
        tenant_id = call.principal.require_tenant(request.tenant_id)
        stored = await self._stored_tenant(tenant_id)
        adapters = await self._store.list(keys.adapters_of(tenant_id))
        told = tenant_info(tenant_id, stored.value.decode(errors="replace"), stored.version, len(adapters.kvs))
        known = self._directory.tenants.get(tenant_id)
        if known is not None and known.mod_revision == stored.mod_revision:
            told.problem = known.problem
        return admin_pb2.GetTenantResponse(tenant=told)

    async def list_tenants(
        self, request: admin_pb2.ListTenantsRequest, call: KnownCall
    ) -> admin_pb2.ListTenantsResponse:
        counts: dict[str, int] = {}
        for entry in self._directory.adapters.values():
            counts[entry.record.tenant_id] = counts.get(entry.record.tenant_id, 0) + 1
        return admin_pb2.ListTenantsResponse(
            tenants=[
                tenant_info(tenant_id, entry.policy_yaml, entry.version, counts.get(tenant_id, 0), entry.problem)
                for tenant_id, entry in sorted(self._directory.tenants.items())
            ]
        )

    async def delete_tenant(
        self, request: admin_pb2.DeleteTenantRequest, call: KnownCall
    ) -> admin_pb2.DeleteTenantResponse:
        tenant_id = request.tenant_id
        removed = 0
        for _ in range(_MAX_CONFLICTS):
            stored = await self._stored_tenant(tenant_id)
            await call.will(f"tenant {tenant_id}", stored.value)
            removed += await self._delete_adapters(tenant_id)
            result = await self._store.txn(
                [Compare(keys.tenant(tenant_id), stored.mod_revision)],
                [Delete(key(tenant_id)) for key in (keys.tenant, keys.applied, keys.data_key)],
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
        found = [(kv.key, key_record(kv)) for kv in listing.kvs]
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

    # Adapters

    async def add_adapter(
        self, requests: AsyncIterator[admin_pb2.AddAdapterRequest], call: KnownCall
    ) -> admin_pb2.AddAdapterResponse:
        caller = call.principal
        header = await self._intake.read_header(requests, caller)
        with self._intake.place(header.tenant_id):  # first: what is refused costs etcd nothing
            policy = await self._policy_of(header.tenant_id)
            if header.only_new:
                await self._versions.refuse_known(header.tenant_id, header.name)
            record, report = await self._validation.take_in(
                header, requests, policy, is_operator=caller.tenant_id is None
            )
            added = await self._versions.register(record, call, only_new=header.only_new)
        if added.state:
            raise refused_by_gate(added, report)
        return admin_pb2.AddAdapterResponse(adapter=adapter_info(added))

    async def check_adapter(
        self, requests: AsyncIterator[admin_pb2.CheckAdapterRequest], call: KnownCall
    ) -> admin_pb2.CheckAdapterResponse:
        caller = call.principal
        header = await self._intake.read_header(requests, caller, needs_name=False)
        with self._intake.place(header.tenant_id):
            policy = await self._policy_of(header.tenant_id)
            report = await self._validation.check(header, requests, policy, is_operator=caller.tenant_id is None)
        return admin_pb2.CheckAdapterResponse(report=report.to_json(), passed=report.verdict is Verdict.PASSED)

    async def _policy_of(self, tenant_id: str) -> TenantPolicy:
        """As it stands in the store. Raises NotFound, Unready."""
        stored = await self._stored_tenant(tenant_id)
        try:
            return parse_policy(stored.value.decode())
        except (InvalidRequest, UnicodeDecodeError) as e:
            raise Unready(f"tenant_id: the stored policy of tenant {tenant_id} cannot be read; apply it again") from e

    async def list_adapters(
        self, request: admin_pb2.ListAdaptersRequest, call: KnownCall
    ) -> admin_pb2.ListAdaptersResponse:
        tenant_id = call.principal.require_tenant(request.tenant_id)
        records = await self._adapters_of(tenant_id)
        return admin_pb2.ListAdaptersResponse(adapters=[adapter_info(record) for record in records])

    async def _adapters_of(self, tenant_id: str) -> list[AdapterRecord]:
        """Empty: of all tenants."""
        if not tenant_id:
            return [entry.record for _, entry in sorted(self._directory.adapters.items())]
        await self._stored_tenant(tenant_id)
        return self._directory.adapters_of(tenant_id)

    async def verify_adapters(
        self, request: admin_pb2.VerifyAdaptersRequest, call: KnownCall
    ) -> AsyncIterator[admin_pb2.VerifyAdaptersResponse]:
        tenant_id = call.principal.require_tenant(request.tenant_id)
        if request.name and not tenant_id:
            raise InvalidRequest.of("tenant_id", "is missing, and adapters of a name may be several tenants'")
        found = [record for record in await self._adapters_of(tenant_id) if request.name in ("", record.name)]
        if request.name and not found:
            raise _unknown_adapter(request.name)
        versions = [record.at(version) for record in found for version in record.line.served]
        async for answer in self._verification.answers(versions, tenant_id):
            yield answer

    async def remove_adapter(
        self, request: admin_pb2.RemoveAdapterRequest, call: KnownCall
    ) -> admin_pb2.RemoveAdapterResponse:
        """The files stay for a while, for requests that were queued before; RouterApp collects them."""
        tenant_id = call.principal.require_tenant(request.tenant_id)
        await self._stored_tenant(tenant_id)
        key = keys.adapter(tenant_id, request.name)
        stored = await self._store.get(key) if is_valid_name(request.name) else None
        if stored is None:
            raise _unknown_adapter(request.name)
        await call.will(f"adapter {tenant_id}/{request.name}", stored.value)
        if not await self._store.delete(key):
            raise _unknown_adapter(request.name)
        await self._directory.adapter_seen(tenant_id, request.name, 0, deleted=True)
        return admin_pb2.RemoveAdapterResponse()

    # Status

    async def lift_quarantine(
        self, request: admin_pb2.LiftQuarantineRequest, call: KnownCall
    ) -> admin_pb2.LiftQuarantineResponse:
        """Also of a tenant that is gone: it may come back while its prompts are remembered."""
        if problem := name_problem(request.tenant_id):
            raise InvalidRequest.of("tenant_id", problem)
        await call.will(f"quarantine of tenant {request.tenant_id}")
        answer = await self._levels.lift_quarantine(
            TenantId(request.tenant_id), call.metadata, local_only=request.local_only
        )
        _LOG.info("quarantine lifted", extra=fields(tenant=request.tenant_id, prompts=answer.prompts))
        return answer

    async def drain(self, request: admin_pb2.DrainRequest, call: KnownCall) -> admin_pb2.DrainResponse:
        await call.will(f"service {request.id}")
        return admin_pb2.DrainResponse(kind=await self._draining.drain(request.id, call.metadata))

    async def drop_worker_caches(
        self, request: admin_pb2.DropWorkerCachesRequest, call: KnownCall
    ) -> admin_pb2.DropWorkerCachesResponse:
        await call.will(f"caches of worker {request.worker_id}")
        return await self._draining.drop_caches(request)

    async def get_status(self, request: admin_pb2.GetStatusRequest, call: KnownCall) -> admin_pb2.GetStatusResponse:
        return await self._status.told(call.principal.tenant_id or "", call.metadata, local_only=request.local_only)


def _stored_form(policy: TenantPolicy) -> bytes:
    """Raises InvalidRequest where nobody could read it again."""
    text = policy.to_yaml()
    if (size_bytes := len(text.encode())) > MAX_DOCUMENT_BYTES:
        problem = f"has {size_bytes} bytes with every field on a line, more than {MAX_DOCUMENT_BYTES}"
        raise InvalidRequest.of("policy_yaml", problem)
    assert parse_policy(text) == policy
    return text.encode()


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
