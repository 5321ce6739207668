"""How much each tenant asks for, against its share of the cluster. Pure; time is passed in.

A tenant's demand is what it has queued, in full for as long as it is queued; what was refused to it; and what was
granted to it or done for it, whichever is more. The last three fade with DEMAND_WINDOW_S. A *share* is a tenant's
max-min fair part, by weight, of what the cluster can do: of the work that was done, as what was granted may take
minutes. Where all demand is met, the largest by weight is one share. Sums that fade are as of one moment, `_epoch`
(forward decay: Cormode, Shkapenyuk, Srivastava, Xu, ICDE 2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.overload import STACK, STACK_INDEX

from manylora_scheduler.core.request import FlowKey

DEMAND_WINDOW_S = 10.0
SOON_S = 2.0  # what is done in this time stands for the window where that makes more: then who begins has a share
# With this the most that the cluster did in a window fades: giving up too much makes it do less than it can.
CAPACITY_MEMORY_S = 60.0
MAX_TENANTS = 10_000  # The one that came first is forgotten first, and counts as within its share.
SLACK = 1.1  # demand that is so little above what was granted counts as met
DEFAULT_COST = 256.0  # of a request that a router refused, while none of its flow has come here
_MEMORY = 0.1  # of the last request in a flow's mean cost
_NEGLIGIBLE = 1.0
_NO_DEMAND = (0.0, 0.0, 0.0)
_STANDARD = STACK_INDEX[QosClass.STANDARD]
_BUCKETS_PER_OCTAVE = 8
_MAX_EXPONENT = 512.0  # sums are at most 2 to this times what they count
_FORGOTTEN_AT_ONCE = 256
_BROUGHT_UP_AT_ONCE = 512  # tenants whose queued cost is brought up to a weighing's moment; of more, all in turn


class _Tenant:
    __slots__ = ("bucket", "cost", "costs", "done", "granted", "means", "queued", "refused", "weight", "weights")

    def __init__(self, weights: tuple[int, ...]) -> None:
        self.queued = [0.0] * len(STACK)  # this does not fade
        self.refused = [0.0] * len(STACK)  # this and what follows are as of the epoch
        self.granted = [0.0] * len(STACK)
        self.done = [0.0] * len(STACK)
        self.costs = [0.0] * len(STACK)  # all of it, with what is queued as of the last `add_up`
        self.means = [0.0] * len(STACK)  # of a request; 0: none has come
        self.weights = weights
        self.cost = 0.0
        self.weight = 0  # of the flows that it uses
        self.bucket: int | None = None
        self.add_up(0.0)

    def add_up(self, scale: float) -> None:
        sums = zip(self.queued, self.refused, self.granted, self.done, strict=True)
        self.costs = [queued * scale + refused + max(granted, done) for queued, refused, granted, done in sums]
        self.cost = sum(self.costs)
        used = sum(weight for weight, cost in zip(self.weights, self.costs, strict=True) if cost)
        self.weight = used or self.weights[_STANDARD]

    @property
    def by_weight(self) -> float:
        return self.cost / self.weight


class _Bucket:
    """Demand by weight from 2 ** (index / _BUCKETS_PER_OCTAVE) to the next bucket's."""

    __slots__ = ("cost", "tenants", "weight")

    def __init__(self) -> None:
        self.cost = 0.0
        self.weight = 0
        self.tenants: dict[TenantId, _Tenant] = {}


