"""Whose load begins next: by bytes loaded, since each began to wait."""

from __future__ import annotations

from manylora_shared.ids import TenantId
from manylora_worker.adapters.load_order import LoadOrder
from manylora_worker.adapters.room import Entry

from tests.worker.pure.adapter_rooms import wanted
from tests.worker.pure.rooms import A, B


def order_of(weights: dict[TenantId, int] | None = None) -> LoadOrder:
    return LoadOrder(lambda tenant: (weights or {}).get(tenant, 1))


def add(order: LoadOrder, tenant: TenantId, name: str) -> Entry:
    entry = wanted(name, 1)
    order.add(tenant, entry)
    order.check_invariants()
    return entry


def begin(order: LoadOrder, num_bytes: int) -> str:
    tenant, entry = next(order.take())
    order.charge(tenant, num_bytes)
    order.remove(tenant, entry)
    order.check_invariants()
    return entry.uid


def test_who_had_fewer_bytes_loaded_goes_first() -> None:
    order = order_of()
    for i in range(3):
        add(order, A, f"a{i}")
        add(order, B, f"b{i}")
    assert [begin(order, size) for size in (30, 10, 10, 10)] == ["a0", "b0", "b1", "b2"]
    assert begin(order, 1) == "a1"


def test_twice_the_weight_is_twice_the_bytes() -> None:
    order = order_of({A: 2})
    for i in range(9):
        add(order, A, f"a{i}")
        add(order, B, f"b{i}")
    begun = [begin(order, 10)[0] for _ in range(9)]
    assert (begun.count("a"), begun.count("b")) == (6, 3)


def test_waiting_twice_for_the_same_is_no_difference() -> None:
    order = order_of()
    entry = add(order, A, "x")
    version = order.version
    order.add(A, entry)
    assert (order.version, len(order.queues[A])) == (version, 1)
    order.add(B, entry)
    assert order.remove(A, entry)
    assert not order.remove(A, entry)
    assert list(order.queues) == [B]
    assert order.remove(B, entry)
    assert not order


def test_all_that_waits_is_seen_once_and_what_leaves_meanwhile_is_left_out() -> None:
    order = order_of()
    first = add(order, A, "a0")
    gone = add(order, A, "a1")
    add(order, B, "b0")
    add(order, A, "a2")
    seen = []
    for tenant, entry in order.take():
        seen.append((tenant, entry.uid))
        if entry is first:
            order.remove(A, gone)
    assert seen == [(A, "a0"), (A, "a2"), (B, "b0")]


def test_a_load_that_begins_passes_the_turn_on() -> None:
    order = order_of()
    for tenant, name in ((A, "a0"), (A, "a1"), (B, "b0")):
        add(order, tenant, name)
    seen = []
    for tenant, entry in order.take():
        seen.append(entry.uid)
        if entry.uid == "a0":
            order.charge(tenant, 5)
            order.remove(tenant, entry)
    assert seen == ["a0", "b0", "a1"]
