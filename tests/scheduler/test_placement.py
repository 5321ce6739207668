"""Placement: locality, the cap, and what stays put when workers come and go."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_scheduler.fleet import Residency, WorkerView
from manylora_scheduler.placement import Placement, load_cap
from manylora_shared.ids import AdapterUid, WorkerId

from tests.scheduler.helpers import report, request


def worker(name: str, *, slots: int = 32, running: int = 0, free: int = 1000, **tiers: Residency) -> WorkerView:
    view = WorkerView(WorkerId(name), f"{name}:1", "cpu", 4096)
    view.fold_capacity(report(snapshot=True, slots=slots, running=running, free=free, adapters=tiers))
    return view


def chosen(workers: list[WorkerView], adapter: str | None = "uid", **what: int) -> str | None:
    found = Placement().choose(request("r", adapter=adapter, **what), workers)  # type: ignore[arg-type]
    return found.worker_id if found is not None else None


def test_nearest_adapter_first() -> None:
    workers = [worker("a", running=1), worker("b", running=2, uid=Residency.HOST), worker("c", running=3)]
    assert chosen(workers) == "b"
    workers[2] = worker("c", running=3, uid=Residency.DEVICE)
    assert chosen(workers) == "c"


def test_a_crowded_worker_is_left_for_one_under_the_cap() -> None:
    workers = [worker("a", running=30, uid=Residency.DEVICE), worker("b", running=2), worker("c", running=2)]
    assert chosen(workers) in ("b", "c")
    assert chosen([worker("a", running=32, uid=Residency.DEVICE), worker("b", running=31)]) == "b"


def test_base_model_requests_go_to_the_least_loaded() -> None:
    assert chosen([worker("a", running=3), worker("b", running=1), worker("c", running=2)], None) == "b"
    assert chosen([worker("a", slots=4, running=2), worker("b", slots=32, running=4)], None) == "b"


def test_no_room_no_worker() -> None:
    assert chosen([worker("a", slots=2, running=2)]) is None
    assert chosen([worker("a", slots=2, running=1)], sequences=2) is None
    assert chosen([worker("a", free=3)], prompt_tokens=60) is None
    assert chosen([worker("a", free=4)], prompt_tokens=60) == "a"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_choice_has_room_and_is_under_the_cap(data: st.DataObject) -> None:
    tiers = st.sampled_from(list(Residency))
    workers = []
    for i in range(data.draw(st.integers(1, 6))):
        slots = data.draw(st.integers(1, 40))
        running = data.draw(st.integers(0, slots))
        workers.append(worker(f"w{i}", slots=slots, running=running, uid=data.draw(tiers)))
    found = Placement().choose(request("r", adapter="uid"), workers)
    open_workers = [w for w in workers if w.free_sequences]
    assert (found is None) == (not open_workers)
    if found is not None:
        cap = max(load_cap(open_workers), found.sequence_slots // 4)
        assert found.used_sequences + 1 <= min(cap, found.sequence_slots)


def test_a_worker_that_leaves_moves_only_what_it_had() -> None:
    placement = Placement()
    workers = [worker(f"w{i}") for i in range(8)]
    uids = [AdapterUid(f"{random.Random(i).getrandbits(256):064x}") for i in range(2_000)]
    before = {uid: placement.home(uid, workers).worker_id for uid in uids}
    left = workers.pop(3)
    after = {uid: placement.home(uid, workers).worker_id for uid in uids}
    moved = [uid for uid in uids if before[uid] != after[uid]]
    assert all(before[uid] == left.worker_id for uid in moved)
    assert len(moved) <= 1.5 * len(uids) / 8


def test_choices_do_not_depend_on_the_order_of_workers() -> None:
    workers = [worker(f"w{i}", running=i % 3) for i in range(6)]
    for seed in range(50):
        shuffled = random.Random(seed).sample(workers, len(workers))
        for uid in ("x", "y", None):
            assert chosen(shuffled, uid) == chosen(workers, uid)


def test_homes_are_the_same_in_every_process() -> None:
    workers = [worker(f"w{i}") for i in range(4)]
    homes = [Placement().home(AdapterUid(uid), workers).worker_id for uid in ("a", "b", "c", "d", "e", "f")]
    assert homes == ["w2", "w0", "w3", "w2", "w1", "w2"]