class Demand:
    """Of up to `exact` tenants everything is exact; in a bucket with more the mean stands for each."""

    def __init__(self, weight_of: Callable[[FlowKey], int], exact: int = 256) -> None:
        self._weight_of = weight_of
        self._exact = exact
        self._tenants: dict[TenantId, _Tenant] = {}
        self._buckets: dict[int, _Bucket] = {}
        self._epoch = 0.0
        self._queueing: dict[TenantId, None] = {}  # who has something queued; the first was brought up longest ago
        self._granted = 0.0  # of all tenants, as of the epoch
        self._done = 0.0
        self._most = 0.0
        self._most_at = 0.0
        self._soon = 0.0  # done; it fades with SOON_S
        self._soon_at = 0.0
        self._unit = math.inf  # cost of one share, by unit of weight, as of the epoch

    def __len__(self) -> int:
        return len(self._tenants)

    def rates(self, now: float) -> tuple[float, float]:
        """Cost a second: asked for by all, with what is queued in one window's time; and done."""
        window = self._scale(now) * DEMAND_WINDOW_S
        return sum(bucket.cost for bucket in self._buckets.values()) / window, self._done / window

    def tenants(self) -> Iterator[TenantId]:
        return iter(self._tenants)

    def furthest(self, count: int) -> list[TenantId]:
        """The furthest above their share first; of a bucket with more than `exact`, any."""
        found: list[TenantId] = []
        for index in sorted(self._buckets, reverse=True):
            tenants = self._buckets[index].tenants
            if len(tenants) <= self._exact:
                found += sorted(tenants, key=lambda t: (-tenants[t].by_weight, t))
            else:
                found += islice(tenants, count)
            if len(found) >= count:
                break
        return found[:count]

    def came(self, flow: FlowKey, cost: float, now: float) -> None:
        """It is queued, until `left`."""
        tenant, index = self._tenant(flow.tenant_id), STACK_INDEX[flow.qos_class]
        self._queueing.setdefault(flow.tenant_id)
        self._add(flow.tenant_id, tenant, tenant.queued, index, cost, now)
        mean = tenant.means[index]
        tenant.means[index] = mean + _MEMORY * (cost - mean) if mean else cost

    def left(self, flow: FlowKey, cost: float, now: float, *, is_granted: bool) -> None:
        """What `came` leaves the queue: granted, or given up (by whomever)."""
        tenant, index = self._tenant(flow.tenant_id), STACK_INDEX[flow.qos_class]
        tenant.queued[index] = max(0.0, tenant.queued[index] - cost)
        if not any(tenant.queued):
            self._queueing.pop(flow.tenant_id, None)
        sums = tenant.granted if is_granted else tenant.refused
        self._add(flow.tenant_id, tenant, sums, index, cost * self._scale(now), now)
        if is_granted:
            self.was_granted(cost, now)

    def was_refused(self, flow: FlowKey, requests: int, now: float) -> None:
        tenant, index = self._tenant(flow.tenant_id), STACK_INDEX[flow.qos_class]
        cost = requests * (tenant.means[index] or DEFAULT_COST)
        self._add(flow.tenant_id, tenant, tenant.refused, index, cost * self._scale(now), now)

    def was_done(self, flow: FlowKey, cost: float, now: float) -> None:
        """Work of what was granted, as workers report it."""
        tenant, index = self._tenant(flow.tenant_id), STACK_INDEX[flow.qos_class]
        cost *= self._scale(now)
        self._add(flow.tenant_id, tenant, tenant.done, index, cost, now)
        self._done += cost
        self._soon = self._soon_of(now) + cost / self._scale(now)
        self._soon_at = now
        self._note_most(now)

    def was_granted(self, cost: float, now: float) -> None:
        self._granted += cost * self._scale(now)
        if not self._done:
            self._note_most(now)

    def _soon_of(self, now: float) -> float:
        return self._soon * math.exp(-(now - self._soon_at) / SOON_S)

    def _note_most(self, now: float) -> None:
        # Until there is a word of work, what was granted stands for it.
        self._most = max(self._most_of(now), (self._done or self._granted) / self._scale(now))
        self._most_at = now

    def _most_of(self, now: float) -> float:
        return self._most * math.exp(-(now - self._most_at) / CAPACITY_MEMORY_S)

    def _capacity(self, now: float) -> float:
        """What the cluster can do in a window, as far as is known."""
        return max(self._most_of(now), self._soon_of(now) * DEMAND_WINDOW_S / SOON_S)

    def reweigh(self, tenant_id: TenantId, now: float) -> None:
        tenant = self._tenants.get(tenant_id)
        if tenant is not None:
            self._leave(tenant_id, tenant)
            tenant.weights = self._weights(tenant_id)
            self._enter(tenant_id, tenant, now)

    def weigh(self, now: float) -> None:
        """Finds out anew what a share is."""
        for tenant_id in list(islice(self._queueing, _BROUGHT_UP_AT_ONCE)):
            self._queueing[tenant_id] = self._queueing.pop(tenant_id)  # to the end
            tenant = self._tenants[tenant_id]
            self._leave(tenant_id, tenant)
            self._enter(tenant_id, tenant, now)
        self._forget_negligible(self._scale(now))
        self._unit = self._find_unit(now)

    def _find_unit(self, now: float) -> float:
        if not self._buckets:
            return math.inf
        left = SLACK * self._capacity(now)
        anything = left > _NEGLIGIBLE
        left *= self._scale(now)
        weights = sum(bucket.weight for bucket in self._buckets.values())
        most = 0.0
        for index in sorted(self._buckets):
            bucket = self._buckets[index]
            if len(bucket.tenants) <= self._exact:
                demands = sorted((t.by_weight, t.cost, t.weight) for t in bucket.tenants.values())
            else:
                demands = [(bucket.cost / bucket.weight, bucket.cost, bucket.weight)]
            for by_weight, cost, weight in demands:
                if anything and by_weight * weights > left:
                    return left / weights
                left -= cost
                weights -= weight
                most = max(most, by_weight)
        # All demand is met; or nothing was granted yet, and nobody can be said to be above its share.
        return most

    def tops(self, tenant_id: TenantId) -> tuple[float, float, float]:
        """In the shares of the last `weigh`: interactive, that and standard, all."""
        tenant = self._tenants.get(tenant_id)
        return self._tops(tenant) if tenant is not None else _NO_DEMAND

    def _tops(self, tenant: _Tenant) -> tuple[float, float, float]:
        share = self._unit * tenant.weight
        if share <= 0.0:
            return _NO_DEMAND  # nothing came for so long that it counts for nothing, and nothing was weighed since
        interactive, standard, batch = tenant.costs
        return interactive / share, (interactive + standard) / share, (interactive + standard + batch) / share

    def limit(self, qos_class: QosClass, part: float) -> float:
        """The height below which `part` of the class's demand is."""
        index = STACK_INDEX[qos_class]
        bends: list[tuple[float, float]] = []  # at each height, by how much more cost there is in a share
        total = 0.0
        for tenant, stands_for in self._sample():
            tops = self._tops(tenant)
            below, top = tops[index - 1] if index else 0.0, tops[index]
            if top > below:
                share = self._unit * tenant.weight * stands_for
                bends += [(below, share), (top, -share)]
                total += (top - below) * share
        bends.sort()
        wanted, height, density = part * total, 0.0, 0.0
        for bend, change in bends:
            step = density * (bend - height)
            if step >= wanted and density > 0.0:
                return height + wanted / density
            wanted -= step
            height, density = bend, density + change
        return height

    def _sample(self) -> Iterator[tuple[_Tenant, float]]:
        # Each tenant comes with the number of tenants that it stands for.
        if len(self._tenants) <= 2 * self._exact:
            for tenant in self._tenants.values():
                yield tenant, 1.0
            return
        furthest = dict.fromkeys(self.furthest(self._exact))
        for tenant_id in furthest:
            yield self._tenants[tenant_id], 1.0
        stride = -(-len(self._tenants) // self._exact)
        others = [t for t in islice(self._tenants, 0, None, stride) if t not in furthest]
        stands_for = (len(self._tenants) - len(furthest)) / max(1, len(others))
        for tenant_id in others:
            yield self._tenants[tenant_id], stands_for

    # ---- books

    def _weights(self, tenant_id: TenantId) -> tuple[int, ...]:
        return tuple(self._weight_of(FlowKey(tenant_id, qos_class)) for qos_class in STACK)

    def _tenant(self, tenant_id: TenantId) -> _Tenant:
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            if len(self._tenants) >= MAX_TENANTS:
                self._forget(next(iter(self._tenants)))
            tenant = self._tenants[tenant_id] = _Tenant(self._weights(tenant_id))
            self._enter(tenant_id, tenant, self._epoch)
        return tenant

    def _add(
        self, tenant_id: TenantId, tenant: _Tenant, sums: list[float], index: int, cost: float, now: float
    ) -> None:
        self._scale(now)
        self._leave(tenant_id, tenant)
        sums[index] += cost
        self._enter(tenant_id, tenant, now)

    def _forget(self, tenant_id: TenantId) -> None:
        self._leave(tenant_id, self._tenants.pop(tenant_id))
        self._queueing.pop(tenant_id, None)

    def _forget_negligible(self, scale: float) -> None:
        # Only tenants in the lowest buckets go, some at a time.
        end = _bucket_of(_NEGLIGIBLE * scale)
        looked_at = 0
        for index in sorted(index for index in self._buckets if index <= end):
            tenants = self._buckets[index].tenants
            some = list(islice(tenants, _FORGOTTEN_AT_ONCE - looked_at))
            looked_at += len(some)
            for tenant_id in some:
                if tenants[tenant_id].cost < _NEGLIGIBLE * scale:
                    self._forget(tenant_id)

    def _enter(self, tenant_id: TenantId, tenant: _Tenant, now: float) -> None:
        tenant.add_up(_scale_at(now - self._epoch))
        tenant.bucket = _bucket_of(tenant.by_weight)
        bucket = self._buckets.get(tenant.bucket)
        if bucket is None:
            bucket = self._buckets[tenant.bucket] = _Bucket()
        bucket.tenants[tenant_id] = tenant
        bucket.cost += tenant.cost
        bucket.weight += tenant.weight

    def _leave(self, tenant_id: TenantId, tenant: _Tenant) -> None:
        assert tenant.bucket is not None
        bucket = self._buckets[tenant.bucket]
        del bucket.tenants[tenant_id]
        bucket.cost -= tenant.cost
        bucket.weight -= tenant.weight
        if not bucket.tenants:
            del self._buckets[tenant.bucket]  # and with it what rounding left in its sum

    def _scale(self, now: float) -> float:
        # Cost of this moment counts this much in the sums.
        exponent = (now - self._epoch) / (DEMAND_WINDOW_S * math.log(2.0))
        if exponent > _MAX_EXPONENT:
            shift = math.floor(exponent)
            self._epoch += shift * DEMAND_WINDOW_S * math.log(2.0)
            self._unit, self._granted, self._done = (
                math.ldexp(cost, -shift) for cost in (self._unit, self._granted, self._done)
            )
            self._buckets.clear()
            for tenant_id, tenant in self._tenants.items():
                for sums in (tenant.refused, tenant.granted, tenant.done):
                    sums[:] = [math.ldexp(cost, -shift) for cost in sums]
                self._enter(tenant_id, tenant, now)
            exponent -= shift
        return float(2.0**exponent)

    def check_invariants(self) -> None:
        assert sum(len(bucket.tenants) for bucket in self._buckets.values()) == len(self._tenants)
        for index, bucket in self._buckets.items():
            assert bucket.tenants
            assert bucket.weight == sum(tenant.weight for tenant in bucket.tenants.values())
            assert math.isclose(
                bucket.cost, sum(sum(t.costs) for t in bucket.tenants.values()), rel_tol=1e-6, abs_tol=1e-6
            )
            for tenant_id, tenant in bucket.tenants.items():
                assert any(tenant.queued) == (tenant_id in self._queueing)
                assert self._tenants[tenant_id] is tenant
                assert tenant.bucket == index == _bucket_of(tenant.by_weight)


def _bucket_of(by_weight: float) -> int:
    if by_weight <= 0.0:
        return -1_000_000
    return math.floor(_BUCKETS_PER_OCTAVE * math.log2(by_weight))


def _scale_at(after_s: float) -> float:
    return math.exp(after_s / DEMAND_WINDOW_S)
