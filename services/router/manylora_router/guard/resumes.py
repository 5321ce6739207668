"""How many answers of a tenant other workers go on with after theirs was lost. Pure; owns a bucket a tenant.

Work done twice is the service's cost; whose requests bring workers down, again and again, must not make it without end.
Moves off a worker that stops are not counted.
"""

from __future__ import annotations

from manylora_shared.ids import TenantId
from manylora_shared.tenancy.policy import TenantQuotas
from manylora_shared.tenancy.quota import TokenBucket, to_ns

RESUMES_PER_S = 10  # where the policy says nothing
RESUMES_BURST = 1_000
MAX_TENANTS = 10_000


class Resumes:
    def __init__(self) -> None:
        self._buckets: dict[TenantId, TokenBucket] = {}  # who took last stands last

    def take(self, tenant_id: TenantId, quotas: TenantQuotas, now: float) -> bool:
        """Whether one more answer is gone on with."""
        now_ns = to_ns(now)
        rate, burst = _bounds(quotas)
        bucket = self._buckets.pop(tenant_id, None)
        if bucket is None:
            bucket = TokenBucket(rate, burst, now_ns, level=burst)
        elif (bucket.rate, bucket.burst) != (rate, burst):
            bucket.change(rate, burst, now_ns)
        self._buckets[tenant_id] = bucket
        if len(self._buckets) > MAX_TENANTS:
            del self._buckets[next(iter(self._buckets))]
        if bucket.wait_ns(1, now_ns):
            return False
        bucket.take(1, now_ns)
        return True


def _bounds(quotas: TenantQuotas) -> tuple[int, int]:
    if quotas.resumes_per_s is None:
        return RESUMES_PER_S, RESUMES_BURST
    return quotas.resumes_per_s, quotas.resumes_burst or quotas.resumes_per_s
