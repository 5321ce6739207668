"""What each tenant may have of this worker. EngineCore writes it.

    reserve    always its own, never reclaimed for others
    soft       what is above it is reclaimed first
    hard       never passed

Any thread may call `check`: what that reads is never changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from manylora_shared.errors import QuotaBreach, QuotaExceeded
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.policy import DEFAULT_WEIGHTS, TenantPolicy

from manylora_worker.kinds.flow import CacheScope, FlowKey

_MIB = 1 << 20


@dataclass(frozen=True)
class TenantShare:
    """None: unbounded."""

    weights: Mapping[QosClass, int] = field(default_factory=lambda: DEFAULT_WEIGHTS)
    soft_blocks: int | None = None
    hard_blocks: int | None = None
    reserve_blocks: int = 0
    hard_mb: int = 0
    reserve_mb: int = 0  # as the policy gives it, as below, for refusals to name
    cache_group: str | None = None
    speculating: frozenset[QosClass] = frozenset()  # by prompt lookup
    drafting: frozenset[QosClass] = frozenset()  # by a draft model

    @staticmethod
    def of(policy: TenantPolicy, block_bytes: int) -> TenantShare:
        """Bounds are rounded down to whole blocks, the reserve up."""
        quotas = policy.quotas

        def blocks(mib: int | None) -> int | None:
            return None if mib is None else mib * _MIB // block_bytes

        return TenantShare(
            weights={qos_class: policy.weight(qos_class) for qos_class in QosClass},
            soft_blocks=blocks(quotas.kv_hbm_mb),
            hard_blocks=blocks(quotas.kv_hbm_mb_hard),
            reserve_blocks=-(-(quotas.kv_hbm_mb_reserve or 0) * _MIB // block_bytes),
            hard_mb=quotas.kv_hbm_mb_hard or 0,
            reserve_mb=quotas.kv_hbm_mb_reserve or 0,
            cache_group=policy.cache_group,
            speculating=policy.classes_with("prompt_lookup"),
            drafting=policy.classes_with("draft"),
        )


_DEFAULT = TenantShare()


class TenantShares:
    def __init__(self, num_blocks: int, most_blocks: int | None = None) -> None:
        """num_blocks: that KV has for certain; most_blocks: that it may have at times."""
        self._num_blocks = num_blocks
        self._most_blocks = num_blocks if most_blocks is None else most_blocks
        self._shares: dict[TenantId, TenantShare] = {}
        self._reserves: dict[TenantId, int] = {}  # as scaled; of tenants with a reserve alone
        self._reserved_blocks = 0
        self._has_caps = False
        self._has_soft = False
        # blocks of the longest request that a tenant had here when its bounds fell below that
        self._accepted: dict[TenantId, int] = {}

    def set(self, tenant_id: TenantId, share: TenantShare | None) -> None:
        """None: default weights, no bounds. Reserves are scaled down to half the pool together."""
        shares = dict(self._shares)
        shares.pop(tenant_id, None)
        if share is not None:
            shares[tenant_id] = share
        wanted = {tenant: each.reserve_blocks for tenant, each in shares.items() if each.reserve_blocks}
        total, most = sum(wanted.values()), self._num_blocks // 2
        if total > most:
            wanted = {tenant: blocks * most // total for tenant, blocks in wanted.items()}
        self._shares, self._reserves, self._reserved_blocks = shares, wanted, sum(wanted.values())
        self._has_soft = any(each.soft_blocks is not None for each in shares.values())
        self._has_caps = any(each.hard_blocks is not None for each in shares.values())

    def accept(self, tenant_id: TenantId, longest_blocks: int) -> None:
        """The longest accepted request raises the hard cap to its need."""
        share = self._shares.get(tenant_id)
        if share is not None and share.hard_blocks is not None and longest_blocks > share.hard_blocks:
            self._accepted[tenant_id] = longest_blocks
        else:
            self._accepted.pop(tenant_id, None)

    def cache_scope(self, tenant_id: TenantId) -> CacheScope:
        group = self._shares.get(tenant_id, _DEFAULT).cache_group
        return CacheScope(tenant_id, is_group=False) if group is None else CacheScope(group, is_group=True)

    def speculates(self, flow: FlowKey) -> bool:
        return flow[1] in self._shares.get(flow[0], _DEFAULT).speculating

    def drafts(self, flow: FlowKey) -> bool:
        return flow[1] in self._shares.get(flow[0], _DEFAULT).drafting

    def weight(self, flow: FlowKey) -> int:
        return self._shares.get(flow[0], _DEFAULT).weights[flow[1]]

    def tenant_weight(self, tenant_id: TenantId) -> int:
        return sum(self._shares.get(tenant_id, _DEFAULT).weights.values())

    def soft(self, tenant_id: TenantId) -> int:
        blocks = self._shares.get(tenant_id, _DEFAULT).soft_blocks
        return self._most_blocks if blocks is None else blocks

    def hard(self, tenant_id: TenantId) -> int:
        blocks = self._shares.get(tenant_id, _DEFAULT).hard_blocks
        return self._most_blocks if blocks is None else max(blocks, self._accepted.get(tenant_id, 0))

    def reserve(self, tenant_id: TenantId) -> int:
        return self._reserves.get(tenant_id, 0)

    @property
    def reserves(self) -> Mapping[TenantId, int]:
        return self._reserves

    @property
    def has_caps(self) -> bool:
        return self._has_caps

    @property
    def has_soft(self) -> bool:
        return self._has_soft

    def check(self, tenant_id: TenantId, longest_blocks: int, block_size: int) -> None:
        """
        Raises:
            QuotaExceeded: its hard cap or others' reserves rule so many blocks out.
        """
        share = self._shares.get(tenant_id, _DEFAULT)
        others = self._reserved_blocks - self._reserves.get(tenant_id, 0)
        left = self._num_blocks - others
        needs = f"the request may come to hold KV of {longest_blocks * block_size} tokens"
        if share.hard_blocks is not None and longest_blocks > share.hard_blocks:
            quota, limit = "quotas.kv_hbm_mb_hard", share.hard_mb
            description = f"{needs}, the tenant's hard cap is {share.hard_blocks * block_size} on a worker"
        elif longest_blocks > left:
            quota, limit = "quotas.kv_hbm_mb_reserve", share.reserve_mb
            description = f"{needs}, other tenants' reserves leave {left * block_size} on a worker"
        else:
            return
        breach = QuotaBreach(quota, tenant_id, limit, description)
        raise QuotaExceeded(f"{quota}: {description}", breaches=[breach])
