"""Who makes room for whom on a tier, in the order of the module's rules."""

from __future__ import annotations

from manylora_shared.ids import AdapterUid, RequestId
from manylora_worker.adapters.room import Entry, Plan, TierRoom

from tests.worker.pure.adapter_rooms import HOST, on_device, room_of, wanted
from tests.worker.pure.rooms import A, B


def evicted(plan: Plan | None) -> list[str] | None:
    return None if plan is None else [eviction.uid for eviction in plan.evictions]


def plan(room: TierRoom, entry: Entry, now: float = 0.0, *, is_prefetch: bool = False) -> Plan | None:
    standing = room.standing({A: entry.size_bytes}, {})
    return room.plan(entry, A, entry.size_bytes, standing, now, is_prefetch=is_prefetch)


def test_where_there_is_room_nothing_goes() -> None:
    room = room_of()
    on_device(room, "x", 6, b=0.0)
    assert plan(room, wanted("new", 4)) == Plan()


def test_what_nobody_claims_goes_first() -> None:
    room = room_of()
    on_device(room, "claimed", 5, a=0.0)
    on_device(room, "nobodys", 5)
    assert evicted(plan(room, wanted("new", 5))) == ["nobodys"]


def test_above_its_share_a_tenant_gives_its_own_up_and_takes_from_nobody_within() -> None:
    room = room_of()
    on_device(room, "mine", 5, a=9.0)
    on_device(room, "theirs", 5, b=0.0)
    assert evicted(plan(room, wanted("new", 5), now=10.0)) == ["mine"]


def test_a_newcomer_takes_from_who_is_above_its_share_by_idle_time_and_bytes() -> None:
    room = room_of()
    on_device(room, "small", 2, b=0.0)
    on_device(room, "large", 6, b=5.0)
    on_device(room, "fresh", 2, b=9.0)
    assert evicted(plan(room, wanted("new", 2), now=10.0)) == ["large"], "30 byte seconds of idleness against 20"


def test_a_prefetch_takes_nothing_of_its_own_tenant_within_its_share() -> None:
    room = room_of()
    on_device(room, "mine", 3, a=0.0)
    on_device(room, "theirs", 7, b=0.0).pinned_by[B] = None
    assert evicted(plan(room, wanted("new", 2))) == ["mine"]
    assert plan(room, wanted("new", 2), is_prefetch=True) is None


def test_what_is_used_pinned_or_loaded_stays() -> None:
    room = room_of()
    used, pinned, loaded = (on_device(room, name, 3) for name in ("used", "pinned", "loaded"))
    used.users[RequestId("r")] = None
    pinned.pinned_by[B] = None
    loaded.loading = HOST
    assert plan(room, wanted("new", 9)) is None


def test_what_others_wait_for_goes_only_for_one_further_ahead() -> None:
    room = room_of()
    entry = on_device(room, "x", 10)
    entry.queued[B] = 5
    assert plan(room, wanted("new", 3, a=9)) is None
    assert evicted(plan(room, wanted("new", 3, a=2))) == ["x"]


def test_what_was_not_used_for_long_is_lent_and_a_copy_sooner() -> None:
    room = room_of(20)
    on_device(room, "mine", 10, a=0.0).pinned_by[A] = None
    theirs = on_device(room, "theirs", 10, b=0.0)
    assert plan(room, wanted("new", 4), now=9.0) is None
    assert evicted(plan(room, wanted("new", 4), now=10.0)) == ["theirs"], "the host has it still"
    theirs.on_host = False
    assert plan(room, wanted("new", 4), now=59.0) is None
    assert evicted(plan(room, wanted("new", 4), now=60.0)) == ["theirs"]


def test_idle_time_is_reckoned_alike_by_who_takes_and_who_checks() -> None:
    """1.34 + 1.0 <= 2.34, but 2.34 - 1.34 < 1.0."""
    for used_at in (i / 100 for i in range(200)):
        room = room_of(20)
        on_device(room, "mine", 10, a=0.0).pinned_by[A] = None
        theirs = on_device(room, "theirs", 10, b=used_at)
        after_s = room.borrow_after_s(theirs)
        found = plan(room, wanted("new", 4), now=used_at + after_s)
        for eviction in found.evictions if found is not None else ():
            assert all(idle_s >= after_s for _, _, idle_s in eviction.losers.values()), used_at


def test_an_adapter_counts_in_full_against_everybody_that_uses_it() -> None:
    room = room_of()
    on_device(room, "shared", 4, a=0.0, b=0.0)
    on_device(room, "own", 3, b=0.0)
    assert room.held() == {A: 4, B: 7}
    standing = room.standing({A: 5}, {})
    assert standing.shares == {A: 5, B: 5}
    assert standing.is_within(A, 1)
    assert not standing.is_within(A, 2)
    assert not standing.is_within(B)


def test_alone_is_who_claims_nothing_else_but_pins() -> None:
    room = room_of()
    entry = wanted("new", 3)
    assert room.is_alone(A, entry)
    pinned = on_device(room, "x", 3, a=0.0)
    assert not room.is_alone(A, entry)
    assert room.is_alone(A, entry, without=[AdapterUid("x")])
    pinned.pinned_by[A] = None
    assert room.is_alone(A, entry)


def test_an_eviction_says_what_its_loser_had_and_for_how_long_it_was_idle() -> None:
    room = room_of()
    on_device(room, "x", 7, b=3.0)
    on_device(room, "y", 3, b=9.0)
    found = plan(room, wanted("new", 4), now=10.0)
    assert found is not None
    (eviction,) = found.evictions
    assert (eviction.uid, eviction.winner, eviction.losers, eviction.has_copy) == ("x", A, {B: (10, 6, 7.0)}, True)
