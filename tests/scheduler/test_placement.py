"""Placement: locality, the cap, and what stays put when workers come and go."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_scheduler.core import placement
from manylora_scheduler.core.fleet import Fleet
from manylora_scheduler.core.flows import KnownFlow
from manylora_scheduler.core.placement import choose, home, in_order, load_cap, spread_cap
from manylora_scheduler.core.reports import Residency
from manylora_scheduler.core.request import Ticket
from manylora_scheduler.core.worker_view import WorkerView
from manylora_shared.fairness.seam import Share
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
        has_it = found.residency(AdapterUid("uid")) is not Residency.ABSENT
        cap = max(spread_cap(fleet) if has_it else load_cap(fleet), found.sequence_slots // 4)
        assert found.slotted_sequences + 1 <= min(cap, found.sequence_slots)


def test_of_an_adapter_that_everybody_has_the_least_loaded_open_workers_are_looked_at() -> None:
    rng = random.Random(3)
    running = {f"w{i:03}": rng.randrange(10, 30) for i in range(4 * placement._MAX_NEAR)}
    running["w077"] = 3
    assert chosen([worker(name, running=n, uid=Residency.DEVICE) for name, n in running.items()]) == "w077"


def test_copies_beyond_the_load_are_used_no_more() -> None:
    """So they leave by themselves: what comes goes to the first in the adapter's order that is not above the mean."""
    names = ["a", "b", "c", "d"]
    order = [w.worker_id for w in in_order(AdapterUid("uid"), fleet_of([worker(n) for n in names]), lambda _: True)]
    first, second, third, last = map(str, order)
    held = {first: 7, second: 6}

    def build(running: dict[str, int]) -> list[Build]:
        return [worker(n, running=running.get(n, 8), **({"uid": Residency.DEVICE} if n in held else {})) for n in names]

    assert chosen(build({first: 6, second: 2})) == first, "though the other one has less to do"
    assert chosen(build({first: 11, second: 2, third: 2, last: 2})) == second, "above the mean"
    assert chosen(build({first: 9, second: 9, third: 4, last: 4})) == first, "no third copy below half above the mean"
    assert chosen(build({first: 16, second: 16, third: 0, last: 0})) in (third, last)


def test_a_cold_adapter_goes_where_its_rank_slows_the_fewest() -> None:
    fleet = fleet_of([worker(f"w{i}", slots=8) for i in range(3)])
    views = {w.worker_id: w for w in fleet.workers}
    order = [w.worker_id for w in in_order(AdapterUid("uid"), fleet, lambda _: True)]

    def run(worker_id: WorkerId, rank: int, number: int) -> None:
        known = KnownFlow(Share(1))
        asked = dataclasses.replace(request(f"{worker_id}-{number}", adapter=f"{rank}"), adapter_rank=rank)
        ticket = Ticket(asked, known, 1, number, 1, 0.0, 0.0)
        ticket.worker_id = worker_id
        views[worker_id].grant(ticket)
        fleet.update(views[worker_id])
        fleet.check_invariants()

    for number in range(2):
        run(order[0], 8, number)
        run(order[1], 64, number)
        run(order[2], 16, number)

    def of(rank: int) -> WorkerId | None:
        found = choose(dataclasses.replace(request("r", adapter="uid"), adapter_rank=rank), fleet, lambda _: True)
        return found.worker_id if found is not None else None

    assert of(64) == order[1]
    assert of(8) == order[0]
    assert of(16) == order[2]
    assert of(0) == order[0], "of a rank that is not known the order decides"


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_of_one_of_a_hundred_workers_moves_no_more_than_it_had(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"w{i:03}" for i in range(100)]
    uids = [f"{rng.getrandbits(256):064x}" for _ in range(600)]
    held = {uid: rng.sample(names, rng.choice((1, 1, 1, 2))) for uid in uids}
    tiers: dict[str, dict[str, Residency]] = {name: {} for name in names}
    for uid, those in held.items():
        for name in those:
            tiers[name][uid] = Residency.DEVICE
    fleet = fleet_of([worker(name, running=10, **tiers[name]) for name in names])

    def places() -> dict[str, str]:
        found = {uid: choose(request("r", adapter=uid), fleet, lambda _: True) for uid in uids}
        return {uid: str(view.worker_id) for uid, view in found.items() if view is not None}

    before = places()
    lost = rng.choice(names)
    fleet.leave(WorkerId(lost))
    after = places()
    moved = {uid for uid in uids if before[uid] != after[uid]}
    assert moved == {uid for uid in uids if before[uid] == lost}
    assert moved <= tiers[lost].keys()


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
