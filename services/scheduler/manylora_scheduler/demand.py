"""How much each tenant asks for, against what its share of the cluster is. Pure; time is passed in.

Owns sums of cost that fade with DEMAND_WINDOW_S: what each tenant's requests of each class would cost that came lately
(those that routers refused included), and what was granted lately over all. A tenant's *share* is what max-min fairness
by weight gives it of what was granted: nobody's share is larger than its demand while another's is not met. Where all
demand is met, the largest demand by weight counts as one share, so that nobody is above its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from manylora_shared.ids import QosClass, TenantId
from manylora_shared.overload import STACK

from manylora_scheduler.request import FlowKey

DEMAND_WINDOW_S = 10.0
CAPACITY_MEMORY_S = 60.0
"""What the cluster can do is the most that it did in a window, and fades with this: while it gives up more than it
must, it does less than it can, and that must not make shares look smaller."""
MAX_TENANTS = 10_000
"""Of which the demand is known; the one that came first is forgotten first, and counts as one within its share."""
SLACK = 1.1
"""Demand that is so little above what was granted counts as met: both are sums over the same window, not of the same
requests."""
DEFAULT_COST = 256.0
"""Of a request of which a router told only that it refused it, while none of its flow has come here."""
_MEMORY = 0.1
"""The weight of the last request in a flow's mean cost."""
_NEGLIGIBLE = 1.0
_NO_DEMAND = (0.0, 0.0, 0.0)
_STANDARD = STACK.index(QosClass.STANDARD)


class _Tenant:
    __slots__ = ("at", "costs", "means", "tops", "weights")

    def __init__(self, now: float, weights: tuple[int, ...]) -> None:
        self.costs = [0.0] * len(STACK)
        """By class, as of `at`."""
        self.means = [0.0] * len(STACK)
        """Cost of a request; 0: none has come."""
        self.weights = weights
        self.tops = _NO_DEMAND
        self.at = now

    def advance(self, now: float) -> None:
        if now != self.at:
            factor = _faded(now - self.at)
            interactive, standard, batch = self.costs
            self.costs = [interactive * factor, standard * factor, batch * factor]
            self.at = now

    @property
    def weight(self) -> int:
        """Of the flows that it uses."""
        used = sum(weight for weight, cost in zip(self.weights, self.costs, strict=True) if cost)
        return used or self.weights[_STANDARD]

    def weigh(self, unit: float) -> None:
        share = unit * self.weight
        interactive, standard, batch = self.costs
        self.tops = interactive / share, (interactive + standard) / share, (interactive + standard + batch) / share


class Demand:
    """
    Args:
        weight_of: a flow's weight.
    """

    def __init__(self, weight_of: Callable[[FlowKey], int]) -> None:
        self._weight_of = weight_of
        self._tenants: dict[TenantId, _Tenant] = {}
        self._granted = 0.0
        self._granted_at = 0.0
        self._most = 0.0
        """The largest `_granted` of late."""
        self._most_at = 0.0
        self._unit = math.inf
        """Cost of one share, by unit of weight."""

    def __len__(self) -> int:
        return len(self._tenants)

    def tenants(self) -> Collection[TenantId]:
        """Those with demand."""
        return self._tenants.keys()

    def came(self, flow: FlowKey, cost: float, now: float) -> None:
        """A request asks to be queued."""
        tenant, index = self._tenant(flow.tenant_id, now), STACK.index(flow.qos_class)
        tenant.costs[index] += cost
        mean = tenant.means[index]
        tenant.means[index] = mean + _MEMORY * (cost - mean) if mean else cost

    def was_refused(self, flow: FlowKey, requests: int, now: float) -> None:
        """Routers refused so many requests, whose sizes they do not know."""
        tenant, index = self._tenant(flow.tenant_id, now), STACK.index(flow.qos_class)
        tenant.costs[index] += requests * (tenant.means[index] or DEFAULT_COST)

    def was_granted(self, cost: float, now: float) -> None:
        self._granted = self._granted * _faded(now - self._granted_at) + cost
        self._granted_at = now
        self._most = max(self._most * math.exp(-(now - self._most_at) / CAPACITY_MEMORY_S), self._granted)
        self._most_at = now

    def reweigh(self, tenant_id: TenantId) -> None:
        """The tenant's weights have changed."""
        tenant = self._tenants.get(tenant_id)
        if tenant is not None:
            tenant.weights = self._weights(tenant_id)

    def weigh(self, now: float) -> None:
        """Finds out anew what a share is: O(n log n) for n tenants with demand."""
        self._unit = self._find_unit(now)
        for tenant in self._tenants.values():
            tenant.weigh(self._unit)

    def _find_unit(self, now: float) -> float:
        demands: list[tuple[float, float, int]] = []
        for tenant_id, tenant in list(self._tenants.items()):
            tenant.advance(now)
            cost = sum(tenant.costs)
            if cost < _NEGLIGIBLE:
                del self._tenants[tenant_id]
                continue
            weight = tenant.weight
            demands.append((cost / weight, cost, weight))
        demands.sort()
        left = SLACK * self._most * math.exp(-(now - self._most_at) / CAPACITY_MEMORY_S)
        weights = sum(weight for *_, weight in demands)
        for by_weight, cost, weight in demands:
            if by_weight * weights > left:
                # Where nothing was granted yet nobody can be said to be above its share.
                return left / weights if left > _NEGLIGIBLE else demands[-1][0]
            left -= cost
            weights -= weight
        return demands[-1][0] if demands else math.inf

    def tops(self, tenant_id: TenantId) -> tuple[float, float, float]:
        """The tenant's demand in shares, as of the last `weigh`: interactive, that and standard, all."""
        tenant = self._tenants.get(tenant_id)
        return tenant.tops if tenant is not None else _NO_DEMAND

    def limit(self, qos_class: QosClass, part: float) -> float:
        """The height below which `part` of the class's demand is, over all tenants: O(n log n)."""
        index = STACK.index(qos_class)
        bends: list[tuple[float, float]] = []  # at each height, by how much more cost there is in a share
        total = 0.0
        for tenant in self._tenants.values():
            below, top = tenant.tops[index - 1] if index else 0.0, tenant.tops[index]
            if top > below:
                share = self._unit * tenant.weight
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

    def _weights(self, tenant_id: TenantId) -> tuple[int, ...]:
        return tuple(self._weight_of(FlowKey(tenant_id, qos_class)) for qos_class in STACK)

    def _tenant(self, tenant_id: TenantId, now: float) -> _Tenant:
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            if len(self._tenants) >= MAX_TENANTS:
                del self._tenants[next(iter(self._tenants))]
            tenant = self._tenants[tenant_id] = _Tenant(now, self._weights(tenant_id))
        tenant.advance(now)
        return tenant


def _faded(seconds: float) -> float:
    return math.exp(-seconds / DEMAND_WINDOW_S)
