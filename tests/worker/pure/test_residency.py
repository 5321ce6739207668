"""Which adapter is on which tier, and the loads between them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from manylora_shared.ids import AdapterUid, RequestId
from manylora_sim.fake_runner import FakeAdapterBackend
from manylora_worker.adapters import residency as residency_module
from manylora_worker.adapters.residency import Residency
from manylora_worker.adapters.room import Entry, Eviction, Plan
from manylora_worker.kinds.api import AdapterEvent

from tests.worker.pure.adapter_rooms import DEVICE, HOST, room_of
from tests.worker.pure.rooms import A, B


def make(errors: Sequence[str] = ()) -> tuple[Residency, FakeAdapterBackend]:
    backend = FakeAdapterBackend(lambda: 0.0, error_of=lambda uid, tier: "broken" if uid in errors else None)
    rooms = {HOST: room_of(20, HOST), DEVICE: room_of(10)}
    return Residency(backend, rooms, {HOST: 2, DEVICE: 1}), backend


def loaded(residency: Residency, backend: FakeAdapterBackend, name: str, size_bytes: int = 4) -> Entry:
    entry = residency.entry(AdapterUid(name))
    entry.waiters[RequestId("waits")] = A
    residency.touch(entry, A, 1.0)
    for tier in (HOST, DEVICE):
        residency.begin_load(entry, tier)
        (event,) = backend.poll()
        residency.learn_size(entry, size_bytes)
        residency.end_load(event)
        residency.check_invariants()
    entry.waiters.clear()
    return entry


def test_an_adapter_goes_up_tier_by_tier_and_counts_where_it_is() -> None:
    residency, backend = make()
    entry = loaded(residency, backend, "x")
    assert residency.tiers() == {entry.uid: DEVICE}
    assert [residency.rooms[tier].used_bytes for tier in (HOST, DEVICE)] == [4, 4]
    before = residency.version
    residency.drop(entry, DEVICE)
    assert residency.tiers() == {entry.uid: HOST}
    assert residency.version > before
    assert list(backend.on_device) == []


def test_loads_are_bounded_by_tier() -> None:
    residency, _ = make()
    for name in ("x", "y"):
        assert residency.may_load(HOST)
        residency.begin_load(residency.entry(AdapterUid(name)), HOST)
    assert not residency.may_load(HOST)
    assert residency.may_load(DEVICE)
    assert residency.num_loading == 2


def test_a_load_that_failed_leaves_nothing() -> None:
    residency, backend = make(errors=["x"])
    entry = residency.entry(AdapterUid("x"))
    residency.begin_load(entry, HOST)
    (event,) = backend.poll()
    residency.end_load(event)
    assert (entry.on_host, residency.num_loading, residency.rooms[HOST].used_bytes) == (False, 0, 0)
    residency.forget_if_unused(entry)
    assert residency.entries == {}
    with pytest.raises(KeyError):
        residency.end_load(AdapterEvent(AdapterUid("x"), HOST))


def test_a_size_is_remembered_when_the_adapter_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "_KNOWN_SIZES", 2)
    residency, _ = make()
    for name, size in (("x", 5), ("y", 6), ("z", 7)):
        entry = residency.entry(AdapterUid(name))
        assert residency.learn_size(entry, size)
        assert not residency.learn_size(entry, size)
        residency.forget_if_unused(entry)
    assert [residency.size_of(AdapterUid(name)) for name in "xyz"] == [0, 6, 7], "so many, and no more"
    assert residency.entry(AdapterUid("y")).size_bytes == 6
    assert residency.load_cost(residency.entry(AdapterUid("new"))) == 7, "as what was learned last"


def test_an_eviction_counts_for_who_had_it_and_whether_it_was_for_another() -> None:
    residency, backend = make()
    first, second = loaded(residency, backend, "x"), loaded(residency, backend, "y")
    for entry, winner in ((first, A), (second, B)):
        eviction = Eviction(entry.uid, DEVICE, winner, {A: (8, 4, 0.0)}, 0.0, has_copy=True)
        residency.make_way(Plan([eviction]), residency.rooms[DEVICE], winner)
    assert residency.evicted() == {A: (2, 1)}
    assert [e.uid for e in residency.take_evictions()] == ["x", "y"]
    assert residency.take_evictions() == []


def test_who_is_within_its_share_loses_nothing_that_it_uses() -> None:
    residency, backend = make()
    entry = loaded(residency, backend, "x")
    eviction = Eviction(entry.uid, DEVICE, B, {A: (4, 4, 0.0)}, 0.0, has_copy=True)
    with pytest.raises(AssertionError, match="within its share"):
        residency.make_way(Plan([eviction]), residency.rooms[DEVICE], B)


def test_the_last_use_is_when_it_ended() -> None:
    residency, backend = make()
    entry = loaded(residency, backend, "x")
    entry.users[RequestId("r")] = None
    before = residency.idle_version
    residency.end_use(entry, RequestId("r"), A, 9.0)
    assert entry.claims[DEVICE] == {A: 9.0}
    assert residency.idle_version == before + 1
