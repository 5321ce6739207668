"""Placement: locality, the cap, and what stays put when workers come and go."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_scheduler.core import placement
from manylora_scheduler.core.fleet import Fleet
from manylora_scheduler.core.placement import choose, home, in_order, load_cap
from manylora_scheduler.core.reports import Residency
from manylora_scheduler.core.worker_view import WorkerView
from manylora_shared.ids import AdapterUid, WorkerId

from tests.scheduler.helpers import report, request

Build = Callable[[Fleet], WorkerView]


def worker(name: str, *, slots: int = 32, running: int = 0, free: int = 1000, **tiers: Residency) -> Build:
    def build(fleet: Fleet) -> WorkerView:
        view = fleet.join(WorkerId(name), f"{name}:1", "cpu", 4096)
        view.fold_capacity(report(snapshot=True, slots=slots, running=running, free=free, adapters=tiers))
        fleet.update(view)
        return view

    return build


def fleet_of(workers: list[Build]) -> Fleet:
    fleet = Fleet()
    for build in workers:
        build(fleet)
    fleet.check_invariants()
    return fleet


def chosen(workers: list[Build], adapter: str | None = "uid", **what: int) -> str | None:
    found = choose(request("r", adapter=adapter, **what), fleet_of(workers), lambda _: True)  # type: ignore[arg-type]
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


def test_room_counts_before_the_cap() -> None:
    """The least loaded have no blocks: one above the cap is better than none."""
    workers = [worker("a", running=1, free=0), worker("b", running=0, free=0), worker("c", running=20)]
    assert chosen(workers, prompt_tokens=60) == "c"


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_choice_has_room_and_is_under_the_cap(data: st.DataObject) -> None:
    tiers = st.sampled_from(list(Residency))
    workers = []
    for i in range(data.draw(st.integers(1, 24))):
        slots = data.draw(st.integers(1, 40))
        running = data.draw(st.integers(0, slots))
        workers.append(worker(f"w{i}", slots=slots, running=running, uid=data.draw(tiers)))
    fleet = fleet_of(workers)
    found = choose(request("r", adapter="uid"), fleet, lambda _: True)
    assert (found is None) == (fleet.num_open == 0)
    if found is not None:
        cap = max(load_cap(fleet), found.sequence_slots // 4)
        assert found.slotted_sequences + 1 <= min(cap, found.sequence_slots)


def test_of_an_adapter_that_everybody_has_the_least_loaded_open_workers_are_looked_at() -> None:
    rng = random.Random(3)
    running = {f"w{i:03}": rng.randrange(10, 30) for i in range(4 * placement._MAX_NEAR)}
    running["w077"] = 3
    assert chosen([worker(name, running=n, uid=Residency.DEVICE) for name, n in running.items()]) == "w077"


def test_a_worker_that_leaves_moves_only_what_it_had() -> None:
    fleet = fleet_of([worker(f"w{i}") for i in range(8)])
    uids = [AdapterUid(f"{random.Random(i).getrandbits(256):064x}") for i in range(2_000)]

    def homes() -> dict[AdapterUid, WorkerId]:
        found = {uid: next(in_order(uid, fleet, lambda _: True)) for uid in uids}
        return {uid: view.worker_id for uid, view in found.items()}

    before = homes()
    fleet.leave(WorkerId("w3"))
    after = homes()
    moved = [uid for uid in uids if before[uid] != after[uid]]
    assert all(before[uid] == "w3" for uid in moved)
    assert len(moved) <= 1.5 * len(uids) / 8
    fleet.join(WorkerId("w3"), "w3:1", "cpu", 4096)
    assert homes() == before


def test_few_open_workers_and_many_are_in_the_same_order() -> None:
    fleet = fleet_of([worker(f"w{i}") for i in range(12)])
    assert fleet.num_open <= placement._FEW
    for i in range(200):
        uid = AdapterUid(f"{random.Random(i).getrandbits(256):064x}")
        assert home(uid, fleet, lambda _: True) is next(in_order(uid, fleet, lambda _: True))


def test_choices_do_not_depend_on_the_order_of_workers() -> None:
    workers = [worker(f"w{i}", running=i % 3) for i in range(6)]
    for seed in range(50):
        shuffled = random.Random(seed).sample(workers, len(workers))
        for uid in ("x", "y", None):
            assert chosen(shuffled, uid) == chosen(workers, uid)


def test_homes_are_the_same_in_every_process() -> None:
    fleet = fleet_of([worker(f"w{i}") for i in range(4)])
    homes = [home(AdapterUid(uid), fleet, lambda _: True) for uid in ("a", "b", "c", "d", "e", "f")]
    assert [w.worker_id for w in homes if w is not None] == ["w1", "w1", "w2", "w1", "w3", "w1"]
