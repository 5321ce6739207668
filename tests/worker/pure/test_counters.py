"""What was done for whom: it only grows, and is told where it changed."""

from __future__ import annotations

from manylora_shared.ids import QosClass
from manylora_worker.engine.counters import FlowTokens, Setbacks, WorkCounters
from manylora_worker.kinds.flow import FlowKey

from tests.worker.pure.rooms import A, B

FLOW: FlowKey = (A, QosClass.STANDARD)
OTHER: FlowKey = (B, QosClass.BATCH)


def test_flows_are_cumulative_and_told_as_they_change() -> None:
    counters = WorkCounters()
    counters.computed(FLOW, 10, 1)
    counters.computed(OTHER, 3, 0)
    assert counters.take_changed_flows() == {FLOW: FlowTokens(10, 1), OTHER: FlowTokens(3, 0)}
    counters.computed(FLOW, 0, 2)
    assert counters.take_changed_flows() == {FLOW: FlowTokens(10, 3)}
    assert counters.take_changed_flows() == {}
    assert counters.flows() == {FLOW: FlowTokens(10, 3), OTHER: FlowTokens(3, 0)}
    assert counters.generated_tokens == 3


def test_what_was_told_does_not_change_afterwards() -> None:
    counters = WorkCounters()
    counters.computed(FLOW, 1, 1)
    told = counters.take_changed_flows()
    counters.computed(FLOW, 1, 1)
    assert told == {FLOW: FlowTokens(1, 1)}


def test_setbacks_add_up_by_tenant_and_over_all() -> None:
    counters = WorkCounters()
    counters.set_back(A, Setbacks(preemptions=1))
    counters.set_back(A, Setbacks(evictions=2, recomputed_tokens=30))
    counters.set_back(B, Setbacks(swaps_out=1))
    assert counters.take_changed_setbacks() == {A: Setbacks(1, 0, 2, 30), B: Setbacks(swaps_out=1)}
    assert counters.setbacks == Setbacks(1, 1, 2, 30)
    counters.set_back(A, Setbacks(preemptions=1))
    assert counters.take_changed_setbacks() == {A: Setbacks(2, 0, 2, 30)}
    assert counters.take_changed_setbacks() == {}
