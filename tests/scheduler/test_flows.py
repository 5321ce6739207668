"""What the scheduler knows of each flow: shares by policy, and what its requests are expected to cost."""

from __future__ import annotations

import pytest
from manylora_scheduler.core import flows as flows_module
from manylora_scheduler.core.flows import BOOSTS, Flows, KnownFlow
from manylora_scheduler.core.request import FlowKey, Ticket
from manylora_shared.fairness.costs import CHUNK_COST, OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, QUANTUM_TOKENS
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.policy import DEFAULT_WEIGHTS, ClassPolicy, TenantPolicy

from tests.scheduler.helpers import flow, request

ACME = TenantId("acme")


def policy(weight: int) -> TenantPolicy:
    classes = {qos_class: ClassPolicy(weight=weight) for qos_class in QosClass}
    return TenantPolicy(ACME, classes=classes)


def test_a_policy_counts_for_known_and_unknown_flows_and_ends_with_it() -> None:
    flows = Flows()
    known = flows.known[flow("acme", QosClass.BATCH)]
    flows.set_policy(ACME, policy(7))
    assert known.policy_share.weight == 7
    assert flows.weight(flow("acme")) == 7
    assert flows.weight(flow("other")) == DEFAULT_WEIGHTS[QosClass.STANDARD]
    flows.set_policy(ACME, None)
    assert known.policy_share.weight == DEFAULT_WEIGHTS[QosClass.BATCH]


def test_a_share_has_the_boosts_of_its_class_and_precedence_multiplies_all_three() -> None:
    class Doubled:
        def factor(self, flow: FlowKey) -> int:
            return 2

        def goes_beyond(self, flow: FlowKey) -> bool:
            return True

    flows = Flows()
    key = flow("acme", QosClass.INTERACTIVE)
    before = flows.share(key)
    assert (before.base, before.cap) == BOOSTS[QosClass.INTERACTIVE]
    flows.precedence = Doubled()
    assert flows.share(key) == tuple(2 * part for part in before)
    assert flows.weight(key) == before.weight, "the policy's weight stays"


def test_a_request_reserves_its_first_chunk_and_a_quantum_of_each_sequence() -> None:
    known = Flows().known[flow()]
    long = request("r", prompt_tokens=10 * CHUNK_COST, max_new_tokens=1000, sequences=3)
    assert known.reservation(long) == CHUNK_COST + 3 * QUANTUM_TOKENS * OUTPUT_TOKEN_COST
    assert known.expected_cost(long) == 10 * CHUNK_COST * PROMPT_TOKEN_COST + 1000 * OUTPUT_TOKEN_COST
    short = request("r", prompt_tokens=5, max_new_tokens=4)
    assert known.reservation(short) == known.expected_cost(short) == 5 * PROMPT_TOKEN_COST + 4 * OUTPUT_TOKEN_COST


def test_the_oldest_record_makes_room_and_its_tickets_find_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows_module, "MAX_KNOWN_FLOWS", 2)
    flows = Flows()
    first: KnownFlow = flows.known[flow("t0")]
    ticket = Ticket(request("r", tenant="t0"), first, 1, 0, 1, 0.0, 0.0)
    assert flows.known_of(ticket) is first
    for i in (1, 2):
        flows.known[flow(f"t{i}")].served_cost = i
    assert first.is_forgotten
    assert len(flows.known) == 2
    assert (flows.served_cost(flow("t0")), flows.served_cost(flow("t2"))) == (0, 2)
    again = flows.known_of(ticket)
    assert again is not first
    assert again is flows.known[flow("t0")] is ticket.known
