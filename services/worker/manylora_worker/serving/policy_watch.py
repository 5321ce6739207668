"""The tenants' policies, as far as a worker enforces them: weights of flows, bounds on KV memory, pinned adapters.

Owns mirrors of policies and registrations, and hands each change to the engine for its next token boundary. While the
store is away, the last policies stay in force. A policy that cannot be read changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store
from manylora_shared.coordination.policies import PolicyMirror, StoredPolicy, stored_policy
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.coordination.session import Mirror, first_of
from manylora_shared.ids import AdapterDigest, AdapterName, AdapterUid, RequestId, TenantId, digest_of
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.policy import TenantPolicy

from manylora_worker.adapters.cache import TenantAdapters
from manylora_worker.adapters.pins import NO_ROOM_TO_PIN, Pin
from manylora_worker.hosting.runtime import Runtime
from manylora_worker.kinds.api import EngineRequest
from manylora_worker.memory.tenant_shares import TenantShare

_LOG = logging.getLogger(__name__)
PIN_RETRY_S = 5.0


class TenantWatch:
    def __init__(self, store: Store, runtime: Runtime, pool: str) -> None:
        """pool: whose adapters it keeps, of those that are pinned."""
        self._pool = pool
        self._runtime = runtime
        self._tenants = PolicyMirror(store, self._tenant_changed)
        self._adapters = Mirror(store, keys.ADAPTERS, parse=AdapterRecord.stored, on_change=self._adapter_changed)
        self._pinned: dict[TenantId, TenantPolicy] = {}
        self._is_ready = False  # until then a name that nothing stands for may only be not known yet
        self._has_pins = False  # whether the engine was told of any
        self._due: asyncio.Handle | None = None  # of telling it; changes of one moment are told together
        self._retry: asyncio.TimerHandle | None = None
        self._seen: Mapping[TenantId, TenantAdapters] = runtime.view.tenant_adapters
        self._problems: dict[tuple[TenantId, AdapterName], str] = {}  # as logged
        runtime.view.subscribe(self)

    async def start(self) -> None:
        """Returns when every policy of the store is in force. Pinned adapters may still be on their way."""
        self._tenants.start()
        self._adapters.start()
        await self._tenants.ready()
        await self._adapters.ready()
        self._is_ready = True
        self._tell_soon()

    def serves(self, uid: AdapterUid) -> bool:
        """Whether some adapter of the tenants is this one."""
        digest = digest_of(uid)
        return any(version.uid == digest for record in self._adapters.values.values() for version in record.line.served)

    async def failed(self) -> None:
        """Waits until a mirror ends, which only a bug makes it do, and raises why."""
        await first_of(self._tenants.failed(), self._adapters.failed())

    async def close(self) -> None:
        for handle in (self._due, self._retry):
            if handle is not None:
                handle.cancel()
        await self._tenants.close()
        await self._adapters.close()

    # -- EngineListener

    def request_started(self, request: EngineRequest) -> None: ...

    def request_ended(self, request_id: RequestId) -> None: ...

    def engine_changed(self) -> None:
        """Logs pins that are not kept, once for each reason, and has them tried again."""
        if self._runtime.view.tenant_adapters is self._seen:
            return
        self._seen = self._runtime.view.tenant_adapters
        known, self._problems = self._problems, {}
        has_failed = False
        for tenant_id, adapters in self._seen.items():
            for state in adapters.pins:
                if state.is_ready:
                    continue
                name, problem = state.pin.name, state.problem
                before = known.get((tenant_id, name), "")
                if problem and problem != before:
                    _LOG.warning("a pin is not kept", extra=fields(tenant=tenant_id, adapter=name, error=problem))
                self._problems[tenant_id, name] = problem or before
                has_failed |= state.pin.uid is not None and problem not in ("", NO_ROOM_TO_PIN)
        if has_failed and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(PIN_RETRY_S, self._try_again)

    # -- changes

    def _tenant_changed(self, tenant: str, stored: StoredPolicy | None) -> None:
        tenant_id = TenantId(tenant)
        if stored is None:
            self._runtime.set_share(tenant_id, None)
            self._set_pinned(tenant_id, None)
            return
        policy = stored_policy(tenant_id, stored.in_force)
        if policy is None:
            return
        self._runtime.set_share(tenant_id, TenantShare.of(policy, self._runtime.model.kv_block_bytes))
        self._set_pinned(tenant_id, policy if policy.pinned_adapters else None)

    def _set_pinned(self, tenant_id: TenantId, policy: TenantPolicy | None) -> None:
        before = self._pinned.pop(tenant_id, None)
        if policy is not None:
            self._pinned[tenant_id] = policy
        if before is not None or policy is not None:
            self._tell_soon()

    def _adapter_changed(self, path: str, record: AdapterRecord | None) -> None:
        if self._pinned:
            self._tell_soon()

    def _tell_soon(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._tell)

    def _try_again(self) -> None:
        self._retry = None
        self._tell_soon()

    def _tell(self) -> None:
        self._due = None
        if not self._is_ready or not (self._pinned or self._has_pins):
            return
        self._has_pins = bool(self._pinned)
        pins = {
            tenant_id: [self._pin(policy, name) for name in policy.pinned_adapters if self._is_ours(policy, name)]
            for tenant_id, policy in self._pinned.items()
        }
        records = [record for record in self._adapters.values.values() if record.pool == self._pool]
        largest_bytes = max((each.size_bytes for record in records for each in record.line.served), default=0)
        self._runtime.set_pins(pins, largest_bytes)

    def _is_ours(self, policy: TenantPolicy, name: AdapterName) -> bool:
        record = self._adapters.values.get(f"{policy.tenant_id}/{name}")
        if record is None:  # it is missed where it would most likely be
            return policy.pools[0] == self._pool
        return record.pool == self._pool

    def _pin(self, policy: TenantPolicy, name: AdapterName) -> Pin:
        record = self._adapters.values.get(f"{policy.tenant_id}/{name}")
        if record is None or not record.line.in_force.is_served:
            return Pin(name, None)
        return Pin(name, policy.copy_of(AdapterDigest(record.uid)), record.size_bytes)
