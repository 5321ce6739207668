"""What the scheduler knows of each flow besides its place in the fair queue. Pure; written by the core alone.

Owns the shares that follow from policies, and the service, output lengths and last wait of flows served lately.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from manylora_shared.fairness.costs import CHUNK_COST, OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, QUANTUM_TOKENS
from manylora_shared.fairness.seam import Share
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.policy import DEFAULT_WEIGHTS, TenantPolicy

from manylora_scheduler.core.request import (
    FlowKey,
    OutputEstimate,
    QueuedRequest,
    Ticket,
)

BOOSTS: Mapping[QosClass, tuple[int, int]] = {
    QosClass.INTERACTIVE: (CHUNK_COST, 2 * CHUNK_COST),
    QosClass.STANDARD: (0, CHUNK_COST),
    QosClass.BATCH: (0, CHUNK_COST),
}  # (base, cap)
AGING_PER_S = 32  # of a flow's boost: cost per unit of weight
MAX_KNOWN_FLOWS = 262_144  # beyond, the oldest are forgotten


class KnownFlow(OutputEstimate):
    __slots__ = ("is_forgotten", "last_wait_s", "policy_share", "served_cost")

    def __init__(self, policy_share: Share) -> None:
        super().__init__()
        self.policy_share = policy_share
        self.served_cost = 0
        self.last_wait_s = 0.0  # in the queue, of the request that was granted last
        self.is_forgotten = False  # the flow has another record by now, or none

    def expected_cost(self, request: QueuedRequest) -> int:
        expected = self.expect(request.max_new_tokens)
        return _prompt_cost(request) + OUTPUT_TOKEN_COST * expected

    def reservation(self, request: QueuedRequest) -> int:
        """The cost of a request's first units: a chunk of its prompt and a quantum of each sequence."""
        expected = self.expect(request.max_new_tokens)
        output_tokens = min(expected, QUANTUM_TOKENS * request.sequences)
        return min(_prompt_cost(request), CHUNK_COST) + OUTPUT_TOKEN_COST * output_tokens


def _prompt_cost(request: QueuedRequest) -> int:
    return 0 if request.is_resumed else PROMPT_TOKEN_COST * request.prompt_tokens


class Precedence(Protocol):
    """Which flows go before others for the time being."""

    def factor(self, flow: FlowKey) -> int:
        """What the flow's weight is multiplied by, asked when a request of the flow comes or its work is counted."""
        ...

    def goes_beyond(self, flow: FlowKey) -> bool:
        """Whether the flow may be granted beyond workers' free room."""
        ...


_ClassShares = Mapping[QosClass, Share]


class _Records(dict[FlowKey, KnownFlow]):
    # a dict itself: most flows have a record, and finding it takes no call then
    def __init__(self, shares: Mapping[TenantId, _ClassShares], default: _ClassShares) -> None:
        # Both are for reading: `Flows` itself would be a cycle to be collected.
        super().__init__()
        self._shares = shares
        self._default = default

    def policy_share(self, flow: FlowKey) -> Share:
        return self._shares.get(flow.tenant_id, self._default)[flow.qos_class]

    def __missing__(self, flow: FlowKey) -> KnownFlow:
        if len(self) >= MAX_KNOWN_FLOWS:
            self.pop(next(iter(self))).is_forgotten = True
        known = self[flow] = KnownFlow(self.policy_share(flow))
        return known


class Flows:
    def __init__(self) -> None:
        self._shares: dict[TenantId, _ClassShares] = {}
        # each share once: flows by the thousand have few different ones
        self._made: dict[tuple[int, QosClass], Share] = {}
        self._default = {qos_class: self._make(weight, qos_class) for qos_class, weight in DEFAULT_WEIGHTS.items()}
        # For reading; a flow gets a record when it is asked for by `[]`.
        self.known = _Records(self._shares, self._default)
        self.precedence: Precedence | None = None

    def set_policy(self, tenant_id: TenantId, policy: TenantPolicy | None) -> None:
        """None: the tenant has the default weights."""
        if policy is None:
            self._shares.pop(tenant_id, None)
        else:
            self._shares[tenant_id] = {
                qos_class: self._make(policy.weight(qos_class), qos_class) for qos_class in QosClass
            }
        for qos_class in QosClass:
            flow = FlowKey(tenant_id, qos_class)
            known = self.known.get(flow)
            if known is not None:
                known.policy_share = self.known.policy_share(flow)

    def weight(self, flow: FlowKey) -> int:
        """The weight without precedence."""
        return self.known.policy_share(flow).weight

    def share(self, flow: FlowKey) -> Share:
        # Boosts are the same in virtual time.
        known = self.known.get(flow)
        share = known.policy_share if known is not None else self.known.policy_share(flow)
        if self.precedence is None:
            return share
        factor = self.precedence.factor(flow)
        return share if factor == 1 else Share(share.weight * factor, share.base * factor, share.cap * factor)

    def _make(self, weight: int, qos_class: QosClass) -> Share:
        found = self._made.get((weight, qos_class))
        if found is None:
            found = self._made[weight, qos_class] = Share(weight, *BOOSTS[qos_class])
        return found

    def known_of(self, ticket: Ticket) -> KnownFlow:
        known = ticket.known
        if known.is_forgotten:
            known = ticket.known = self.known[ticket.request.flow]
        return known

    def served_cost(self, flow: FlowKey) -> int:
        known = self.known.get(flow)
        return known.served_cost if known is not None else 0

    def last_wait_s(self, flow: FlowKey) -> float:
        known = self.known.get(flow)
        return known.last_wait_s if known is not None else 0.0
