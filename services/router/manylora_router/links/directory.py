"""What the router knows of the cluster, in mirrors of the store. The last knowledge stays in force while that is away.

Policies are parsed when first used: a router may know many more tenants than it serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import KeyValue, Store
from manylora_shared.coordination.policies import PolicyMirror, StoredPolicy, stored_policy
from manylora_shared.coordination.pool import MAX_POOLS, kept_out
from manylora_shared.coordination.records import (
    AdapterRecord,
    KeyRecord,
    RouterRecord,
    SchedulerRecord,
    WorkerRecord,
)
from manylora_shared.coordination.session import Mirror, first_of
from manylora_shared.errors import InternalError
from manylora_shared.ids import DEFAULT_POOL, AdapterName, QosClass, TenantId
from manylora_shared.ledger.compute import NO_SHAPE, ModelShape
from manylora_shared.sampling import MODEL_DEFAULTS
from manylora_shared.tenancy.adapter_line import Line
from manylora_shared.tenancy.policy import Slo, TenantPolicy

from manylora_router.guard.admission import ModelLimits

_CATCH_UP_S = 2.0


@dataclass(frozen=True)
class AdapterEntry:
    record: AdapterRecord
    mod_revision: int


@dataclass(frozen=True)
class Model:
    """A pool's base model, by the workers' records."""

    name: str
    digest: str
    limits: ModelLimits
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, Any]  # of generation_config.json, where this router takes them
    shape: ModelShape = NO_SHAPE
    fingerprint: str = ""  # WorkerRecord.fingerprint


class Directory:
    """`start` it, wait until it is `ready`, read, `close`."""

    def __init__(
        self,
        store: Store,
        *,
        on_leader_changed: Callable[[], None],
        on_workers_changed: Callable[[], None],
        takes_sampling_defaults: bool = True,
    ) -> None:
        """takes_sampling_defaults: of the model, for requests that set none."""
        self._takes_sampling_defaults = takes_sampling_defaults
        self._on_leader_changed = on_leader_changed
        self._on_workers_changed = on_workers_changed
        self._policies: dict[str, tuple[bytes, TenantPolicy]] = {}
        self.models: dict[str, Model] = {}  # by pool, as its workers served it last; for reading
        self._pool: dict[str, WorkerRecord] = {}
        self._kept_out: dict[str, tuple[WorkerRecord, str]] = {}
        self._changed = asyncio.Event()
        self._tenants = PolicyMirror(store, self._tenant_changed)
        self.rollouts: dict[str, AdapterRecord] = {}  # that stand, by `tenant/name`
        self._by_tenant: dict[str, dict[str, AdapterRecord]] = {}  # its adapters by name
        self._adapters = Mirror(store, keys.ADAPTERS, parse=_adapter, on_change=self._adapter_changed)
        self._api_keys = Mirror(store, keys.API_KEYS, parse=KeyRecord.stored, on_change=self._note)
        self._workers = Mirror(store, keys.WORKERS, parse=WorkerRecord.stored, on_change=self._worker_changed)
        self._routers = Mirror(store, keys.ROUTERS, parse=RouterRecord.stored)
        self._leader = Mirror(
            store, keys.SCHEDULER_LEADER, parse=SchedulerRecord.stored, on_change=self._leader_changed
        )
        self._mirrors: list[Mirror[Any]] = [
            self._tenants,
            self._adapters,
            self._api_keys,
            self._workers,
            self._routers,
            self._leader,
        ]

    def start(self) -> None:
        for mirror in self._mirrors:
            mirror.start()

    async def ready(self) -> None:
        for mirror in self._mirrors:
            await mirror.ready()

    async def failed(self) -> None:
        """Waits until a mirror ends, which only a bug makes it do, and raises why."""
        await first_of(*(mirror.failed() for mirror in self._mirrors))

    async def close(self) -> None:
        async with AsyncExitStack() as stack:
            for mirror in self._mirrors:
                stack.push_async_callback(mirror.close)

    @property
    def tenants(self) -> Mapping[str, StoredPolicy]:
        """By tenant id."""
        return self._tenants.values

    @property
    def adapters(self) -> Mapping[str, AdapterEntry]:
        """By `tenant/name`."""
        return self._adapters.values

    @property
    def api_keys(self) -> Mapping[str, KeyRecord]:
        """By key id, revoked ones too."""
        return self._api_keys.values

    @property
    def workers(self) -> Mapping[str, WorkerRecord]:
        """Of all pools."""
        return self._pool

    @property
    def kept_out(self) -> Mapping[str, tuple[WorkerRecord, str]]:
        """Registered workers that the pool does not take, and why."""
        return self._kept_out

    @property
    def routers(self) -> Mapping[str, RouterRecord]:
        return self._routers.values

    @property
    def model(self) -> Model | None:
        """The default pool's; None: no worker of it was ever seen."""
        return self.models.get(DEFAULT_POOL)

    def workers_of(self, pool: str) -> list[WorkerRecord]:
        """Sorted by their ids."""
        return [record for _, record in sorted(self._pool.items()) if record.pool == pool]

    def max_lora_rank_of(self, pool: str) -> int:
        model = self.models.get(pool)
        return model.limits.max_lora_rank if model is not None else 0

    @property
    def leader(self) -> SchedulerRecord | None:
        return self._leader.values.get("")

    def leader_address(self) -> str | None:
        leader = self.leader
        return leader.address if leader is not None else None

    def policy_of(self, tenant_id: TenantId) -> TenantPolicy | None:
        entry = self._tenants.values.get(tenant_id)
        if entry is None:
            return None
        cached = self._policies.get(tenant_id)
        if cached is None or cached[0] != entry.in_force:
            policy = stored_policy(tenant_id, entry.in_force)
            if policy is None:
                raise InternalError(f"the stored policy of tenant {tenant_id} cannot be read")
            self._policies[tenant_id] = cached = (entry.in_force, policy)
        return cached[1]

    def capped(self) -> list[TenantId]:
        """Whose policies bound what they spend."""
        found = self._policies_with(b"monthly_spend")
        return [policy.tenant_id for policy in found if policy.quotas.monthly_spend is not None]

    def dedicating(self) -> list[TenantPolicy]:
        """The policies that ask for dedicated workers."""
        return [policy for policy in self._policies_with(b"dedicated") if policy.dedicated]

    def _policies_with(self, word: bytes) -> list[TenantPolicy]:
        # Most policies have it not, and are not read.
        found = []
        for name, entry in self._tenants.values.items():
            if word in entry.in_force:
                with suppress(InternalError):  # it is told to whoever asks for this tenant
                    policy = self.policy_of(TenantId(name))
                    if policy is not None:
                        found.append(policy)
        return found

    def pools_of(self, tenant_id: TenantId) -> tuple[str, ...]:
        """That it may use; of a tenant that is not known, or whose policy cannot be read, those of a new one."""
        try:
            policy = self.policy_of(tenant_id)
        except InternalError:  # logged where it was read
            policy = None
        return policy.pools if policy is not None else (DEFAULT_POOL,)

    def slo_of(self, tenant_id: TenantId, qos_class: QosClass) -> Slo | None:
        """None: no targets, no such tenant, or a policy that cannot be read."""
        try:
            policy = self.policy_of(tenant_id)
        except InternalError:  # logged where it was read
            return None
        return policy.classes[qos_class].slo if policy is not None else None

    def line_of(self, tenant_id: TenantId, name: AdapterName) -> Line | None:
        entry = self._adapters.values.get(f"{tenant_id}/{name}")
        return entry.record.line if entry is not None else None

    @property
    def trials(self) -> list[tuple[TenantId, AdapterName, str]]:
        """Of rollouts that judge themselves: tenant, name and trial."""
        found = [(each.tenant_id, each.name, each.line.rollout) for each in self.rollouts.values()]
        return [(TenantId(t), AdapterName(n), rollout.trial) for t, n, rollout in found if rollout and rollout.plan]

    def key_of(self, key_id: str) -> KeyRecord | None:
        return self._api_keys.values.get(key_id)

    @property
    def keys_revision(self) -> int:
        return self._api_keys.revision

    def adapters_of(self, tenant_id: str) -> list[AdapterRecord]:
        """Sorted by name."""
        return [record for _, record in sorted(self._by_tenant.get(tenant_id, {}).items())]

    async def tenant_seen(self, tenant_id: str, revision: int, *, deleted: bool = False) -> None:
        """Waits a moment until a change that was made through this router is known to it too."""

        def is_seen() -> bool:
            entry = self._tenants.values.get(tenant_id)
            return entry is None if deleted else entry is not None and entry.mod_revision >= revision

        await self._until(is_seen)

    async def adapter_seen(self, tenant_id: str, name: str, revision: int, *, deleted: bool = False) -> None:

        def is_seen() -> bool:
            entry = self._adapters.values.get(f"{tenant_id}/{name}")
            return entry is None if deleted else entry is not None and entry.mod_revision >= revision

        await self._until(is_seen)

    async def key_seen(self, record: KeyRecord) -> None:
        await self._until(lambda: self._api_keys.values.get(record.key_id) == record)

    async def _until(self, condition: Callable[[], bool]) -> None:
        # The change is made whether or not the watch is late: the other routers learn it by the same watch.
        with suppress(TimeoutError):
            async with asyncio.timeout(_CATCH_UP_S):
                while not condition():
                    await self._changed.wait()

    def _note(self, name: str, value: object) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _tenant_changed(self, name: str, value: StoredPolicy | None) -> None:
        if value is None:
            self._policies.pop(name, None)
        self._note(name, value)

    def _adapter_changed(self, name: str, value: AdapterEntry | None) -> None:
        self.rollouts.pop(name, None)
        tenant_id, _, adapter = name.partition("/")
        if value is not None:
            self._by_tenant.setdefault(tenant_id, {})[adapter] = value.record
        elif (left := self._by_tenant.get(tenant_id)) is not None:
            left.pop(adapter, None)
            if not left:
                del self._by_tenant[tenant_id]
        if value is not None and value.record.rollouts:
            self.rollouts[name] = value.record
        self._note(name, value)

    def _leader_changed(self, name: str, value: SchedulerRecord | None) -> None:
        self._on_leader_changed()

    def _worker_changed(self, name: str, value: WorkerRecord | None) -> None:
        self._sort_workers()
        for pool in {worker.pool for worker in self._pool.values()}:
            workers = self.workers_of(pool)
            limits = ModelLimits(
                vocab_size=min(w.vocab_size for w in workers),
                max_context_tokens=min(w.max_context_tokens for w in workers),
                longest_context_tokens=min(w.longest_context_tokens or w.max_context_tokens for w in workers),
                max_lora_rank=min(w.max_lora_rank for w in workers),
                max_sequences=max(w.sequence_slots for w in workers),
            )
            first = workers[0]
            defaults = self._sampling_defaults(first)
            self.models.pop(pool, None)
            shape = ModelShape(first.layer_parameters, first.head_parameters, first.attention_operations)
            self.models[pool] = Model(
                first.model_name, first.model_digest, limits, first.eos_token_ids, defaults, shape, first.fingerprint
            )
            if len(self.models) > MAX_POOLS:  # of those that are gone, the one that was seen longest ago
                del self.models[next(iter(self.models))]
        self._on_workers_changed()

    def _sampling_defaults(self, worker: WorkerRecord) -> Mapping[str, float]:
        if not self._takes_sampling_defaults:
            return {}
        given = worker.sampling_defaults
        return {name: int(given[name]) if name == "top_k" else given[name] for name in MODEL_DEFAULTS if name in given}

    def _sort_workers(self) -> None:
        workers = self._workers.values
        reasons = kept_out(workers)
        self._pool = {name: worker for name, worker in workers.items() if name not in reasons}
        self._kept_out = {name: (workers[name], reason) for name, reason in reasons.items()}


def _adapter(kv: KeyValue) -> AdapterEntry:
    return AdapterEntry(AdapterRecord.stored(kv), kv.mod_revision)
